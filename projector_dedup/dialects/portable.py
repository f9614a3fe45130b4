"""A database or driver that nobody has tried: what SQL:1999 and PEP 249 promise, and no more.

What that leaves open is tried out before the first claim (``preflight.py``), and asked before every COMMIT.
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
from ..findings import Finding, advice
from ..transaction_text import Grammar
from .answers import Failure, Status
from .claims import Key, Parameters, handler_parameters, same_key
from .interface import Dialect
from .pruning import is_expired

logger = logging.getLogger("projector_dedup")

_SAVEPOINT = "projector_dedup"

# SQLSTATE, ISO/IEC 9075-2, and what servers have made of class 42: PostgreSQL, ODBC, Db2
_UNIQUE = {"23000", "23505"}
_NO_TABLE = {"42P01", "42703", "42S02", "42S22", "42704"}
_ABORTED = "25P02"  # PostgreSQL and its kin: nothing runs any more but ROLLBACK
_MAYBE_COMMITTED = "40003"  # statement completion unknown

# PEP 249: the operational ones are "not necessarily under the control of the programmer", and whole units run again.
_BY_CLASS = {
    "IntegrityError": Failure.UNIQUE,
    "OperationalError": Failure.TRANSIENT,
    "ProgrammingError": Failure.NO_TABLE,
}


class Portable(Dialect):
    """Any database that has savepoints and a unique index, through any driver of SQLAlchemy's."""

    names = frozenset()
    drivers = frozenset()
    grammar = Grammar(hidden=r"\w+")  # nobody knows what else text may commit
    untried = True
    bounds_waits = False
    locking_isolation = "SERIALIZABLE"  # whether FOR UPDATE is sent at all is SQLAlchemy's dialect's to say
    abort_lasts = True

    def prepare(self, engine: Engine) -> None:
        """Learn whether SERIALIZABLE can be asked for."""
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
        """The one level at which the SQL standard itself rules lost updates out."""
        return _detecting.get(engine.dialect)

    def refuse_unsafe(self, connection: Connection) -> None:
        """AUTOCOMMIT, where SQLAlchemy knows it of the driver or was asked for it; else the probe finds it."""
        if connection.get_execution_options().get("isolation_level") == "AUTOCOMMIT":
            raise UnsafeSessionError("isolation_level='AUTOCOMMIT' commits marker and read model one by one; leave it")
        try:
            super().refuse_unsafe(connection)
        except NotImplementedError:
            return

    def begin(self, connection: Connection, marker: Table | None, wait: float | None) -> None:
        """A write, which makes lazy drivers begin: a savepoint might else be the whole transaction, and its end too."""
        if wait is not None:
            raise UnsupportedDatabaseError(
                "claim_timeout needs a database that was tried: there is no portable way to bound a wait; leave it away"
            )
        if marker is not None:
            connection.execute(delete(marker).where(false()))

    def claim_statement(self, marker: Table, *, bounded: bool, names: int = 1) -> Executable:
        """By the client's clock: not every database's can be told to be in UTC."""
        values: dict[str, Any] = {name: bindparam(name) for name in ("message_id", "handler", "occurred_at")}
        now = bindparam("processed_at", callable_=_utc_now, type_=DateTime(timezone=True))
        return insert(marker).values(**values, processed_at=now)

    def claim(
        self, connection: Connection, statement: Executable, marker: Table, key: Mapping[str, Any], *, names: int = 1
    ) -> bool:
        """The savepoint keeps the transaction alive when the INSERT fails, and tells it from others when it does not.

        A marker that cannot be seen is a rival's, younger than the snapshot, or something else was violated. Several
        are for the driver to send one after the other: not every database knows VALUES of several rows.
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
        """The savepoint is the mark of the transaction here too."""
        connection.dialect.do_savepoint(connection, _SAVEPOINT)
        return super().claim_many(connection, marker, keys)

    def mark_transaction(self, connection: Connection) -> None:
        """The savepoint of the claim is mark enough."""

    def is_marked(self, connection: Connection, marker: Table, key: Mapping[str, Any] | None) -> bool:
        """Its savepoint can be released; where SQL has no RELEASE (SQL Server, Oracle), the marker can be seen."""
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
        """By the driver, which knows whether anything is open; past any guard of the connection."""
        driver: PoolProxiedConnection = Connection.connection.__get__(connection)
        driver.rollback()

    def now(self, connection: Connection) -> datetime:
        """By the client's clock, since that is what its claims were stamped with."""
        return _utc_now()

    def prune_statement(self, marker: Table, *, of_handler: bool = False) -> Executable:
        """The inner SELECT is a table of its own, since not every database deletes from what it reads."""
        old = marker.alias()
        oldest: Select[Any] = (
            select(old.c.message_id, old.c.handler)
            .where(is_expired(old, of_handler=of_handler))
            .order_by(old.c.processed_at)
            .limit(bindparam("batch_size"))
        )
        batch = oldest.subquery("batch")
        same = (batch.c.message_id == marker.c.message_id, batch.c.handler == marker.c.handler)
        return delete(marker).where(select(literal_column("1")).select_from(batch).where(*same).exists())

    def findings(self, connection: Connection, marker: Table) -> list[Finding]:
        """What was seen once in a probe is not what a suite sees."""
        return [
            advice(f"{connection.dialect.name} was not tried", "run the contract suite: docs/bring-your-database.md")
        ]

    def status(self, driver_connection: Any) -> Status:
        """No driver is known well enough to ask."""
        return Status.OPEN

    def aborts(self, error: DBAPIError) -> bool:
        """The server may have rolled everything back, and go on in another transaction."""
        return self.classify(error) is Failure.TRANSIENT

    def classify(self, error: Exception) -> Failure:
        """By SQLSTATE; by the class that PEP 249 asks for where the driver has none."""
        state = _sqlstate(error)
        if getattr(error, "connection_invalidated", False) or (state or "").startswith(("08", "40")):
            return Failure.TRANSIENT
        if state is None:
            return next((_BY_CLASS[name] for name in _classes(error) if name in _BY_CLASS), Failure.PERMANENT)
        if state in _UNIQUE:
            return Failure.UNIQUE
        return Failure.NO_TABLE if state in _NO_TABLE else Failure.PERMANENT

    def commit_refused(self, error: DBAPIError) -> bool:
        """A conflict, or a deferred constraint."""
        state = _sqlstate(error) or ""
        return not error.connection_invalidated and state.startswith(("40", "23")) and state != _MAYBE_COMMITTED


def _utc_now() -> datetime:
    return datetime.now(UTC)


def _is_there(connection: Connection, marker: Table, key: Mapping[str, Any]) -> bool:
    """Compared here, letter for letter: the database may take two ids for one."""
    found = Connection.execute(connection, _lookup(marker), key)
    return (key["message_id"], key["handler"]) in [tuple(row) for row in found]


@cache
def _lookup(marker: Table) -> Select[Any]:
    return select(marker.c.message_id, marker.c.handler).where(same_key(marker))


def _violates_integrity(error: DBAPIError) -> bool:
    state = _sqlstate(error)
    return state.startswith("23") if state is not None else "IntegrityError" in _classes(error)


def _sqlstate(error: Exception) -> str | None:
    """From wherever the driver keeps it; None also for HY000, which is ODBC's way to say that there is none."""
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


# The level that refuses lost updates, if it can be had; by the engine's dialect, which its clones share.
_detecting: WeakKeyDictionary[EngineDialect, str | None] = WeakKeyDictionary()
