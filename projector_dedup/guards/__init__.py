"""The session and connection that a handler is given, and the guard that watches both: invariants I4 and I6.

This file is the only door to the package.
"""

from .claim_transaction import ClaimTransaction
from .guard import Guard
from .locking import LockingSession, locking_session
from .session import GuardedSession, end_message, guarded_session

__all__ = [
    "ClaimTransaction",
    "Guard",
    "GuardedSession",
    "LockingSession",
    "end_message",
    "guarded_session",
    "locking_session",
]
