"""What a handler is given, and what watches it: invariants I4 and I6. This file is the only door to the package."""

from .claim_transaction import ClaimedMarker
from .guard import Guard
from .locking import locking_session
from .session import GuardedSession, guarded_session

__all__ = ["ClaimedMarker", "Guard", "GuardedSession", "guarded_session", "locking_session"]
