"""What a database answers with: what an error of its means, and how a transaction stands."""

from __future__ import annotations

from enum import Enum


class Failure(Enum):
    """What a database error means for the unit of work that met it."""

    TRANSIENT = "transient"  #: nobody's fault: run the whole unit of work again
    LOCK_TIMEOUT = "lock timeout"  #: transient, but on a claim with claim_timeout it means InProgress
    UNIQUE = "unique"  #: a rival may have created the row: run again, a few times
    NO_TABLE = "no table"  #: on a claim: the marker table is missing, or not ours
    PERMANENT = "permanent"  #: running again would fail again


class Status(Enum):
    """The transaction, as the driver knows it without asking the server."""

    OPEN = "open"  #: or the driver cannot tell
    ABORTED = "aborted"
    NONE = "none"
    BUSY = "busy"  #: a statement was interrupted half-way, or the connection is gone


def sqlstate_of(error: Exception) -> str | None:
    """What the server said; psycopg2 calls it pgcode. None if the server said nothing: the connection was lost."""
    driver_error = getattr(error, "orig", error)
    value = getattr(driver_error, "sqlstate", None) or getattr(driver_error, "pgcode", None)
    return value if isinstance(value, str) else None
