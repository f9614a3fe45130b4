"""PostgreSQL: a claim waits on the unique index, and the server refuses lost updates at REPEATABLE READ."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache
from types import ModuleType
from typing import Any
from uuid import uuid4

from sqlalchemy import (
    ARRAY,
    ColumnElement,
    DateTime,
    Delete,
    LargeBinary,
    Subquery,
    Table,
    Text,
    Update,
    bindparam,
    case,
    cast,
    delete,
    func,
    literal_column,
    select,
    text,
    true,
    union_all,
)
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.engine.interfaces import Dialect as EngineDialect
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql import Executable
from sqlalchemy.types import TypeEngine

from ..closing import connected
from ..errors import UnsupportedDatabaseError
from ..transaction_text import LOCKS, OPAQUE, Grammar
from .claims import Key, Parameters, handler_parameters, key_of
from .columns import utc_now
from .dialect import (
    LEVEL_OF_BEGIN,
    Dialect,
    Failure,
    Snapshot,
    Status,
    insert_and_count,
    is_as_strict,
    is_operational,
    routine_of,
    sqlstate_of,
)
from .listeners import ask, is_listened_to, listen_once

# The meaning of errors, by SQLSTATE (PostgreSQL documentation, appendix A) -------------------------------------------

_READ_ONLY = "25006"  # read_only_sql_transaction: this server is a standby, perhaps it was the primary before
_TRANSIENT = {
    "40001",  # serialization_failure: another transaction changed what this one had read
    "40P01",  # deadlock_detected
    "40003",  # statement_completion_unknown
    "57P01",  # admin_shutdown
    "57P02",  # crash_shutdown
    "57P03",  # cannot_connect_now
    "53300",  # too_many_connections
    *("25P03", "57P05"),  # idle_in_transaction_session_timeout, idle_session_timeout
    *("26000", "42P05"),  # a prepared statement is gone, or is there already: DISCARD ALL, or a pooler, was in between
    "72000",  # snapshot_too_old
}
_LOCK_TIMEOUT = "55P03"
_LIMIT_WAITS = text(
    "SELECT set_config('lock_timeout', '30s', true) WHERE current_setting('lock_timeout') = '0'"  # 0: for ever
)
_UNIQUE = {"23505", "23P01"}  # unique_violation, exclusion_violation
_FOREIGN_KEY = "23503"
_NO_TABLE = {
    *("42P01", "42703", "42P10", "3F000"),  # undefined table, column, unique index, schema
    "55000",  # object_not_in_prerequisite_state: the key is deferrable, and ON CONFLICT refuses it
    *("22001", "23502"),  # a column that is too short, that takes no NULL and has no default
}
_LATER = {
    "25P04",  # transaction_timeout
    "3D000",  # there is no such database, yet
    "55006",  # object_in_use
    "HV00N",  # a foreign server cannot be reached
}
# Login refused; no disk, memory or other resource; an operator; errors of the system, of a configuration file, and
# internal ones, a corrupted index among them.
_LATER_CLASSES = ("28", "53", "57", "58", "F0", "XX")
_MAYBE_COMMITTED = {"40003", "57P01", "57P02"}  # a shutdown may come after a local commit, before its answer
_NOT_SUPPORTED = "0A000"

# The server's function that finds a prepared statement outdated, because the type of a column was changed. If a handler
# does something that is not supported, the SQLSTATE is the same and comes from another function. pgjdbc tells the two
# apart in this way too, in willHealViaReparse.
_REPLANNING = "RevalidateCachedQuery"


class PostgreSQL(Dialect):
    """PostgreSQL 13 and later. Each driver has a subclass with its differences."""

    names = frozenset({"postgresql"})
    grammar = Grammar(
        # strings with backslash escapes, and dollar quotes
        opaque=(r"(?<![a-z0-9_])e'(?:[^'\\]|\\.|'')*'", *OPAQUE[:2], r"\$(\w*)\$.*?\$\1\$", *OPAQUE[2:]),
        locks=rf"{LOCKS}|(?:^|;)\W*LOCK\b|\bpg_(?:try_)?advisory_(?:xact_)?lock",
        # A row that was inserted after the snapshot is hidden from every statement that looks for rows. SQLAlchemy
        # inserts several rows by INSERT ... SELECT ... FROM (VALUES ...), which looks for none.
        reads=r"(?:^|;)\W*(?:SELECT|TABLE|WITH|UPDATE|DELETE|MERGE|DO|CALL|EXECUTE|FETCH|COPY)\b"
        r"|\bFROM\b(?!\s*\(VALUES\b)",
    )
    detecting_isolation = "REPEATABLE READ"  # there the second writer of a row gets 40001
    begins_with_level = True
    commits_duplicates = True  # for a standby, and for what psycopg has prepared (``UnitOfWork``)

    def prepare(self, engine: Engine) -> None:
        """Raise ``UnsupportedDatabaseError`` behind a pooler if the driver names prepared statements by number.

        Other clients of the pooler give the same names to other statements (docs/adr/0007-pgbouncer-and-standbys.md).
        """
        listen_once(engine, before_others=True, checkout=[refusing(engine.dialect, self.refuse_pooler)])
        with asking(), connected(engine):
            pass  # for code that opens no unit of work, such as the command line

    def refuse_pooler(self, dialect: EngineDialect, dbapi_connection: Any, driver_connection: Any) -> None:
        """Raise ``UnsupportedDatabaseError`` if a pooler would mix up the driver's prepared statements.

        Called once for each physical connection. Nothing is asked for a driver that numbers no statements.
        """

    def snapshot(self, connection: Connection, level: str | None) -> Snapshot:
        """Return ``CLAIM`` at REPEATABLE READ and SERIALIZABLE, where the first statement takes the snapshot."""
        level = level or self.default_level(connection)
        return Snapshot.CLAIM if level is not None and is_as_strict(level, "REPEATABLE READ") else Snapshot.NEVER

    def opening(
        self, engine: Engine, *, marked: bool, locking: bool = False, chosen: bool = False, wait: float | None = None
    ) -> AbstractContextManager[None]:
        """Return a block in which each new connection of the pool is asked whether it leads through a pooler."""
        return asking()

    def claim_statement(self, marker: Table, *, bounded: bool, names: int = 1, digest: bool = False) -> Executable:
        """Return an INSERT that skips markers that are there: an error for such a marker would abort the transaction.

        Its row count says how many markers are new; for several names RETURNING says which.
        """
        others = {name: kind for name, kind in (_WITH_DIGEST if digest else _COLUMNS).items() if name not in _CONFLICT}
        given: dict[str, ColumnElement[Any]] = {name: bindparam(name, type_=kind) for name, kind in others.items()}
        if names > 1:  # a parameter without a type would be text in a UNION
            given = {name: cast(given[name], kind) for name, kind in others.items()}
        rows: list[dict[str, ColumnElement[Any]]] = [
            {
                "message_id": bindparam("message_id", type_=Text()),
                "handler": bindparam(handler, type_=Text()),
                **given,
            }
            for handler in handler_parameters(names)
        ]
        before = _before(bounded=bounded)
        selects = [select(*row.values()).select_from(before) for row in rows]
        claimed = selects[0] if names == 1 else union_all(*selects)
        statement = insert(marker).from_select(list(rows[0]), claimed)
        statement = statement.on_conflict_do_nothing(index_elements=_CONFLICT).execution_options(preserve_rowcount=True)
        return statement if names == 1 else statement.returning(marker.c.handler)

    def lock_statement(self, marker: Table, *, bounded: bool) -> Executable:
        """Return an upsert, which a rival's UPDATE fails at REPEATABLE READ and above."""
        given = select(*(bindparam(name, type_=kind) for name, kind in _COLUMNS.items()))
        statement = insert(marker).from_select(list(_COLUMNS), given.select_from(_before(bounded=bounded)))
        return statement.on_conflict_do_update(index_elements=_CONFLICT, set_={"processed_at": utc_now()})

    def insert_new(self, connection: Connection, table: Table, values: Mapping[str, Any]) -> bool:
        """Insert a row, and return False if its key is there: an error would abort the transaction."""
        statement = insert(table).values(values).on_conflict_do_nothing(index_elements=_CONFLICT)
        return insert_and_count(connection, statement.execution_options(preserve_rowcount=True), {}) == 1

    def limit_waits(self, connection: Connection) -> None:
        """Set ``lock_timeout`` to 30 seconds until the transaction ends, if the server would wait for ever."""
        connection.execute(_LIMIT_WAITS)

    def claim(
        self, connection: Connection, statement: Executable, marker: Table, key: Mapping[str, Any], *, names: int = 1
    ) -> bool:
        """Run the claim and return True if every marker is new; in one round trip with BEGIN, if the driver can."""
        with self.beginning(connection):
            if names == 1:
                return insert_and_count(connection, statement, key) == 1
            new = connection.execute(statement, key).scalars().all()
        return claim_names(connection, marker, key["message_id"], new, names)

    def beginning(self, connection: Connection) -> AbstractContextManager[object]:
        """Return a block in which the first statement brings BEGIN along, where the driver can do that.

        Other drivers send BEGIN by themselves, and wait for its answer.
        """
        return nullcontext()

    def claim_many(self, connection: Connection, marker: Table, keys: Sequence[Parameters]) -> set[Key]:
        """Claim any number of markers in one statement; return those of messages that are new under all their names."""
        new = {(row[0], row[1]) for row in connection.execute(*_insert(marker, keys)).all()}
        known = {each["message_id"] for each in keys if key_of(each) not in new}
        beside = {key for key in new if key[0] in known}
        _take_back(connection, marker, sorted(beside))
        return new - beside

    def changing(self, update: Update, rows: int) -> Executable:
        """Return the UPDATE within a SELECT of how many rows it changed, which fails if that is not ``rows``."""
        changed = update.returning(literal_column("1")).cte("changed")
        found = func.count()
        return select(found / case((found == rows, 1), else_=0)).select_from(changed)

    def transaction_id(self, connection: Connection) -> str | None:
        """Return the server's number of the open transaction.

        The query names no table, so it works under whatever search_path and role a handler has chosen.
        """
        found = "SELECT pg_catalog.pg_current_xact_id()::pg_catalog.text"
        transaction_id: str = Connection.exec_driver_sql(connection, found).scalar_one()  # past any guard
        return transaction_id

    def aborts(self, error: Exception) -> bool:
        """True if the server sent the error: any such error aborts the transaction."""
        return sqlstate_of(error) is not None

    def classify(self, error: Exception) -> Failure:
        """Return what the error means by its SQLSTATE, which every driver has; their classes of errors differ."""
        sqlstate = sqlstate_of(error) or ""
        if sqlstate == _READ_ONLY:
            return Failure.READ_ONLY
        if sqlstate == _LOCK_TIMEOUT:
            return Failure.LOCK_TIMEOUT
        if getattr(error, "connection_invalidated", False) or sqlstate in _TRANSIENT or sqlstate.startswith("08"):
            return Failure.TRANSIENT
        if sqlstate == _NOT_SUPPORTED and routine_of(error) == _REPLANNING:
            return Failure.TRANSIENT  # the ROLLBACK makes the drivers forget what they had prepared
        if sqlstate in _UNIQUE:
            return Failure.UNIQUE
        if sqlstate in _LATER or sqlstate.startswith(_LATER_CLASSES) or (not sqlstate and is_operational(error)):
            return Failure.LATER  # psycopg's errors of connecting have no SQLSTATE
        return Failure.NO_TABLE if sqlstate in _NO_TABLE else Failure.PERMANENT

    def misses_parent(self, error: Exception) -> bool:
        """True if a foreign key was violated: the server looks for the row in the snapshot of the transaction."""
        return sqlstate_of(error) == _FOREIGN_KEY

    def commit_refused(self, error: DBAPIError) -> bool:
        """True if the server sent the error of COMMIT and goes on running: then it has rolled back."""
        sqlstate = sqlstate_of(error)
        return (
            sqlstate is not None
            and not error.connection_invalidated
            and not sqlstate.startswith("08")
            and sqlstate not in _MAYBE_COMMITTED
        )


# The drivers ---------------------------------------------------------------------------------------------------------

# libpq's PGTransactionStatusType: idle, active, in transaction, in an aborted transaction, unknown
_LIBPQ_STATUS = (Status.NONE, Status.BUSY, Status.OPEN, Status.ABORTED, Status.BUSY)

_PSYCOPG_WITHOUT_NAMES = "{'prepare_threshold': None}"
_ASYNCPG_WITHOUT_NUMBERS = (
    "{'statement_cache_size': 0, 'prepared_statement_cache_size': 0, 'prepared_statement_name_func': str}"
)


class Psycopg(PostgreSQL):
    """PostgreSQL with psycopg 3, sync or async: the only driver that can send BEGIN or COMMIT with a statement."""

    drivers = frozenset({"psycopg", "psycopg_async"})

    def prepare(self, engine: Engine) -> None:
        """Do what ``PostgreSQL.prepare`` does, and keep psycopg from logging the echo of an error that it raises."""
        logging.getLogger("psycopg").addFilter(_psycopg_begin().is_no_echo)
        super().prepare(engine)

    def status(self, driver_connection: Any) -> Status:
        """Return the status of the transaction that libpq reports."""
        return _LIBPQ_STATUS[driver_connection.pgconn.transaction_status]  # not .info, which is made anew each time

    def claim_begins(self, connection: Connection) -> bool:
        """True if ``claim`` can send BEGIN along on this connection: see ``psycopg_begin.can_begin``."""
        return _names_parameters(connection) and _psycopg_begin().can_begin(connection.connection.driver_connection)

    def beginning(self, connection: Connection) -> AbstractContextManager[object]:
        """Return a block in which the first statement takes BEGIN along, or one without effect if it cannot."""
        if not _names_parameters(connection):
            return nullcontext()
        block: AbstractContextManager[object] = _psycopg_begin().beginning(
            connection.connection.driver_connection, connection.get_execution_options().get(LEVEL_OF_BEGIN)
        )
        return block

    def commit_goes_along(self, connection: Connection, driver_connection: Any) -> bool:
        """True if the last statement can take COMMIT along on this connection: see ``psycopg_begin.can_end``.

        Not where a listener of the user's may execute something between that statement and COMMIT.
        """
        if not _names_parameters(connection) or is_listened_to(connection):
            return False
        return bool(_psycopg_begin().can_end(driver_connection))

    def taking_commit_along(self, driver_connection: Any) -> AbstractContextManager[object]:
        """Return a block in which a statement takes COMMIT along; a COMMIT of the driver's after it does nothing."""
        block: AbstractContextManager[object] = _psycopg_begin().ending(driver_connection)
        return block

    def committing(self, driver_connection: Any) -> AbstractContextManager[None]:
        """Return a block for COMMIT; it raises ``TimeoutError`` if the wait for a synchronous standby was ended."""
        return confirming(
            driver_connection.add_notice_handler,
            driver_connection.remove_notice_handler,
            routine_of=lambda notice: notice.source_function,
        )

    def refuse_pooler(self, dialect: EngineDialect, dbapi_connection: Any, driver_connection: Any) -> None:
        """Raise ``UnsupportedDatabaseError`` if the connection leads through a pooler and psycopg prepares statements.

        psycopg names them by number only after some executions, so whether any is there today says nothing.
        """
        if driver_connection.prepare_threshold is None:
            return
        begun = bool(driver_connection.pgconn.transaction_status)
        backend, _ = ask_backend(dialect, dbapi_connection, begun=begun)
        if backend != driver_connection.info.backend_pid:
            raise numbered_behind_pooler(_PSYCOPG_WITHOUT_NAMES)


class Psycopg2(PostgreSQL):
    """PostgreSQL with psycopg2, which prepares no statements, and keeps only the text of warnings."""

    drivers = frozenset({"psycopg2"})

    def status(self, driver_connection: Any) -> Status:
        """Return the status of the transaction that libpq reports."""
        return _LIBPQ_STATUS[driver_connection.info.transaction_status]


class Asyncpg(PostgreSQL):
    """PostgreSQL with asyncpg, which prepares every statement."""

    drivers = frozenset({"asyncpg"})

    def status(self, driver_connection: Any) -> Status:
        """Return OPEN, NONE, or BUSY for a closed connection.

        asyncpg cannot tell an aborted transaction from an open one; the guard remembers the error instead.
        """
        if driver_connection.is_closed():
            return Status.BUSY
        return Status.OPEN if driver_connection.is_in_transaction() else Status.NONE

    def committing(self, driver_connection: Any) -> AbstractContextManager[None]:
        """Return a block for COMMIT; it raises ``TimeoutError`` if the wait for a synchronous standby was ended."""
        if driver_connection.is_closed():  # asyncpg adds no listener then
            return nullcontext()
        return confirming(
            driver_connection.add_log_listener,
            driver_connection.remove_log_listener,
            routine_of=lambda message: message.server_source_function,
        )

    def refuse_pooler(self, dialect: EngineDialect, dbapi_connection: Any, driver_connection: Any) -> None:
        """Raise ``UnsupportedDatabaseError`` if the connection leads through a pooler and asyncpg numbers statements.

        asyncpg also prepares the statement of this check, and its name shows whether asyncpg numbers statements.
        """
        begun = driver_connection.is_in_transaction()
        backend, is_numbered = ask_backend(dialect, dbapi_connection, begun=begun)
        if is_numbered and backend != driver_connection.get_server_pid():
            raise numbered_behind_pooler(_ASYNCPG_WITHOUT_NUMBERS)


def _names_parameters(connection: Connection) -> bool:
    """True if SQLAlchemy writes parameters as ``%(name)s``, which it does unless the user chose another style."""
    return bool(connection.dialect.paramstyle == "pyformat")


@cache
def _psycopg_begin() -> ModuleType:
    """Import and return ``psycopg_begin``: only now, since psycopg is perhaps not installed for the other drivers."""
    from . import psycopg_begin

    return psycopg_begin


# The claim -----------------------------------------------------------------------------------------------------------

_COLUMNS: dict[str, TypeEngine[Any]] = {
    "message_id": Text(),
    "handler": Text(),
    "occurred_at": DateTime(timezone=True),
}
_WITH_DIGEST: dict[str, TypeEngine[Any]] = {**_COLUMNS, "digest": LargeBinary()}
_CONFLICT = ["message_id", "handler"]  # named, so that a table without the unique index is an error, not a double apply


def claim_names(connection: Connection, marker: Table, message_id: str, new: Sequence[str], names: int) -> bool:
    """True if a claim of several ``names`` inserted a marker for each; else delete those of ``new`` again."""
    if len(new) == names:
        return True
    _take_back(connection, marker, [(message_id, handler) for handler in new])
    return False


def _take_back(connection: Connection, marker: Table, keys: Sequence[Key]) -> None:
    """Delete markers that a duplicate got under its other names: its transaction commits, and must leave no marker."""
    if keys:
        message_ids, handlers = zip(*keys, strict=True)
        connection.execute(_delete(marker), {"message_ids": list(message_ids), "handlers": list(handlers)})


def _insert(marker: Table, keys: Sequence[Parameters]) -> tuple[Executable, dict[str, Any]]:
    """Return an INSERT of any number of markers, and its parameters; it gives the key of each one that is new."""
    columns = _WITH_DIGEST if "digest" in keys[0] else _COLUMNS
    lists = tuple(name for name in columns if name != "handler" or len({key["handler"] for key in keys}) > 1)
    shared = [name for name in ("handler", "wait_ms") if name in keys[0] and name not in lists]
    parameters: dict[str, Any] = {f"{name}s": [key[name] for key in keys] for name in lists}
    return _insert_many(marker, lists, "wait_ms" in shared), parameters | {name: keys[0][name] for name in shared}


@cache
def _insert_many(marker: Table, lists: tuple[str, ...], bounded: bool) -> Executable:
    """Return an INSERT with an array for each column of ``lists``; the other columns are the same in all rows."""
    columns = _WITH_DIGEST if "digest" in lists else _COLUMNS
    arrays = [bindparam(f"{name}s", type_=ARRAY(columns[name])) for name in lists]
    given = func.unnest(*arrays).table_valued(*lists, name="given").render_derived()
    rows = select(*(given.c[name] if name in lists else bindparam(name, type_=columns[name]) for name in columns))
    rows = rows.select_from(given.join(_before(bounded=bounded), true()))
    statement = insert(marker).from_select(list(columns), rows).on_conflict_do_nothing(index_elements=_CONFLICT)
    return statement.returning(marker.c.message_id, marker.c.handler)


def _before(*, bounded: bool) -> Subquery:
    """Return a subquery that runs before the INSERT, in the statement of the claim.

    Its log message makes the COMMIT of a duplicate wait for the standby (docs/adr/0007-pgbouncer-and-standbys.md). If
    ``bounded``, it also bounds the claim's wait for locks, and the handler's (docs/adr/0003-acknowledge.md).
    """
    columns: list[ColumnElement[Any]] = [WRITTEN_FOR_STANDBY.label("standby")]
    if bounded:
        wait = func.set_config("lock_timeout", func.concat(bindparam("wait_ms", type_=Text()), "ms"), True)
        columns.append(wait.label("wait"))
    return select(*columns).offset(literal_column("0")).subquery("before")  # OFFSET keeps it a subquery of its own


@cache
def _delete(marker: Table) -> Delete:
    """Return a DELETE of the markers whose keys are given by two arrays."""
    arrays = [bindparam(f"{name}s", type_=ARRAY(Text())) for name in _CONFLICT]
    given = func.unnest(*arrays).table_valued(*_CONFLICT, name="given").render_derived()
    return delete(marker).where(*(marker.c[name] == given.c[name] for name in _CONFLICT))


# A synchronous standby -----------------------------------------------------------------------------------------------
#
# COMMIT makes a marker visible on the primary when the standby has it, or when the wait for the standby is ended: by a
# cancellation, a lost connection or a crash. So a marker that is found may be one that only the primary has. A COMMIT
# waits for earlier ones only if its own transaction has written something (docs/adr/0007-pgbouncer-and-standbys.md).

WRITTEN_FOR_STANDBY: ColumnElement[Any] = literal_column(
    "CASE WHEN current_setting('synchronous_standby_names') <> '' "
    "AND current_setting('synchronous_commit') NOT IN ('off', 'local') "
    "THEN pg_logical_emit_message(true, 'projector_dedup', '') END"
)
"""Write a message to the log that changes nothing, so that COMMIT waits for the standby, if one is configured.

The settings are read each time, because a reload of the server's configuration changes both.
"""

_WAITED = "SyncRepWaitForLSN"  # the function of the server that ends the wait; its text may be in any language


@contextmanager
def confirming(
    add: Callable[[Callable[..., None]], object],
    remove: Callable[[Callable[..., None]], object],
    *,
    routine_of: Callable[[Any], str | None],
) -> Iterator[None]:
    """Raise ``TimeoutError`` if the COMMIT in the block did not wait for the standby; the server then sends a warning.

    The server answers such a COMMIT as any other, and adds a warning. ``add`` and ``remove`` tell the driver who is to
    be called with warnings; ``routine_of`` returns the function of the server that a warning comes from.
    """
    ended: list[object] = []

    def keep_warning(*arguments: Any) -> None:
        warning = arguments[-1]  # asyncpg gives the connection first
        if routine_of(warning) == _WAITED:
            ended.append(warning)

    add(keep_warning)
    try:
        yield
    finally:
        remove(keep_warning)
    if ended:
        raise TimeoutError("the server committed, but stopped waiting for its synchronous standby")


# A pooler ------------------------------------------------------------------------------------------------------------
#
# Numbered prepared statements get mixed up behind a pooler. Each physical connection is asked for itself: an address
# may lead to a server today and to a PgBouncer tomorrow.

_BACKEND_AND_NUMBERED = """
    SELECT pg_backend_pid(), EXISTS (
        SELECT FROM pg_prepared_statements WHERE prepare_time >= now() AND starts_with(name, '__asyncpg_stmt_')
    )"""
_ASKED = "projector_dedup_pooler"  # in the ``info`` of a physical connection

_asking: ContextVar[bool] = ContextVar("projector_dedup_asking", default=False)


@contextmanager
def asking() -> Iterator[None]:
    """Ask each connection that is taken from the pool in the block, unless it was asked before."""
    token = _asking.set(True)
    try:
        yield
    finally:
        _asking.reset(token)


def refusing(
    dialect: EngineDialect, refuse_pooler: Callable[[EngineDialect, Any, Any], None]
) -> Callable[[Any, Any, object], None]:
    """Return a listener to ``checkout`` that calls ``PostgreSQL.refuse_pooler`` once for each physical connection.

    The listener does nothing outside a block of ``asking``.
    """

    def refuse(dbapi_connection: Any, record: Any, _proxy: object) -> None:
        if not _asking.get() or _ASKED in record.info:
            return
        refuse_pooler(dialect, dbapi_connection, record.driver_connection)
        record.info[_ASKED] = True

    return refuse


def ask_backend(dialect: EngineDialect, dbapi_connection: Any, *, begun: bool) -> tuple[int, bool]:
    """Return the number of the server process that answers, and True if it keeps a statement that asyncpg numbered.

    A pooler tells its clients a made-up process number. So behind a pooler the two numbers differ.
    Unless a transaction had ``begun`` before, the one of this question is rolled back.
    """
    sql = f"{_BACKEND_AND_NUMBERED} -- {uuid4()}"  # another text each time: a statement from a cache shows nothing
    ((backend, is_numbered),) = ask(dialect, dbapi_connection, sql)
    if not begun:
        dbapi_connection.rollback()
    return backend, is_numbered


def numbered_behind_pooler(connect_args: str) -> UnsupportedDatabaseError:
    """Return the error for an engine that numbers its statements behind a pooler; ``connect_args`` are the remedy."""
    return UnsupportedDatabaseError(
        "this engine reaches PostgreSQL through a pooler, such as PgBouncer, and numbers its prepared statements. "
        "Other clients of the pooler use the same names, so the engine could run one of their statements. Write "
        f"create_engine(..., connect_args={connect_args})"
    )
