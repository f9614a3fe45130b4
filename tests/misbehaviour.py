"""What handlers do to a session that they must not, and what comes of it on each driver.

Each is a function of the `Session` (some, of the `AsyncSession`), called in a handler that has added 1 to the total.
`Verdict` says what follows, whatever the handler does next.
"""

import contextlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, cast

from sqlalchemy import DDL, CursorResult, create_engine, literal_column, select, text
from sqlalchemy.orm import Session
from sqlalchemy.util import await_only

from databases import Driver
from rig import Total, add


class Verdict(Enum):
    """What becomes of a handler that does it."""

    HARMLESS = "applied"
    REFUSED = "it raises an ordinary error; the transaction goes on if that is swallowed"
    BREAKS = "it raises an ordinary error that aborts the transaction; DETECTED if that is swallowed"
    PREVENTED = "it raises TransactionViolatedError, which is remembered if swallowed; nothing is durable"
    DETECTED = "TransactionViolatedError before COMMIT; nothing is durable"
    DURABLE = "TransactionViolatedError, durable=True: marker and what was written by then are committed"


H, R, B, P, C, D = Verdict


@dataclass(frozen=True)
class Misbehaviour:
    """One thing to do, and its verdict by engine or driver; what is not named is not run."""

    name: str
    do: Callable[[Any], object]
    postgresql: Verdict | None
    sqlite: Verdict | None
    asyncpg: Verdict | None = None

    def verdict(self, driver: Driver) -> Verdict | None:
        """What should follow on `driver`."""
        if self.asyncpg is not None and driver.module == "asyncpg":
            return self.asyncpg
        return self.postgresql if driver.engine == "postgresql" else self.sqlite

    def __str__(self) -> str:
        return self.name


def driver_of(session: Session) -> Any:
    """The driver's connection, below SQLAlchemy (under asyncio, SQLAlchemy's synchronous facade of it)."""
    return session.connection().connection


def fail(session: Session) -> None:
    """A statement that violates the primary key of a row that is there."""
    session.execute(text("insert into total values ('a', 0)"))


def swallow(do: Callable[..., object], *args: Any) -> None:
    """The disease."""
    with contextlib.suppress(Exception):
        do(*args)


def text_of(sql: str) -> Misbehaviour:
    """SQL text that ends or begins a transaction is prevented, however it is written."""
    return Misbehaviour(f"text {sql!r}", lambda session: session.execute(text(sql)), P, P)


# Session and Connection ------------------------------------------------------------------------------------------


def _commit_in_savepoint(session: Session) -> None:
    with session.begin_nested():
        session.commit()


def _with_session(session: Session) -> None:
    with session:
        add(session, 100)


def _rollback_in_savepoint(session: Session) -> None:
    with session.begin_nested():
        session.rollback()


def _close_connection(session: Session) -> None:
    session.connection().close()


COMMITS = [
    Misbehaviour("session.commit", lambda s: s.commit(), P, P),
    Misbehaviour("session.commit in savepoint", _commit_in_savepoint, P, P),
    Misbehaviour("session.get_transaction().commit", lambda s: s.get_transaction().commit(), P, P),
    Misbehaviour("connection.commit", lambda s: s.connection().commit(), P, P),
    Misbehaviour("connection.get_transaction().commit", lambda s: s.connection().get_transaction().commit(), P, P),
    Misbehaviour("session.begin", lambda s: s.begin(), R, R),
    Misbehaviour("connection.begin", lambda s: s.connection().begin(), R, R),
    Misbehaviour("session.prepare", lambda s: s.prepare(), R, R),
]

ROLLBACKS = [
    Misbehaviour("session.rollback", lambda s: s.rollback(), C, C),
    Misbehaviour("session.rollback in savepoint", _rollback_in_savepoint, C, C),
    Misbehaviour("session.close", lambda s: s.close(), C, C),
    Misbehaviour("session.reset", lambda s: s.reset(), C, C),
    Misbehaviour("session.invalidate", lambda s: s.invalidate(), C, C),
    Misbehaviour("with session", _with_session, C, C),
    Misbehaviour("session.get_transaction().rollback", lambda s: s.get_transaction().rollback(), C, C),
    Misbehaviour("session.get_transaction().close", lambda s: s.get_transaction().close(), C, C),
    Misbehaviour("connection.rollback", lambda s: s.connection().rollback(), C, C),
    Misbehaviour("connection.get_transaction().rollback", lambda s: s.connection().get_transaction().rollback(), C, C),
    Misbehaviour("connection.close", _close_connection, C, C),
    Misbehaviour("connection.invalidate", lambda s: s.connection().invalidate(), C, C),
]

# SQL text --------------------------------------------------------------------------------------------------------

TEXTS = [
    *map(
        text_of,
        [
            "COMMIT", "commit;", "  COMMIT WORK", "END", "end transaction", "ROLLBACK", "rollback transaction", "ABORT",
            "BEGIN", "begin immediate", "START TRANSACTION", "prepare transaction 'x'", "-- done\nCOMMIT",
            "/* done */ COMMIT", "/* a */ /* b */ commit and chain", "select 1; COMMIT; BEGIN", "select ';'; commit",
            "ROLLBACK; BEGIN",
        ],
    ),
    Misbehaviour("connection.execute text", lambda s: s.connection().execute(text("COMMIT")), P, P),
    Misbehaviour("connection.scalar text", lambda s: s.connection().scalar(text("COMMIT")), P, P),
    Misbehaviour("connection.scalars text", lambda s: s.connection().scalars(text("COMMIT")), P, P),
    Misbehaviour("session.scalar text", lambda s: s.scalar(text("COMMIT")), P, P),
    Misbehaviour("session.scalars text", lambda s: s.scalars(text("COMMIT")), P, P),
    Misbehaviour("exec_driver_sql", lambda s: s.connection().exec_driver_sql("COMMIT"), P, P),
    Misbehaviour("DDL", lambda s: s.execute(DDL("COMMIT"))  # type: ignore[no-untyped-call]
       , P, P),
    Misbehaviour("text.columns", lambda s: s.execute(text("COMMIT").columns()), P, P),
    Misbehaviour("from_statement", lambda s: s.scalars(select(Total).from_statement(text("COMMIT"))), P, P),
    Misbehaviour("query.from_statement", lambda s: s.query(Total).from_statement(text("COMMIT")).all(), P, P),
    Misbehaviour(
        "options", lambda s: s.execute(text("COMMIT").execution_options(stream_results=True), {}), P, P
    ),
    Misbehaviour("'commit' as a value", lambda s: s.execute(text("select 'COMMIT', '; commit' as \"commit\"")), H, H),
    Misbehaviour("CREATE TABLE", lambda s: s.execute(text("create table if not exists mine (id integer)")), H, H),
    Misbehaviour("DROP TABLE", lambda s: s.execute(text("drop table if exists mine")), H, H),
    Misbehaviour("procedural COMMIT", lambda s: s.execute(text("do $$ begin commit; end $$")), B, None),
]  # fmt: skip

# Savepoints ------------------------------------------------------------------------------------------------------


def _savepoint(session: Session) -> None:
    with session.begin_nested():
        session.execute(text("select 1"))


def _savepoint_rolled_back(session: Session) -> None:
    swallow(_savepoint_fails, session)


def _savepoint_fails(session: Session) -> None:
    with session.begin_nested():
        session.execute(text("update total set amount = 1000"))
        fail(session)


def _savepoint_in_savepoint(session: Session) -> None:
    with session.begin_nested():
        _swallow_in_savepoint(session)


def _swallow_in_savepoint(session: Session) -> None:
    swallow(_savepoint_fails, session)
    session.execute(text("select 1"))


def _savepoint_flush_fails(session: Session) -> None:
    swallow(_flush_fails_in_savepoint, session)


def _flush_fails_in_savepoint(session: Session) -> None:
    with session.begin_nested():
        bad_flush(session)


def _swallowed_in_savepoint(session: Session) -> None:
    with session.begin_nested():
        swallow(fail, session)


def _connection_savepoint(session: Session) -> None:
    swallow(_connection_savepoint_fails, session)


def _connection_savepoint_fails(session: Session) -> None:
    with session.connection().begin_nested():
        fail(session)


def _raw_savepoint(session: Session) -> None:
    session.execute(text("SAVEPOINT mine"))
    swallow(fail, session)
    session.execute(text("ROLLBACK TO SAVEPOINT mine"))


SAVEPOINTS = [
    Misbehaviour("begin_nested", _savepoint, H, H),
    Misbehaviour("begin_nested rolled back", _savepoint_rolled_back, H, H),
    Misbehaviour("nested in nested", _savepoint_in_savepoint, H, H),
    Misbehaviour("flush fails in nested", _savepoint_flush_fails, H, H),
    Misbehaviour("connection.begin_nested rolled back", _connection_savepoint, H, H),
    Misbehaviour("text SAVEPOINT and ROLLBACK TO", _raw_savepoint, H, H),
    Misbehaviour("text SAVEPOINT left open", lambda s: s.execute(text("SAVEPOINT mine")), H, H),
    Misbehaviour("error swallowed inside nested", _swallowed_in_savepoint, B, H),
    Misbehaviour("begin_nested left open", lambda s: s.begin_nested(), C, C),
    Misbehaviour("connection.begin_nested left open", lambda s: s.connection().begin_nested(), C, C),
]

# Swallowed errors ------------------------------------------------------------------------------------------------


def bad_flush(session: Session) -> None:
    """A flush that violates the primary key of a row that is there."""
    session.expunge_all()
    session.add(Total(account="a", amount=0))
    session.flush()


def _swallowed_flush_rolled_back(session: Session) -> None:
    swallow(bad_flush, session)
    session.rollback()


def _swallowed_then_another(session: Session) -> None:
    swallow(fail, session)
    swallow(session.execute, text("select 1"))


def _insert_or_rollback(session: Session) -> None:
    session.execute(text("insert or rollback into total values ('a', 0)"))


SWALLOWED = [
    Misbehaviour("Core error", lambda s: swallow(fail, s), C, H),
    Misbehaviour("Core error, then another", _swallowed_then_another, C, H),
    Misbehaviour("flush error", lambda s: swallow(bad_flush, s), C, C),
    Misbehaviour("flush error, then rollback", _swallowed_flush_rolled_back, C, C),
    Misbehaviour("procedural COMMIT", lambda s: swallow(s.execute, text("do $$ begin commit; end $$")), C, None),
    Misbehaviour("INSERT OR ROLLBACK", lambda s: swallow(_insert_or_rollback, s), None, C),
]

# Another database, another mode -----------------------------------------------------------------------------------


def _other_bind(session: Session) -> None:
    session.bind = create_engine("sqlite://")
    session.execute(text("select 1"))


OTHERS = [
    Misbehaviour("bind_arguments", lambda s: s.execute(
        text("select 1"), bind_arguments={"bind": create_engine("sqlite://")}), P, P),
    Misbehaviour("same bind, other options", lambda s: s.execute(
        text("select 1"), bind_arguments={"bind": s.get_bind().execution_options(x=1)}), P, P),
    Misbehaviour("session.bind", _other_bind, P, P),
    Misbehaviour("isolation_level AUTOCOMMIT", lambda s: s.connection().execution_options(
        isolation_level="AUTOCOMMIT"), R, R),
    Misbehaviour("SET TRANSACTION", lambda s: s.execute(
        text("set transaction isolation level read committed")), B, R),
]  # fmt: skip

# Below SQLAlchemy: the driver's own connection ---------------------------------------------------------------------


def execute_raw(session: Session, sql: str) -> None:
    """Run SQL text by a cursor of the driver."""
    cursor = driver_of(session).cursor()
    cursor.execute(sql)
    cursor.close()


def _raw_rollback_then_raw_write(session: Session) -> None:
    driver_of(session).rollback()
    execute_raw(session, "insert into total values ('raw', 7)")


def _result_commit(session: Session) -> None:
    cursor = cast("CursorResult[Any]", session.execute(text("select 1"))).cursor
    connection = getattr(cursor, "_adapt_connection", None) or cursor.connection
    committed = connection.commit()
    if inspect.isawaitable(committed):
        await_only(committed)


def _driver_error_swallowed(session: Session) -> None:
    swallow(execute_raw, session, "insert into total values ('a', 0)")


def _raw_commit_and_begin(session: Session) -> None:
    execute_raw(session, "COMMIT")
    execute_raw(session, "BEGIN")


def _raw_rollback_and_begin(session: Session) -> None:
    execute_raw(session, "ROLLBACK")
    execute_raw(session, "BEGIN")


BELOW = [
    Misbehaviour("driver read", lambda s: execute_raw(s, "select 1"), H, H),
    Misbehaviour("driver write", lambda s: execute_raw(s, "update total set amount = amount"), H, H),
    Misbehaviour("driver commit", lambda s: driver_of(s).commit(), D, D),
    Misbehaviour("driver rollback", lambda s: driver_of(s).rollback(), C, C),
    Misbehaviour("driver rollback, then driver write", _raw_rollback_then_raw_write, C, C),
    Misbehaviour("driver cursor COMMIT", lambda s: execute_raw(s, "COMMIT"), D, D),
    Misbehaviour("driver cursor ROLLBACK", lambda s: execute_raw(s, "ROLLBACK"), C, C),
    Misbehaviour("driver cursor COMMIT, BEGIN", _raw_commit_and_begin, D, None),
    Misbehaviour("driver cursor ROLLBACK, BEGIN", _raw_rollback_and_begin, C, C),
    Misbehaviour("driver error swallowed", _driver_error_swallowed, C, H),
    Misbehaviour("result.cursor commit", _result_commit, D, D),
    Misbehaviour("two statements", lambda s: s.execute(select(literal_column("1; select 1"))), H, R, asyncpg=B),
]  # fmt: skip
