"""Define the answers of a dialect: what an error of the database means, and how a transaction stands."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum


class Failure(Enum):
    """Says what a database error means for the unit of work that met it."""

    TRANSIENT = "transient"  #: no bug, it passes: run the whole unit of work again
    READ_ONLY = "read only"  #: transient, but not on this connection: another server has become the primary
    LOCK_TIMEOUT = "lock timeout"  #: transient, but on a claim with claim_timeout it means InProgress
    UNIQUE = "unique"  #: a rival may have created the row: run again, a few times
    LATER = "later"  #: passes, but hardly within seconds: a full disk, a statement that somebody cancelled
    NO_TABLE = "no table"  #: on a claim: the marker table is missing, or not ours
    PERMANENT = "permanent"  #: running again would fail again


class Status(Enum):
    """Says how the transaction stands, as the driver knows it without asking the server."""

    OPEN = "open"  #: a transaction is open, or the driver cannot tell
    ABORTED = "aborted"  #: an error aborted the transaction: the server accepts no statement but ROLLBACK
    NONE = "none"  #: no transaction is open
    BUSY = "busy"  #: a statement was interrupted half-way, or the connection is gone


def sqlstate_of(error: Exception) -> str | None:
    """Return the SQLSTATE of an error; None if the server sent nothing, because the connection was lost.

    psycopg2 calls it pgcode, and pg8000 has it among the fields of PostgreSQL's protocol.
    """
    for each in _driver_errors(error):
        value = getattr(each, "sqlstate", None) or getattr(each, "pgcode", None)
        if value is None and isinstance(fields := next(iter(getattr(each, "args", ())), None), dict):
            value = fields.get("C")
        if isinstance(value, str):
            return value
    return None


def routine_of(error: Exception) -> str | None:
    """Return the function of PostgreSQL's source that raised the error; None if the server did not name it."""
    for each in _driver_errors(error):
        said = getattr(each, "diag", each)  # psycopg keeps the fields of an error there
        value = getattr(said, "source_function", None) or getattr(said, "server_source_function", None)
        if isinstance(value, str):
            return value
    return None


def is_operational(error: Exception) -> bool:
    """True if an error is an ``OperationalError`` of PEP 249, which the program hardly is to blame for."""
    original = getattr(error, "orig", error)
    return any(each.__name__ == "OperationalError" for each in type(original).__mro__)


def modules_of(error: Exception) -> Iterator[str]:
    """Yield the modules that an error's classes come from: the name of the driver is among them, if it is a driver's.

    SQLAlchemy's adapters for asyncio have classes of their own, in a module that ends with the driver's name.
    """
    for each in type(getattr(error, "orig", error)).__mro__:
        module = str(each.__module__)  # a class may be made with anything there
        yield module.rpartition(".")[2] if module.startswith("sqlalchemy.dialects.") else module.partition(".")[0]


def _driver_errors(error: Exception) -> Iterator[object]:
    """Yield the driver's errors behind an error of SQLAlchemy's.

    For asyncpg SQLAlchemy puts an error of its own in between, which does not always have the SQLSTATE of its cause.
    """
    original = getattr(error, "orig", error)
    yield original
    if type(original).__module__.startswith("sqlalchemy."):
        yield original.__cause__
