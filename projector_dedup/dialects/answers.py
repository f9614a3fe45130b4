"""What a database answers with: what an error of its means, and how a transaction stands."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum


class Failure(Enum):
    """What a database error means for the unit of work that met it."""

    TRANSIENT = "transient"  #: nobody's fault: run the whole unit of work again
    READ_ONLY = "read only"  #: transient, but not on this connection: another server has become the primary
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
    for each in _driver_errors(error):
        value = getattr(each, "sqlstate", None) or getattr(each, "pgcode", None)
        if isinstance(value, str):
            return value
    return None


def routine_of(error: Exception) -> str | None:
    """The function of the server's that raised the error, which PostgreSQL names in each; None if it said nothing."""
    for each in _driver_errors(error):
        said = getattr(each, "diag", each)  # psycopg has it in there
        value = getattr(said, "source_function", None) or getattr(said, "server_source_function", None)
        if isinstance(value, str):
            return value
    return None


def _driver_errors(error: Exception) -> Iterator[object]:
    """The driver's own. asyncpg's is the cause of SQLAlchemy's stand-in, which does not always have its SQLSTATE."""
    original = getattr(error, "orig", error)
    yield original
    if type(original).__module__.startswith("sqlalchemy."):
        yield original.__cause__
