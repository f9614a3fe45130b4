"""`verdict_of` on errors of real databases: raw, through SQLAlchemy, and through a delivery."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import URL, Engine, NullPool, QueuePool, create_engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from databases import DRIVERS, Database, Driver, each_driver
from projector_dedup import Defer, Dispatcher, Message, Outcome, on, projector
from projector_dedup.commands import Call, Commands, DuplicateCommandError, command
from projector_dedup.dialects import sqlstate_of
from projector_dedup.errors import BatchFailed, DeliveryFailed, MissingTableError, RetriesExhaustedError
from projector_dedup.options import RetryPolicy
from projector_dedup.verdict import FAILURES, Action, verdict_of
from provoked import FIRST, PROVOKED, Provoked, held, make_provoked
from rig import tables_on


def _raise(url: URL, driver: Driver, error: Provoked) -> None:
    async def awaited() -> None:
        async with create_async_engine(url, poolclass=NullPool).connect() as connection:
            await connection.run_sync(error.run)

    if driver.is_async:
        asyncio.run(awaited())
        return
    with create_engine(url, poolclass=NullPool).connect() as connection:
        error.run(connection)


def _code(engine: str, error: Any) -> str | None:
    """The code of a driver's error, as `PROVOKED` writes it."""
    if engine == "sqlite":
        return str(error.sqlite_errorname)
    return sqlstate_of(error) if engine == "postgresql" else str(error.args[0])


@each_driver()
def test_the_errors_of_a_database(request: pytest.FixtureRequest, driver: Driver) -> None:
    """Of each error SQLAlchemy's has the answer of the table, and so has the driver's own, below it."""
    database: Database = request.getfixturevalue(driver.engine)
    url, wrong = database.url(driver.drivername), []
    make_provoked(database.url())
    for error in PROVOKED["mysql" if database.is_mysql else driver.engine]:
        with held(database.url(), error), pytest.raises(DBAPIError) as info:
            _raise(url, driver, error)
        raised = info.value
        original: BaseException | None = raised.orig
        if driver.module == "asyncpg" and original is not None:  # SQLAlchemy has put an error of its own in between
            original = original.__cause__
        found = [verdict_of(raised).action, verdict_of(raised).error is raised]
        expected: list[Any] = [FAILURES[error.means].action, True]
        if not raised.connection_invalidated:
            assert original is not None
            found += [_code(driver.engine, original), verdict_of(original).action]
            expected += [error.code, FAILURES[error.means].action]
        if found != expected:
            wrong.append(f"{error}: {found}, not {expected}")
    assert wrong == []


# Through a delivery ---------------------------------------------------------------------------------------------------

Body = Callable[[Session], object]


def _dispatcher(engine: Engine, *bodies: Body) -> Dispatcher:
    def handler(name: str, body: Body) -> Any:
        @projector(idempotent=True, name=name)
        @on(str)
        def handle(_event: str, session: Session) -> None:
            body(session)

        return handle

    handlers = [handler(f"handler{number}", body) for number, body in enumerate(bodies)]
    return Dispatcher(sessionmaker(engine), *handlers, retry=RetryPolicy(attempts=1))


def _delivered(engine: Engine, *bodies: Body) -> Exception:
    """The error that a consumer gets."""
    with pytest.raises(Exception) as raised:  # noqa: PT011  # which one is what the tests ask
        _dispatcher(engine, *bodies).deliver("event", message_id="m1")
    return raised.value


def _applies(engine: Engine) -> bool:
    """True if another delivery of the message, when all is well, applies it."""
    delivery = _dispatcher(engine, lambda session: session.execute(text("SELECT 1"))).deliver("event", message_id="m1")
    return delivery.outcome is Outcome.APPLIED


@pytest.fixture
def usual(database: Database) -> Iterator[Engine]:
    """An engine of each database, with the tables in it."""
    engine = tables_on(create_engine(database.url()))
    yield engine
    engine.dispose()


DELIVERED = [("postgresql", "53100"), ("postgresql", "57014"), ("postgresql", "55P03")]
DELIVERED += [("postgresql", "26000"), ("mariadb", "1030")]
DELIVERED += [("mariadb", "1021"), ("mariadb", "1317"), ("mariadb", "1205"), ("sqlite", "SQLITE_FULL")]


@pytest.mark.parametrize(("name", "code"), DELIVERED)
def test_what_passes_is_delivered_later(request: pytest.FixtureRequest, name: str, code: str) -> None:
    """A full disk, a held lock, a lost prepared statement: nothing was applied, and a later delivery applies it."""
    error = next(each for each in PROVOKED[name] if each.code == code)
    database: Database = request.getfixturevalue(name)
    engine = tables_on(create_engine(database.url(), poolclass=NullPool))
    make_provoked(database.url())
    with held(database.url(), error):
        raised = _delivered(engine, lambda session: error.run(session.connection()))
    assert verdict_of(raised).action is Action.RETRY_LATER
    assert _applies(engine)


def test_a_wrapped_error_is_seen(postgresql: Database) -> None:
    """A handler that makes an error of its own of a database's does not turn it into poison."""
    engine = tables_on(create_engine(postgresql.url(), poolclass=NullPool))

    def body(session: Session) -> None:
        try:
            session.execute(text("DO $$ BEGIN RAISE EXCEPTION 'full' USING ERRCODE = '53100'; END $$"))
        except DBAPIError as error:
            raise LookupError("no totals") from error

    raised = _delivered(engine, body)
    assert isinstance(raised, LookupError)
    assert verdict_of(raised).action is Action.RETRY_LATER
    assert verdict_of(raised).error is raised.__cause__


def test_poison_is_rejected(usual: Engine) -> None:
    """A handler's own error, and rows that the database refuses again and again, also after the library's retries."""
    make_provoked(usual.url)
    with usual.begin() as connection:
        connection.exec_driver_sql(FIRST)

    def raises(_session: Session) -> None:
        raise ValueError("no amount")

    for body in (raises, lambda session: session.execute(text(FIRST))):
        assert verdict_of(_delivered(usual, body)).action is Action.REJECT


def test_a_pool_without_a_free_connection(usual: Engine) -> None:
    """The error of SQLAlchemy's pool is no poison: somebody else has all connections."""
    engine = create_engine(usual.url, poolclass=QueuePool, pool_size=1, max_overflow=0, pool_timeout=0.05)
    with engine.connect():
        raised = _delivered(engine, lambda _session: None)
        assert verdict_of(raised).action is Action.RETRY_LATER
    assert _applies(engine)
    engine.dispose()


def test_a_missing_table_is_not_the_messages_fault(database: Database) -> None:
    """A deployment before its migration sends no queue to the dead letters."""
    engine = create_engine(database.url(), poolclass=NullPool)
    raised = _delivered(engine, lambda _session: None)
    assert isinstance(raised, MissingTableError)
    assert verdict_of(raised).action is Action.RETRY_LATER
    tables_on(engine)
    assert _applies(engine)


@pytest.mark.parametrize("driver", [each for each in DRIVERS if each.module != "aiosqlite"], ids=str)
def test_a_server_that_is_not_there(driver: Driver, tmp_path: Path) -> None:
    """Neither the driver's own error nor the one of a delivery sends a message to the dead letters."""
    nowhere = {"port": 1, "host": "127.0.0.1", "username": "nobody", "database": "nothing"}
    if driver.engine == "sqlite":
        nowhere = {"database": str(tmp_path / "no" / "folder" / "here")}
    url = URL.create(driver.drivername, **nowhere)  # type: ignore[arg-type]
    if driver.is_async:
        raised = asyncio.run(_raised_at_connecting(url))
    else:
        raised = _delivered(create_engine(url, poolclass=NullPool), lambda _session: None)
        assert isinstance(raised, RetriesExhaustedError)
        assert verdict_of(raised).action is Action.RETRY_LATER
        assert raised.__cause__ is not None
        raised = raised.__cause__  # type: ignore[assignment]
    assert verdict_of(raised).action is not Action.REJECT


async def _raised_at_connecting(url: URL) -> Exception:
    with pytest.raises(Exception) as raised:  # noqa: PT011
        async with create_async_engine(url, poolclass=NullPool).connect():
            pass
    return raised.value


def test_one_handler_is_poison_and_another_is_to_be_retried(usual: Engine) -> None:
    """The message is retried first; once only the poison is left, it is rejected."""
    missing = [True]

    def waits(_session: Session) -> None:
        if missing:
            raise Defer("before its time")

    def raises(_session: Session) -> None:
        raise ValueError("no amount")

    dispatcher = _dispatcher(usual, raises, waits)
    with pytest.raises(DeliveryFailed) as failed:
        dispatcher.deliver("event", message_id="m1")
    assert verdict_of(failed.value).action is Action.RETRY_LATER
    assert isinstance(failed.value.delivery.error, ExceptionGroup)
    assert verdict_of(failed.value.delivery.error) == verdict_of(failed.value)
    missing.clear()
    with pytest.raises(DeliveryFailed) as failed:
        dispatcher.deliver("event", message_id="m1")
    assert verdict_of(failed.value).action is Action.REJECT
    assert failed.value.delivery.outcomes == {"handler0": Outcome.FAILED, "handler1": Outcome.APPLIED}


def test_a_duplicate_command_that_a_handler_lets_out_is_rejected(sqlite: Database, tmp_path: Path) -> None:
    """The command is done, but the handler's own writes are rolled back: an acknowledgement would lose them."""
    elsewhere = tables_on(create_engine(f"sqlite:///{tmp_path / 'elsewhere.db'}"))
    engine = tables_on(create_engine(sqlite.url(), poolclass=NullPool))
    commands = Commands(sessionmaker(elsewhere))

    @command(name="ship")
    def ship(_order: str, _call: Call) -> None: ...

    def again(_session: Session | None = None) -> None:
        commands.handle(ship, "order", key="1", raise_on_duplicate=True)

    again()
    with pytest.raises(DuplicateCommandError) as done:
        again()
    assert verdict_of(done.value).action is Action.ACKNOWLEDGE
    raised = _delivered(engine, again)
    assert isinstance(raised, DuplicateCommandError)
    assert verdict_of(raised).action is Action.REJECT
    elsewhere.dispose()


def test_each_message_of_a_batch_has_its_answer(usual: Engine) -> None:
    """Which one is poison, which one waits, and which one may be acknowledged, without delivering any again."""

    @projector(idempotent=True, name="batch")
    @on(str)
    def handle(body: str, _session: Session) -> None:
        if body == "poison":
            raise ValueError("no amount")
        if body == "early":
            raise Defer("before its time")

    dispatcher = Dispatcher(sessionmaker(usual), handle)
    bodies = ("good", "poison", "early", "good")
    with pytest.raises(BatchFailed) as failed:
        dispatcher.deliver_batch([Message(f"m{number}", body) for number, body in enumerate(bodies)])
    answers = [each.error and verdict_of(each.error).action for each in failed.value.deliveries]
    assert answers == [None, Action.REJECT, Action.RETRY_LATER, None]
    assert verdict_of(failed.value).action is Action.RETRY_LATER
