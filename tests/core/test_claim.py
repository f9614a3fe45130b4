"""What the claim is on each database, beside the contract: its cost, its errors, and the sessions that it refuses."""

import asyncio
import contextlib
import secrets
import sqlite3
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import URL, Connection, Engine, create_engine, event, select, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, make_transient_to_detached, scoped_session, sessionmaker
from sqlalchemy.pool import Pool, SingletonThreadPool, StaticPool

from databases import Database
from kit import Added, Base, Harness, Total, add
from projector_dedup import AsyncDispatcher, Dispatcher, Message, Outcome, on, projector
from projector_dedup.errors import (
    BatchFailed,
    InProgress,
    InvalidMessageIdError,
    MissingTableError,
    RefusedError,
    RetriesExhaustedError,
    TransactionViolatedError,
    UnsafeSessionError,
    UnsupportedDatabaseError,
)
from projector_dedup.markers import claim
from projector_dedup.options import RetryPolicy
from projector_dedup.tables import default_metadata, default_tables
from projector_dedup.unit_of_work import UnitOfWork
from projector_dedup.verdict import Action, verdict_of
from ready import engine_on, ready, role_on

totals = projector(idempotent=True, name="totals")(on(Added)(add))


@pytest.fixture
def harness(sync_url: URL) -> Iterator[Harness]:
    """The contract's tables, through each synchronous driver."""
    with ready(sync_url) as harness:
        yield harness


@pytest.fixture
def on_postgresql(postgresql: Database) -> Iterator[Harness]:
    """The contract's tables on PostgreSQL."""
    with ready(postgresql.url()) as harness:
        yield harness


def nothing_durable(harness: Harness) -> bool:
    """Neither marker nor write."""
    return (harness.totals(), harness.markers()) == ({}, [])


# AUTOCOMMIT, in all its spellings --------------------------------------------------------------------------------

SPELLINGS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "create_engine": ({"isolation_level": "AUTOCOMMIT"}, {}, {}),
    "execution_options": ({}, {"isolation_level": "AUTOCOMMIT"}, {}),
    "create_engine(execution_options)": ({"execution_options": {"isolation_level": "AUTOCOMMIT"}}, {}, {}),
    "connect_args": ({"connect_args": {"autocommit": True}}, {}, {}),
    "dispatcher": ({}, {}, {"isolation": "AUTOCOMMIT"}),
}


def _autocommit(url: URL, spelling: str) -> tuple[Engine, dict[str, Any]]:
    arguments, options, of_the_dispatcher = SPELLINGS[spelling]
    if spelling == "connect_args" and url.get_backend_name() == "sqlite":
        arguments = {"connect_args": {"isolation_level": None}}  # sqlite3 before Python 3.12
    elif spelling == "connect_args" and url.get_driver_name() == "psycopg2":
        arguments = {"connect_args": {"connection_factory": _psycopg2_in_autocommit}}  # it has no keyword for it
    return create_engine(url, **arguments).execution_options(**options), of_the_dispatcher


def _psycopg2_in_autocommit(*args: Any, **kwargs: Any) -> Any:
    from psycopg2.extensions import connection

    made = connection(*args, **kwargs)
    made.autocommit = True
    return made


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_autocommit_never_tears_marker_and_write_apart(harness: Harness, spelling: str) -> None:
    """Refused before anything is durable; or the library's own BEGIN makes it a transaction all the same."""
    engine, options = _autocommit(harness.subject.url, spelling)

    def fails(happened: Added, session: Session) -> None:
        add(happened, session)
        session.flush()
        raise KeyError("the handler's own")

    failing = projector(idempotent=True, name="totals")(on(Added)(fails))
    with pytest.raises((UnsafeSessionError, KeyError)) as outcome:
        Dispatcher(sessionmaker(engine), failing, **options).deliver(Added(), message_id="m1")
    assert nothing_durable(harness)
    sqlite3_without_its_own_begin = spelling == "connect_args" and engine.dialect.name == "sqlite"
    assert outcome.type is (KeyError if sqlite3_without_its_own_begin else UnsafeSessionError)
    engine.dispose()


@pytest.mark.parametrize("spelling", [spelling for spelling in SPELLINGS if spelling != "dispatcher"])
def test_claim_refuses_autocommit(harness: Harness, spelling: str) -> None:
    """The same in a transaction of the caller's own, which would be none."""
    engine, _ = _autocommit(harness.subject.url, spelling)
    with Session(engine) as session:
        if spelling == "connect_args" and engine.dialect.name == "sqlite":
            assert claim(session, "m1", "h")
            session.rollback()
        else:
            with pytest.raises(UnsafeSessionError, match="AUTOCOMMIT"):
                claim(session, "m1", "h")
    assert nothing_durable(harness)
    engine.dispose()


@pytest.mark.parametrize("spelling", ["create_engine", "execution_options", "dispatcher"])
def test_autocommit_is_refused_under_asyncio(async_url: URL, spelling: str) -> None:
    """By each asynchronous driver."""
    arguments, options, of_the_dispatcher = SPELLINGS[spelling]

    async def deliver() -> None:
        engine = create_async_engine(async_url, **arguments)
        async with engine.begin() as connection:
            await connection.run_sync(default_metadata.create_all)
        handler = projector(idempotent=True, name="totals")(on(Added)(_never))
        sessions = async_sessionmaker(engine.execution_options(**options))
        try:
            await AsyncDispatcher(sessions, handler, **of_the_dispatcher).deliver(Added(), message_id="m1")
        finally:
            await engine.dispose()

    with pytest.raises(UnsafeSessionError, match="AUTOCOMMIT"):
        asyncio.run(deliver())


# Other people's transactions, other databases --------------------------------------------------------------------


def test_a_session_on_a_connection_is_refused(harness: Harness) -> None:
    """Its transaction is somebody else's to commit; the error names what is meant for tests."""
    with harness.engine.connect() as connection:
        for begun in (False, True):
            if begun:
                connection.begin()
            with pytest.raises(UnsafeSessionError, match="external_transaction"):
                Dispatcher(sessionmaker(connection), totals).deliver(Added(), message_id="m1")
    assert nothing_durable(harness)


def test_a_read_model_on_another_engine_is_refused(harness: Harness, tmp_path: Any) -> None:
    """Marker and write could not commit together: nothing of either is durable."""
    other = create_engine(f"sqlite:///{tmp_path / 'other.sqlite3'}")
    default_metadata.create_all(other)
    Base.metadata.create_all(other)
    for binds in ({Total: other}, {default_tables.marker: other}):
        sessions = sessionmaker(harness.engine, binds=binds)
        with pytest.raises(Exception, match=r"second database connection|another engine"):
            Dispatcher(sessions, totals).deliver(Added(), message_id="m1")
        assert nothing_durable(harness)
        with other.connect() as connection:
            assert connection.scalar(text("select count(*) from contract_total")) == 0
            assert connection.scalar(text("select count(*) from processed_message")) == 0
    elsewhere = sessionmaker(harness.engine, binds={default_tables.marker: other})
    with elsewhere() as session, pytest.raises(UnsafeSessionError, match="another engine"):
        claim(session, "m1", "h")
    other.dispose()


def test_a_session_without_an_engine_is_refused(harness: Harness) -> None:
    """No bind, or one for other tables only."""
    for sessions in (sessionmaker(), sessionmaker(binds={Total: harness.engine})):
        with pytest.raises(UnsafeSessionError, match="no engine for the table"):
            Dispatcher(sessions, totals).deliver(Added(), message_id="m1")
        with sessions() as session, pytest.raises(UnsafeSessionError, match="no engine for the table"):
            claim(session, "m1", "h")


def test_claim_works_in_a_scoped_session(harness: Harness) -> None:
    """The caller's live session is refused by the dispatcher, not by `claim`, which is made for it."""
    scoped = scoped_session(sessionmaker(harness.engine))
    with pytest.raises(UnsafeSessionError, match="scoped_session is no sessionmaker"):
        Dispatcher(scoped, totals)  # type: ignore[arg-type]
    assert claim(scoped(), "m1", "h")
    scoped.commit()
    scoped.remove()
    assert harness.markers() == [("m1", "h")]


def test_claim_refuses_what_is_no_session_and_a_savepoint_of_the_connection(harness: Harness) -> None:
    """An AsyncSession is told to use run_sync; a savepoint hides from the session, not from the claim."""
    with pytest.raises(UnsafeSessionError, match="run_sync"):
        claim(AsyncSession(), "m1", "h")  # type: ignore[arg-type]  # the mistake
    with Session(harness.engine) as session:
        session.connection().begin_nested()
        with pytest.raises(UnsafeSessionError, match="savepoint"):
            claim(session, "m1", "h")
    assert nothing_durable(harness)


def _changed(session: Session) -> None:
    """As an object that stays loaded after a COMMIT of the session's own."""
    total = Total(key="b", amount=1)
    make_transient_to_detached(total)
    session.add(total)
    session.commit()
    total.amount = 2


def _deleted(session: Session) -> None:
    total = Total(key="b", amount=1)
    make_transient_to_detached(total)
    session.delete(total)


_USED: list[Callable[[Session], object]] = [
    lambda session: session.add(Total(key="a", amount=1)),
    lambda session: session.execute(select(1)),
    lambda session: session.begin(),
    _changed,
    _deleted,
]


def test_a_session_that_was_used_before_the_claim_is_refused(harness: Harness) -> None:
    """The claim is the first statement, or what was read before it could be stale."""
    for way in _USED:
        with UnitOfWork(harness.factory) as uow:
            way(uow.session)
            with pytest.raises(UnsafeSessionError, match="before the claim"):
                uow.claim("m1", "h")
    with UnitOfWork(harness.factory) as uow, pytest.raises(UnsafeSessionError, match="has claimed nothing"):
        uow.commit()
    with UnitOfWork(harness.factory) as uow:
        assert uow.claim("m1", "h")
        with pytest.raises(UnsafeSessionError, match="first statement"):
            uow.claim("m2", "h")
    assert nothing_durable(harness)


def test_after_a_claim_that_failed_nothing_can_be_committed(harness: Harness) -> None:
    """It would be without a marker."""
    with harness.engine.begin() as connection:
        default_tables.marker.drop(connection)
    with UnitOfWork(harness.factory) as uow:
        with pytest.raises(MissingTableError):
            uow.claim("m1", "h")
        with contextlib.suppress(Exception):
            add(Added(), uow.session)
        with pytest.raises(TransactionViolatedError, match=r"session\.commit"):
            uow.session.commit()
        with pytest.raises(UnsafeSessionError, match="claim failed"):
            uow.commit()
    default_metadata.create_all(harness.engine)
    assert nothing_durable(harness)


def _driver_commits_at_once(connection: Connection, cursor: Any, statement: str, *_: Any) -> None:
    if "INSERT" not in statement:
        return
    driver: Any = connection.connection.dbapi_connection
    match connection.dialect.driver:
        case "pysqlite":
            driver.isolation_level = None
        case "psycopg2":
            driver.autocommit = True
        case _:
            cursor.execute("SET autocommit = 1")


@pytest.mark.parametrize("bare", [False, True])
def test_a_listener_that_makes_the_claim_commit_at_once_is_found_out(harness: Harness, bare: bool) -> None:
    """Before the handler runs, whose writes would be another transaction."""
    if harness.engine.driver in ("mysqldb", "psycopg"):
        pytest.skip("mysqlclient cannot tell, and with psycopg 3 the claim brings its own BEGIN")
    event.listen(harness.engine, "before_cursor_execute", _driver_commits_at_once)
    with UnitOfWork(harness.factory) as uow, Session(harness.engine) as session:
        with pytest.raises(UnsafeSessionError, match="committed the claim at once"):
            claim(session, "m1", "h") if bare else uow.claim("m1", "h")
        if not bare:
            with pytest.raises(UnsafeSessionError, match="claim failed"):
                uow.commit()
    event.remove(harness.engine, "before_cursor_execute", _driver_commits_at_once)
    assert harness.totals() == {}


def test_a_handler_that_does_nothing_but_commit_below_is_found_out(harness: Harness) -> None:
    """By a connection that it has from elsewhere, so that only the driver can tell."""
    if harness.engine.driver == "mysqldb":
        pytest.skip("mysqlclient cannot tell")
    lent: list[Any] = []
    event.listen(harness.engine, "checkout", lambda driver, *_: lent.append(driver))
    handler = projector(idempotent=True, name="totals")(on(Added)(lambda _happened, _session: lent[-1].commit()))
    with pytest.raises(TransactionViolatedError) as found:
        Dispatcher(harness.factory, handler).deliver(Added(), message_id="m1")
    assert found.value.durable
    assert harness.markers() == [("m1", "totals")]


async def _never(_event: Added, _session: AsyncSession) -> None:
    raise AssertionError("entered")


@pytest.mark.parametrize("pool", [StaticPool, SingletonThreadPool])
def test_a_connection_that_is_shared_is_refused_everywhere(database: Database, pool: type[Pool]) -> None:
    """One session's COMMIT would commit another's marker, whoever claims."""
    engine = create_engine(database.url(), poolclass=pool)
    default_metadata.create_all(engine)
    with pytest.raises(UnsupportedDatabaseError, match=pool.__name__):
        Dispatcher(sessionmaker(engine), totals).deliver(Added(), message_id="m1")
    with Session(engine) as session, pytest.raises(UnsupportedDatabaseError, match=pool.__name__):
        claim(session, "m1", "totals")
    engine.dispose()


# PostgreSQL ------------------------------------------------------------------------------------------------------


def test_a_duplicate_costs_no_transaction_id(on_postgresql: Harness) -> None:
    """FACTS: a claim that finds the marker writes nothing, so that a storm of redeliveries bloats nothing."""
    on_postgresql.transact(lambda session: claim(session, "m1", "h"))

    def assigned(session: Session) -> Any:
        new = claim(session, "m1", "h")
        return new, session.scalar(text("select pg_current_xact_id_if_assigned()::text"))

    assert on_postgresql.transact(assigned) == (False, None)


def test_a_lock_timeout_of_the_handler_is_no_rival(on_postgresql: Harness) -> None:
    """`claim_timeout` bounds the handler's locks too; running out there is transient, never InProgress."""
    on_postgresql.transact(lambda session: session.add(Total(key="a", amount=0)))
    dispatcher = Dispatcher(on_postgresql.factory, totals, claim_timeout=0.05, retry=RetryPolicy(attempts=2, base=0))
    with Session(on_postgresql.engine) as holder:
        holder.execute(text("select * from contract_total for update"))
        with pytest.raises(RetriesExhaustedError) as exhausted:
            dispatcher.deliver(Added(), message_id="m1")
        assert isinstance(exhausted.value.__cause__, DBAPIError)
        assert not isinstance(exhausted.value, InProgress)
    assert on_postgresql.markers() == []
    assert dispatcher.deliver(Added(), message_id="m1").outcome is Outcome.APPLIED


def test_the_bound_ends_with_the_transaction(on_postgresql: Harness) -> None:
    """The pooled connection has its own `lock_timeout` back."""
    show = text("show lock_timeout")
    engine = create_engine(on_postgresql.subject.url, pool_size=1, max_overflow=0)
    with engine.connect() as connection:
        usual = connection.scalar(show)
    Dispatcher(sessionmaker(engine), totals, claim_timeout=0.05).deliver(Added(), message_id="m1")
    with engine.connect() as connection:
        assert connection.scalar(show) == usual
    engine.dispose()


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ("add check (handler <> 'totals')", RefusedError),
        ("drop constraint pk_processed_message, add primary key (message_id, handler) deferrable", MissingTableError),
        ("rename column occurred_at to at", MissingTableError),
        ("alter column processed_at drop default", MissingTableError),
        ("drop constraint pk_processed_message", MissingTableError),
    ],
)
def test_only_a_row_or_no_row_is_an_outcome(on_postgresql: Harness, change: str, error: type[Exception]) -> None:
    """Another violation than that of the unique index is an error, never a duplicate; so is that there is no index."""
    with on_postgresql.engine.begin() as connection:
        connection.execute(text(f"alter table processed_message {change}"))
    with pytest.raises(error) as raised:
        Dispatcher(on_postgresql.factory, totals).deliver(Added(), message_id="m1")
    assert type(raised.value) is error
    assert verdict_of(raised.value).action is Action.RETRY_LATER
    assert nothing_durable(on_postgresql)


def test_a_role_without_rights_loses_no_message(on_postgresql: Harness) -> None:
    """The error names what the server says; the message is no poison."""
    with role_on(on_postgresql.engine) as role:
        engine = create_engine(on_postgresql.subject.url, connect_args={"options": f"-c role={role}"})
        with pytest.raises(RefusedError, match=r"permission denied.*The message is not the cause") as raised:
            Dispatcher(sessionmaker(engine), totals).deliver(Added(), message_id="m1")
        engine.dispose()
    assert verdict_of(raised.value).action is Action.RETRY_LATER
    assert nothing_durable(on_postgresql)


@pytest.mark.parametrize("way", ["single", "batch"])
def test_an_id_that_the_encoding_lacks_is_the_messages_fault(on_postgresql: Harness, way: str) -> None:
    """In a database in LATIN1 it is refused as an id, and the others of its batch are applied."""
    name = f"pdtest_{secrets.token_hex(4)}"
    url = on_postgresql.subject.url.update_query_dict({"client_encoding": "utf8"})
    admin = create_engine(on_postgresql.subject.url, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(
            text(f"create database {name} encoding 'LATIN1' template template0 lc_collate 'C' lc_ctype 'C'")
        )
    try:
        with engine_on(url.set(database=name)) as engine:
            dispatcher = Dispatcher(sessionmaker(engine), totals)
            if way == "single":
                with pytest.raises(InvalidMessageIdError, match="cannot store this id"):
                    dispatcher.deliver(Added(), message_id="order-\u20ac5")
            else:
                with pytest.raises(BatchFailed) as raised:
                    dispatcher.deliver_batch([Message(each, Added()) for each in ("a", "order-\u20ac5", "b")])
                failed = [each.message_id for each in raised.value.deliveries if each.error is not None]
                assert failed == ["order-\u20ac5"]
    finally:
        with admin.connect() as connection:
            connection.execute(text(f"drop database {name} with (force)"))
        admin.dispose()


# SQLite ----------------------------------------------------------------------------------------------------------


def test_a_begin_hook_of_the_users_own_is_fine(sqlite: Database) -> None:
    """SQLAlchemy's recipe for pysqlite, a driver that never begins, an IMMEDIATE of its own: once, all the same."""
    for arguments, hook in [
        ({"isolation_level": None}, "BEGIN"),
        ({"isolation_level": None, "timeout": 1}, None),
        ({"isolation_level": "IMMEDIATE"}, None),
    ]:
        with engine_on(sqlite.url(), connect_args=arguments) as engine:
            if hook:
                event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))
            dispatcher = Dispatcher(sessionmaker(engine), totals)
            outcomes = [dispatcher.deliver(Added(), message_id=str(arguments)).outcome for _ in range(2)]
            assert outcomes == [Outcome.APPLIED, Outcome.DUPLICATE]


@pytest.mark.parametrize("idempotent", [True, False])
def test_nobody_writes_between_what_a_handler_reads_and_writes_on_sqlite(sqlite: Database, idempotent: bool) -> None:
    """The write lock is taken before anything is read, also where there is no marker to claim."""
    refused: list[str] = []

    @projector(idempotent=idempotent, name="reads first")
    @on(Added)
    def reads_first(_happened: Added, session: Session) -> None:
        session.get(Total, "a")
        rival = sqlite3.connect(str(sqlite.url().database), timeout=0)
        try:
            rival.execute("INSERT INTO contract_total (key, amount) VALUES ('b', 1)")
        except sqlite3.OperationalError as error:
            refused.append(str(error))
        rival.close()

    with engine_on(sqlite.url()) as engine:
        Dispatcher(sessionmaker(engine), reads_first).deliver(Added(), message_id="m1")
    assert refused == ["database is locked"]


def test_the_bound_of_a_claim_ends_with_it_on_sqlite(sqlite: Database) -> None:
    """Whoever has the connection next waits for a lock as long as the engine says."""
    with engine_on(sqlite.url(), connect_args={"timeout": 3}, pool_size=1, max_overflow=0) as engine:
        Dispatcher(sessionmaker(engine), totals, claim_timeout=0.05).deliver(Added(), message_id="m1")
        with engine.connect() as connection:
            assert connection.exec_driver_sql("PRAGMA busy_timeout").scalar_one() == 3000


def test_a_connection_that_is_closed_holds_no_lock_though_a_cursor_is_alive_on_sqlite(sqlite: Database) -> None:
    """A traceback, say, holds the cursor of the statement that was interrupted; others write all the same."""
    with engine_on(sqlite.url()) as engine:
        Dispatcher(sessionmaker(engine), totals).deliver(Added(), message_id="m1")
        with engine.connect() as connection:
            connection.exec_driver_sql("BEGIN IMMEDIATE")
            driver: Any = connection.connection.driver_connection
            unfinished = driver.execute("SELECT 1 FROM contract_total UNION ALL SELECT 2")
            unfinished.fetchone()
            connection.invalidate()
        other = sqlite3.connect(str(sqlite.url().database), timeout=0, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        other.close()
        del unfinished


def test_what_a_refused_commit_of_somebody_left_open_is_not_adopted(sqlite: Database) -> None:
    """A caller's own claim whose COMMIT was refused (a reader held the file) is not there for the next delivery."""
    engine = create_engine(sqlite.url(), connect_args={"timeout": 0.1}, pool_size=1, max_overflow=0)
    with ready(sqlite.url()):
        dispatcher = Dispatcher(sessionmaker(engine), totals)
        for earlier in ("e1", "e2", "e3"):  # a reader that is not at its end holds the file
            dispatcher.deliver(Added(), message_id=earlier)
        reader = sqlite3.connect(str(sqlite.url().database))
        rows = reader.execute("SELECT * FROM processed_message")
        rows.fetchone()
        with Session(engine) as session:
            assert claim(session, "m1", totals.handler.identity)
            with pytest.raises(DBAPIError, match="locked"):
                session.commit()
        rows.close()
        reader.close()
        assert dispatcher.deliver(Added(), message_id="m1").outcome is Outcome.APPLIED
    engine.dispose()
