"""Use a database or driver that nobody has tried by what SQL:1999 and PEP 249 promise, and nothing more.

Everything else is tried before the first claim (``preflight.py``), and asked before every COMMIT.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

from sqlalchemy import DateTime, Select, Table, bindparam, delete, false, insert, literal_column, select
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.engine import Dialect as EngineDialect
from sqlalchemy.engine.default import DefaultDialect
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import PoolProxiedConnection
from sqlalchemy.sql import Executable
from sqlalchemy.sql.elements import ReleaseSavepointClause

from ..closing import connected
from ..errors import UnsafeSessionError, UnsupportedDatabaseError
from ..transaction_text import Grammar
from .answers import Failure, Status
from .claims import Key, Parameters, handler_parameters, same_key
from .cleanup import is_expired
from .findings import Finding, advice
from .interface import Dialect

logger = logging.getLogger("projector_dedup")

_SAVEPOINT = "projector_dedup"

# SQLSTATE, ISO/IEC 9075-2; class 42 differs between PostgreSQL, ODBC and Db2
_UNIQUE = {"23000", "23505"}
_NO_TABLE = {"42P01", "42703", "42S02", "42S22", "42704"}
_LATER_CLASSES = ("53", "57", "58", "HYT", "XX")  # resources, operators, the system, time limits, internal errors
_ABORTED = "25P02"  # PostgreSQL and databases like it: only ROLLBACK runs now
_MAYBE_COMMITTED = "40003"  # statement completion unknown

# PEP 249: the operational ones are "not necessarily under the control of the programmer", and whole units run again.
_BY_CLASS = {
    "IntegrityError": Failure.UNIQUE,
    "OperationalError": Failure.TRANSIENT,
    "ProgrammingError": Failure.NO_TABLE,
}


class Portable(Dialect):
    """Uses any database that has savepoints and unique indexes, through any driver of SQLAlchemy's."""

    names = frozenset()
    drivers = frozenset()
    grammar = Grammar(hidden=r"\w+")  # any command may commit, for all that is known
    unknown = True
    bounds_waits = False
    locking_isolation = "SERIALIZABLE"  # SQLAlchemy's dialect decides whether FOR UPDATE is sent
    abort_lasts = True

    def prepare(self, engine: Engine) -> None:
        """Find out whether SQLAlchemy can set SERIALIZABLE, and log a warning if it cannot."""
        if engine.dialect in _detecting:
            return
        with connected(engine) as connection:
            driver: Any = connection.connection.dbapi_connection
            try:
                levels = connection.dialect.get_isolation_level_values(driver)
            except NotImplementedError:
                levels = ()
        _detecting[engine.dialect] = "SERIALIZABLE" if "SERIALIZABLE" in levels else None
        if _detecting[engine.dialect] is None:
            logger.warning(
                "SQLAlchemy's dialect for %s cannot set SERIALIZABLE: whether two messages that change one row can "
                "lose an update is up to the database; write it by atomic upserts, or declare read_models=[...]",
                engine.dialect.name,
            )

    def detecting_isolation(self, engine: Engine) -> str | None:
        """Return SERIALIZABLE, at which the SQL standard rules out lost updates; None if it cannot be set."""
        return _detecting.get(engine.dialect)

    def detects_lost_updates(self, connection: Connection, level: str | None) -> bool:
        """True if the transaction runs at SERIALIZABLE; without it, nobody knows what the database does."""
        return level is not None and super().detects_lost_updates(connection, level)

    def refuse_unsafe(self, connection: Connection) -> None:
        """Raise ``RefusedError`` for a shared connection, and for AUTOCOMMIT that SQLAlchemy can see."""
        if connection.get_execution_options().get("isolation_level") == "AUTOCOMMIT":
            raise UnsafeSessionError("isolation_level='AUTOCOMMIT' commits marker and read model one by one; leave it")
        try:
            super().refuse_unsafe(connection)
        except NotImplementedError:
            return

    def begin(self, connection: Connection, marker: Table | None, wait: float | None) -> None:
        """Run a DELETE of no row, since a write makes drivers begin that begin late; refuse to bound a ``wait``.

        A savepoint might otherwise be the whole transaction, and its release the COMMIT.
        """
        if wait is not None:
            raise UnsupportedDatabaseError(
                "claim_timeout needs a database that was tried: there is no portable way to bound a wait; leave it away"
            )
        if marker is not None:
            connection.execute(delete(marker).where(false()))

    def claim_statement(self, marker: Table, *, bounded: bool, names: int = 1) -> Executable:
        """Return an INSERT with the time of the client's clock: not every database can give its own in UTC."""
        values: dict[str, Any] = {name: bindparam(name) for name in ("message_id", "handler", "occurred_at")}
        now = bindparam("processed_at", callable_=_utc_now, type_=DateTime(timezone=True))
        return insert(marker).values(**values, processed_at=now)

    def claim(
        self, connection: Connection, statement: Executable, marker: Table, key: Mapping[str, Any], *, names: int = 1
    ) -> bool:
        """Run the claim in a savepoint, and return True if every marker is new, False if one of them can be seen.

        The savepoint keeps the transaction alive if the INSERT fails, and marks it if it succeeds. An integrity error
        without a visible marker is raised: a rival's is younger than the snapshot, or something else was violated. The
        driver sends several markers one by one, since not every database knows VALUES of several rows.
        """
        rows = [{**key, "handler": key[name]} for name in handler_parameters(names)]
        connection.dialect.do_savepoint(connection, _SAVEPOINT)
        try:
            connection.execute(statement, rows if names > 1 else key)
        except DBAPIError as error:
            if not _violates_integrity(error):
                raise
            connection.dialect.do_rollback_to_savepoint(connection, _SAVEPOINT)
            if any(_is_there(connection, marker, row) for row in rows):
                return False
            raise
        return True

    def claim_many(self, connection: Connection, marker: Table, keys: Sequence[Parameters]) -> set[Key]:
        """Set the savepoint that marks the transaction, claim several markers, and return the keys of the new ones."""
        connection.dialect.do_savepoint(connection, _SAVEPOINT)
        return super().claim_many(connection, marker, keys)

    def mark_transaction(self, connection: Connection) -> None:
        """Do nothing: the savepoint of the claim marks the transaction."""

    def is_marked(self, connection: Connection, marker: Table, key: Mapping[str, Any] | None) -> bool:
        """True if the claim's savepoint can be released or, without RELEASE (SQL Server, Oracle), the marker be seen.

        Without a ``key``, True if a statement still runs.
        """
        if key is None:
            return Connection.execute(connection, select(literal_column("1"))).first() is not None
        if type(connection.dialect).do_release_savepoint is not DefaultDialect.do_release_savepoint:
            return _is_there(connection, marker, key)
        try:
            Connection.execute(connection, ReleaseSavepointClause(_SAVEPOINT))  # type: ignore[no-untyped-call]  # SQLAlchemy's
        except DBAPIError as error:
            state = _sqlstate(error) or ""
            if error.connection_invalidated or state.startswith(("08", "40")) or state == _ABORTED:
                raise
            return False
        return True

    def abandon(self, connection: Connection) -> None:
        """Call the driver's ``rollback()``, which knows whether anything is open; past any guard of the connection."""
        driver: PoolProxiedConnection = Connection.connection.__get__(connection)
        driver.rollback()

    def now(self, connection: Connection) -> datetime:
        """Return the current time by the client's clock, from which the claims take theirs."""
        return _utc_now()

    def cleanup_statement(self, marker: Table, *, of_handler: bool = False) -> Executable:
        """Return a DELETE of the oldest expired markers."""
        old = marker.alias()
        oldest: Select[Any] = (
            select(old.c.message_id, old.c.handler)
            .where(is_expired(old, of_handler=of_handler))
            .order_by(old.c.processed_at)
            .limit(bindparam("batch_size"))
        )
        batch = oldest.subquery("batch")  # derived, since not every database deletes from a table that it reads
        same = (batch.c.message_id == marker.c.message_id, batch.c.handler == marker.c.handler)
        return delete(marker).where(select(literal_column("1")).select_from(batch).where(*same).exists())

    def findings(self, connection: Connection, marker: Table) -> list[Finding]:
        """Return the advice to run the contract suite, which sees more than the trial before the first claim."""
        return [
            advice(f"{connection.dialect.name} was not tried", "run the contract suite: docs/bring-your-database.md")
        ]

    def status(self, driver_connection: Any) -> Status:
        """Return OPEN, which here means that the driver cannot tell."""
        return Status.OPEN

    def aborts(self, error: DBAPIError) -> bool:
        """True for a transient error: the server may have rolled back, and go on in another transaction."""
        return self.classify(error) is Failure.TRANSIENT

    def classify(self, error: Exception) -> Failure:
        """Return what the error means by its SQLSTATE, or by its class of PEP 249 if the driver has no SQLSTATE."""
        state = _sqlstate(error)
        if getattr(error, "connection_invalidated", False) or (state or "").startswith(("08", "40")):
            return Failure.TRANSIENT
        if state is None:
            return next((_BY_CLASS[name] for name in _classes(error) if name in _BY_CLASS), Failure.PERMANENT)
        if state in _UNIQUE:
            return Failure.UNIQUE
        if state.startswith(_LATER_CLASSES):
            return Failure.LATER
        return Failure.NO_TABLE if state in _NO_TABLE else Failure.PERMANENT

    def commit_refused(self, error: DBAPIError) -> bool:
        """True if the server reports a conflict, or a constraint that was deferred to COMMIT."""
        state = _sqlstate(error) or ""
        return not error.connection_invalidated and state.startswith(("40", "23")) and state != _MAYBE_COMMITTED


def _utc_now() -> datetime:
    return datetime.now(UTC)


def _is_there(connection: Connection, marker: Table, key: Mapping[str, Any]) -> bool:
    """True if the marker can be seen; compared here, letter for letter, as the database may take two ids for one."""
    found = Connection.execute(connection, _lookup(marker), key)
    return (key["message_id"], key["handler"]) in [tuple(row) for row in found]


@cache
def _lookup(marker: Table) -> Select[Any]:
    return select(marker.c.message_id, marker.c.handler).where(same_key(marker))


def _violates_integrity(error: DBAPIError) -> bool:
    state = _sqlstate(error)
    return state.startswith("23") if state is not None else "IntegrityError" in _classes(error)


def _sqlstate(error: Exception) -> str | None:
    """Return the SQLSTATE, wherever the driver keeps it; None also for HY000, by which ODBC says that there is none."""
    original = getattr(error, "orig", error)
    first = original.args[0] if getattr(original, "args", ()) else None
    if isinstance(first, dict):  # the fields of PostgreSQL's protocol
        first = first.get("C")
    for found in (getattr(original, "sqlstate", None), getattr(original, "pgcode", None), first):
        if isinstance(found, str) and re.fullmatch(r"(?=.*\d)[0-9A-Z]{5}", found):
            return None if found == "HY000" else found
    return None


def _classes(error: Exception) -> list[str]:
    return [each.__name__ for each in type(getattr(error, "orig", None) or error).__mro__]


# The level that refuses lost updates, or None; by the engine's dialect, which clones of the engine share.
_detecting: WeakKeyDictionary[EngineDialect, str | None] = WeakKeyDictionary()
