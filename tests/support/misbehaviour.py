"""Things that a handler must not do to its session, and the verdict on each for each driver.

Each is a function of the `Session` (some, of the `AsyncSession`), called in a handler that has added 1 to the total.
`Verdict` says what follows, whatever the handler does next.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any, cast

from sqlalchemy import (
    DDL,
    Column,
    CursorResult,
    Index,
    Integer,
    MetaData,
    Table,
    create_engine,
    literal_column,
    select,
    text,
)
from sqlalchemy.orm import Session
from sqlalchemy.schema import CreateTable
from sqlalchemy.util import await_only

from databases import DRIVERS, Driver
from rig import TOTAL, Total, add


class Verdict(Enum):
    """The consequence for a handler that misbehaves."""

    HARMLESS = "applied"
    REFUSED = "it raises an ordinary error; the transaction goes on if that is swallowed"
    BREAKS = "it raises an ordinary error that aborts the transaction; DETECTED if that is swallowed"
    PREVENTED = "it raises TransactionViolatedError, which is remembered if swallowed; nothing is durable"
    DETECTED = "TransactionViolatedError before COMMIT; nothing is durable"
    DURABLE = "TransactionViolatedError, durable=True; marker and what was written by then are committed"
    ENDED = "TransactionViolatedError, durable=True, because nobody asks what was committed; nothing is"


H, R, B, P, C, D, E = Verdict


class Misbehaviour:
    """One thing to do, and its verdict: the usual one, and what differs by engine or, before that, by driver's module.

    Where the verdict is None, it is not run.
    """

    def __init__(
        self, name: str, do: Callable[[Any], object], usual: Verdict | None, **elsewhere: Verdict | None
    ) -> None:
        if unknown := elsewhere.keys() - {name for driver in DRIVERS for name in (driver.engine, driver.module)}:
            raise ValueError(f"{name}: neither an engine nor the module of a driver: {unknown}")
        self.name = name
        self.do = do
        self._usual = usual
        self._elsewhere = elsewhere

    def verdict(self, driver: Driver) -> Verdict | None:
        """Return the verdict on `driver`; None if it is not run there."""
        return self._elsewhere.get(driver.module, self._elsewhere.get(driver.engine, self._usual))

    def tells_apart(self, driver: Driver) -> bool:
        """Return True if the verdict on ``driver`` is not that on every driver of its database."""
        return driver.module in self._elsewhere

    def __str__(self) -> str:
        return self.name


def told_apart(cases: Iterable[Misbehaviour], driver: Driver) -> list[Misbehaviour]:
    """Return those of cases whose verdict names the driver's module, and one case of each other verdict.

    A run of all cases on all drivers found no other that depends on the driver.
    """
    chosen: list[Misbehaviour] = []
    for case in cases:
        if case.tells_apart(driver) or case.verdict(driver) not in {other.verdict(driver) for other in chosen}:
            chosen.append(case)
    return chosen


def driver_of(session: Session) -> Any:
    """The driver's connection, below SQLAlchemy (under asyncio, SQLAlchemy's synchronous facade of it)."""
    return session.connection().connection


def fail(session: Session) -> None:
    """Run a statement that violates the primary key of an existing row."""
    session.execute(text("insert into total values ('a', 0)"))


def bad_flush(session: Session) -> None:
    """A flush that violates the primary key of a row that is there."""
    session.expunge_all()
    session.add(Total(account="a", amount=0))
    session.flush()


def execute_raw(session: Session, sql: str) -> None:
    """Run SQL text by a cursor of the driver."""
    cursor = driver_of(session).cursor()
    cursor.execute(sql)
    cursor.close()


def raw(*statements: str) -> Callable[[Session], None]:
    """Run SQL text by a cursor of the driver, one after the other."""
    return in_order(*(lambda session, sql=sql: execute_raw(session, sql) for sql in statements))


def swallow(do: Callable[..., object], *args: Any) -> None:
    """Call a function and swallow its error, as a careless handler would."""
    with contextlib.suppress(Exception):
        do(*args)


def text_of(sql: str) -> Misbehaviour:
    """SQL text that ends or begins a transaction is prevented, however it is written."""
    return Misbehaviour(f"text {sql!r}", lambda session: session.execute(text(sql)), P)


def mariadb_text(sql: str, verdict: Verdict) -> Misbehaviour:
    """A misbehaviour by SQL text that only MariaDB understands."""
    return Misbehaviour(
        f"text {sql!r}", lambda session: session.connection().exec_driver_sql(sql), None, mariadb=verdict
    )


# Session and Connection ------------------------------------------------------------------------------------------


def nested(do: Callable[[Session], object]) -> Callable[[Session], None]:
    """Do something in a savepoint."""

    def in_savepoint(session: Session) -> None:
        with session.begin_nested():
            do(session)

    return in_savepoint


def in_order(*steps: Callable[[Session], object]) -> Callable[[Session], None]:
    """Do one thing after the other."""

    def each(session: Session) -> None:
        for step in steps:
            step(session)

    return each


def _with_session(session: Session) -> None:
    with session:
        add(session, 100)


COMMITS = [
    Misbehaviour("session.commit", lambda s: s.commit(), P),
    Misbehaviour("session.commit in savepoint", nested(lambda s: s.commit()), P),
    Misbehaviour("session.get_transaction().commit", lambda s: s.get_transaction().commit(), P),
    Misbehaviour("connection.commit", lambda s: s.connection().commit(), P),
    Misbehaviour("connection.get_transaction().commit", lambda s: s.connection().get_transaction().commit(), P),
    Misbehaviour("session.begin", lambda s: s.begin(), P),
    Misbehaviour("connection.begin", lambda s: s.connection().begin(), R),
    Misbehaviour("session.prepare", lambda s: s.prepare(), R),
]

ROLLBACKS = [
    Misbehaviour("session.rollback", lambda s: s.rollback(), C),
    Misbehaviour("session.rollback in savepoint", nested(lambda s: s.rollback()), C),
    Misbehaviour("session.close", lambda s: s.close(), C),
    Misbehaviour("session.reset", lambda s: s.reset(), C),
    Misbehaviour("session.invalidate", lambda s: s.invalidate(), C),
    Misbehaviour("with session", _with_session, C),
    Misbehaviour("session.get_transaction().rollback", lambda s: s.get_transaction().rollback(), C),
    Misbehaviour("session.get_transaction().close", lambda s: s.get_transaction().close(), C),
    Misbehaviour("connection.rollback", lambda s: s.connection().rollback(), C),
    Misbehaviour("connection.get_transaction().rollback", lambda s: s.connection().get_transaction().rollback(), C),
    Misbehaviour("connection.close", lambda s: s.connection().close(), C),
    Misbehaviour("connection.invalidate", lambda s: s.connection().invalidate(), C),
]

MINE = Table("mine", MetaData(), Column("id", Integer, primary_key=True))
BY_AMOUNT = Index("by_amount", Table(TOTAL.name, MetaData(), Column("amount", Integer)).c.amount)  # none of TOTAL's own

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
    *(
        mariadb_text(sql, P)
        for sql in [
            "/*! COMMIT */", "/*!50000 COMMIT */ ", "/*M!100000 COMMIT*/", "# done\nCOMMIT", "--\tdone\nCOMMIT",
            r"select 'it\'s'; COMMIT", "select `;`; COMMIT", "BEGIN NOT ATOMIC COMMIT; END",
            "SET STATEMENT max_statement_time = 10 FOR COMMIT", "IF 1 THEN COMMIT; END IF",
            "SET autocommit=1", "SET @@session.autocommit = ON", "set @x = 1, autocommit = 1",
            "SET DEFAULT ROLE NONE", "LOCK TABLES total WRITE", "XA START 'x'", "TRUNCATE TABLE total",
            "ALTER TABLE total COMMENT 'x'", "create or replace table mine (id int)", "create/**/view mine as select 1",
        ]
    ),
    *(
        mariadb_text(sql, H)
        for sql in [
            r"select 'it\'s; COMMIT'", r'select "\"; COMMIT"', "select 1 as `; COMMIT`", "select 1 -- ; COMMIT",
            "select 1 # ; COMMIT", "create temporary table if not exists scratch (id int)",
            "drop temporary table if exists scratch", "SET SESSION max_statement_time = 0", "CALL harmless()",
            "SET STATEMENT max_statement_time = 10 FOR select 1", "EXECUTE IMMEDIATE 'select 1'", "analyze select 1",
        ]
    ),
    Misbehaviour("DDL of a table", lambda s: s.execute(DDL("create table mine (id int)"))  # type: ignore[no-untyped-call]
       , None, mariadb=P),
    Misbehaviour("CreateTable", lambda s: s.execute(CreateTable(MINE)), None, mariadb=P),
    Misbehaviour("Table.create", lambda s: MINE.create(s.connection()), None, mariadb=P),
    Misbehaviour("metadata.create_all", lambda s: MINE.metadata.create_all(s.connection()), None, mariadb=P),
    Misbehaviour("Index.create", lambda s: BY_AMOUNT.create(s.connection()), None, mariadb=P),
    Misbehaviour("connection.execute text", lambda s: s.connection().execute(text("COMMIT")), P),
    Misbehaviour("connection.scalar text", lambda s: s.connection().scalar(text("COMMIT")), P),
    Misbehaviour("connection.scalars text", lambda s: s.connection().scalars(text("COMMIT")), P),
    Misbehaviour("session.scalar text", lambda s: s.scalar(text("COMMIT")), P),
    Misbehaviour("session.scalars text", lambda s: s.scalars(text("COMMIT")), P),
    Misbehaviour("exec_driver_sql", lambda s: s.connection().exec_driver_sql("COMMIT"), P),
    Misbehaviour("DDL", lambda s: s.execute(DDL("COMMIT"))  # type: ignore[no-untyped-call]
       , P),
    Misbehaviour("text.columns", lambda s: s.execute(text("COMMIT").columns()), P),
    Misbehaviour("from_statement", lambda s: s.scalars(select(Total).from_statement(text("COMMIT"))), P),
    Misbehaviour("query.from_statement", lambda s: s.query(Total).from_statement(text("COMMIT")).all(), P),
    Misbehaviour(
        "options", lambda s: s.execute(text("COMMIT").execution_options(stream_results=True), {}), P
    ),
    Misbehaviour("'commit' as a value", lambda s: s.execute(text("select 'COMMIT', '; commit' as \"commit\"")), H),
    Misbehaviour("CREATE TABLE", lambda s: s.execute(text("create table if not exists mine (id int)")), H, mariadb=P),
    Misbehaviour("DROP TABLE", lambda s: s.execute(text("drop table if exists mine")), H, mariadb=P),
    Misbehaviour("procedural COMMIT", lambda s: s.execute(text("do $$ begin commit; end $$")), None, postgresql=B),
]  # fmt: skip

# Savepoints ------------------------------------------------------------------------------------------------------


def _savepoint_fails(session: Session) -> None:
    with session.begin_nested():
        session.execute(text("update total set amount = 1000"))
        fail(session)


def _swallow_in_savepoint(session: Session) -> None:
    swallow(_savepoint_fails, session)
    session.execute(text("select 1"))


def _connection_savepoint_fails(session: Session) -> None:
    with session.connection().begin_nested():
        fail(session)


def _raw_savepoint(session: Session) -> None:
    session.execute(text("SAVEPOINT mine"))
    swallow(fail, session)
    session.execute(text("ROLLBACK TO SAVEPOINT mine"))


def _driver_in_savepoint_rolled_back(session: Session) -> None:
    with contextlib.suppress(ZeroDivisionError), session.begin_nested():
        with contextlib.suppress(ZeroDivisionError), session.begin_nested():
            execute_raw(session, "update total set amount = 1000")
            raise ZeroDivisionError
        session.execute(text("select 1"))
        raise ZeroDivisionError


SAVEPOINTS = [
    Misbehaviour("driver read in nested", nested(raw("select 1")), H),
    Misbehaviour("driver write in nested, rolled back", _driver_in_savepoint_rolled_back, H),
    Misbehaviour("begin_nested", nested(lambda s: s.execute(text("select 1"))), H),
    Misbehaviour("begin_nested rolled back", lambda s: swallow(_savepoint_fails, s), H),
    Misbehaviour("nested in nested", nested(_swallow_in_savepoint), H),
    Misbehaviour("flush fails in nested", lambda s: swallow(nested(bad_flush), s), H),
    Misbehaviour("connection.begin_nested rolled back", lambda s: swallow(_connection_savepoint_fails, s), H),
    Misbehaviour("text SAVEPOINT and ROLLBACK TO", _raw_savepoint, H),
    Misbehaviour("text SAVEPOINT left open", lambda s: s.execute(text("SAVEPOINT mine")), H),
    Misbehaviour("error swallowed inside nested", nested(lambda s: swallow(fail, s)), H, postgresql=B),
    Misbehaviour("begin_nested left open", lambda s: s.begin_nested(), C),
    Misbehaviour("connection.begin_nested left open", lambda s: s.connection().begin_nested(), C),
]

# Swallowed errors ------------------------------------------------------------------------------------------------

SWALLOWED = [
    Misbehaviour("Core error", lambda s: swallow(fail, s), H, postgresql=C),
    Misbehaviour(
        "Core error, then another",
        in_order(lambda s: swallow(fail, s), lambda s: swallow(s.execute, text("select 1"))),
        H,
        postgresql=C,
    ),
    Misbehaviour("flush error", lambda s: swallow(bad_flush, s), C),
    Misbehaviour("flush error, then rollback", in_order(lambda s: swallow(bad_flush, s), lambda s: s.rollback()), C),
    Misbehaviour(
        "procedural COMMIT", lambda s: swallow(s.execute, text("do $$ begin commit; end $$")), None, postgresql=C
    ),
    Misbehaviour(
        "INSERT OR ROLLBACK",
        lambda s: swallow(s.execute, text("insert or rollback into total values ('a', 0)")),
        None,
        sqlite=C,
    ),
    Misbehaviour(
        "INSERT OR ROLLBACK raised",
        lambda s: s.execute(text("insert or rollback into total values ('a', 0)")),
        None,
        sqlite=B,
    ),
]

# Another database, another mode -----------------------------------------------------------------------------------


def _other_bind(session: Session) -> None:
    session.bind = create_engine("sqlite://")
    session.execute(text("select 1"))


OTHERS = [
    Misbehaviour("bind_arguments", lambda s: s.execute(
        text("select 1"), bind_arguments={"bind": create_engine("sqlite://")}), P),
    Misbehaviour("same bind, other options", lambda s: s.execute(
        text("select 1"), bind_arguments={"bind": s.get_bind().execution_options(x=1)}), P),
    Misbehaviour("session.bind", _other_bind, P),
    Misbehaviour("isolation_level AUTOCOMMIT", lambda s: s.connection().execution_options(
        isolation_level="AUTOCOMMIT"), R),
    Misbehaviour("SET TRANSACTION", lambda s: s.execute(
        text("set transaction isolation level read committed")), R, postgresql=B),
]  # fmt: skip

# Below SQLAlchemy: the driver's own connection ---------------------------------------------------------------------


def _result_commit(session: Session) -> None:
    cursor = cast("CursorResult[Any]", session.execute(text("select 1"))).cursor
    connection = getattr(cursor, "_adapt_connection", None) or cursor.connection
    committed = connection.commit()
    if inspect.isawaitable(committed):
        await_only(committed)


def _prepared_commit(session: Session) -> None:
    session.execute(text("prepare it from 'commit'"))
    session.execute(text("execute it"))


COMMIT_BEGIN = raw("COMMIT", "BEGIN")
FAIL_BELOW = raw("insert into total values ('a', 0)")
STREAM = {"stream_results": True}

BELOW = [
    Misbehaviour("driver cursor COMMIT, BEGIN in nested", nested(COMMIT_BEGIN), D),
    Misbehaviour(
        "driver cursor COMMIT, BEGIN after nested", in_order(_driver_in_savepoint_rolled_back, COMMIT_BEGIN), D
    ),
    Misbehaviour("driver cursor COMMIT, BEGIN, nested", in_order(COMMIT_BEGIN, nested(raw("select 1"))), D),
    Misbehaviour(
        "driver cursor COMMIT, BEGIN after a stream",
        in_order(lambda s: s.execute(text("select 1"), execution_options=STREAM).all(), COMMIT_BEGIN),
        D,
    ),
    mariadb_text("CALL commits()", D),
    mariadb_text("CALL commits_and_begins()", D),
    mariadb_text("SET STATEMENT max_statement_time = 10 FOR CALL commits()", D),
    mariadb_text("EXECUTE IMMEDIATE 'COMMIT'", D),
    mariadb_text("REPEAT COMMIT; UNTIL 1 END REPEAT", R),
    Misbehaviour("prepared COMMIT", _prepared_commit, None, mariadb=D),
    Misbehaviour("driver read", raw("select 1"), H),
    Misbehaviour("driver write", raw("update total set amount = amount"), H),
    Misbehaviour("driver commit", lambda s: driver_of(s).commit(), D),
    Misbehaviour(
        "driver commit, then session.rollback", in_order(lambda s: driver_of(s).commit(), lambda s: s.rollback()), D
    ),
    Misbehaviour("driver rollback", lambda s: driver_of(s).rollback(), E),
    Misbehaviour(
        "driver rollback, then driver write",
        in_order(lambda s: driver_of(s).rollback(), raw("insert into total values ('raw', 7)")),
        E,
    ),
    Misbehaviour("driver cursor COMMIT", raw("COMMIT"), D),
    Misbehaviour("driver cursor ROLLBACK", raw("ROLLBACK"), E),
    Misbehaviour("driver cursor COMMIT, BEGIN", COMMIT_BEGIN, D),
    Misbehaviour("driver cursor ROLLBACK, BEGIN", raw("ROLLBACK", "BEGIN"), E),
    Misbehaviour(
        "driver error swallowed",
        lambda s: swallow(FAIL_BELOW, s),
        H,
        postgresql=C,
    ),
    Misbehaviour("driver commit, then a driver error", in_order(lambda s: driver_of(s).commit(), FAIL_BELOW), D),
    Misbehaviour(
        "driver commit, then a driver error swallowed",
        in_order(lambda s: driver_of(s).commit(), lambda s: swallow(FAIL_BELOW, s)),
        D,
    ),
    Misbehaviour(
        "session.commit swallowed, then driver commit", in_order(lambda s: swallow(s.commit), COMMIT_BEGIN), D
    ),
    Misbehaviour("result.cursor commit", _result_commit, D, MySQLdb=None),
    Misbehaviour(
        "two statements",
        lambda s: s.execute(select(literal_column("1; select 1"))),
        H,
        sqlite=R,
        asyncpg=B,
        pymysql=R,
        MySQLdb=None,
    ),
]
