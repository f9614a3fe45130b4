"""BEGIN and the claim in one message, through psycopg 3: when, when not, and that nobody can tell but by the clock."""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, create_engine, event, select, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from cut_proxy import CutProxy
from databases import Database
from kit import Added, Total
from projector_dedup import AsyncDispatcher, Dispatcher, Outcome, make_tables, on, projector
from projector_dedup.dialects import dialect_of
from projector_dedup.errors import InProgress, MissingTableError, UnsafeSessionError, UnsupportedDatabaseError
from projector_dedup.tables import default_metadata
from projector_dedup.unit_of_work import UnitOfWork
from ready import engine_on

TOGETHER, APART = 4, 5
"""Round trips of a new message."""


def prepare(database: Database) -> None:
    """The tables, and one row."""
    with engine_on(database.url()) as engine, Session(engine) as session:
        session.add(Total(key="a", amount=0))
        session.commit()


@pytest.fixture
def proxy(postgresql: Database) -> Iterator[CutProxy]:
    """Counts the round trips to a database with the tables and one row."""
    prepare(postgresql)
    with CutProxy(postgresql.url()) as proxy:
        yield proxy


EngineOf = Callable[..., Engine]


@pytest.fixture
def engine_of(postgresql: Database, proxy: CutProxy) -> Iterator[EngineOf]:
    """Makes engines of one connection, through the proxy."""
    made: list[Engine] = []

    def make(**arguments: Any) -> Engine:
        made.append(create_engine(proxy.through(postgresql.url()), pool_size=1, max_overflow=0, **arguments))
        return made[-1]

    yield make
    for engine in made:
        engine.dispose()


def add(_event: Added, session: Session) -> None:
    """Ordinary ORM code: one SELECT, which does not come with the claim (test_first_row.py), and one UPDATE."""
    session.scalars(select(Total).where(Total.key == "a")).one().amount += 1


def dispatcher_on(engine: Engine, body: Callable[[Any, Session], None] = add, **options: Any) -> Dispatcher:
    """One handler, `body`."""
    return Dispatcher(sessionmaker(engine), projector(idempotent=True, name="totals")(on(Added)(body)), **options)


ids = (f"m{number}" for number in itertools.count())


def trips(proxy: CutProxy, dispatcher: Dispatcher, message_id: str | None = None) -> int:
    """The round trips of one new message."""
    before = len(proxy.trips)
    assert dispatcher.deliver(Added(), message_id=message_id or next(ids)).outcome is Outcome.APPLIED
    return len(proxy.trips) - before


def warm(proxy: CutProxy, dispatcher: Dispatcher) -> int:
    """The round trips of one new message, once psycopg has prepared its statements."""
    for _ in range(8):
        trips(proxy, dispatcher)
    return trips(proxy, dispatcher)


def test_begin_says_the_level_and_comes_with_the_claim(proxy: CutProxy, engine_of: EngineOf) -> None:
    """The wire has both in one trip; the transaction is at the level that was asked for."""
    levels: list[str] = []
    dispatcher = dispatcher_on(
        engine_of(), lambda _, session: levels.append(session.scalar(text("show transaction_isolation")))
    )
    dispatcher.deliver(Added(), message_id="level")
    (opening,) = [trip for trip in proxy.trips if any("INSERT INTO processed_message" in each for each in trip)]
    assert opening[0] == "Parse: BEGIN ISOLATION LEVEL REPEATABLE READ"
    assert levels == ["repeatable read"]


@pytest.mark.parametrize("isolation", [None, "READ COMMITTED", "SERIALIZABLE"])
@pytest.mark.parametrize("target", ["nobody", Session, Engine])
def test_the_level_is_that_of_the_unit_of_work_and_of_nobody_else(
    engine_of: EngineOf, target: Any, isolation: str | None
) -> None:
    """Also where a listener of the user's has begun the transaction before the claim could say the level."""
    engine, levels, looked = engine_of(), list[str](), list[Any]()

    def look(*arguments: Any) -> None:
        looked.append(arguments[-1])
        looked[-1].exec_driver_sql("select 1")

    def body(_event: Added, session: Session) -> None:
        levels.append(session.scalar(text("show transaction_isolation")))

    listening = {Session: (Session, "after_begin", look), Engine: (engine, "begin", look)}.get(target)
    if listening:
        event.listen(*listening)
    try:
        dispatcher = dispatcher_on(engine, body, isolation=isolation)
        for number in range(3):
            dispatcher.deliver(Added(), message_id=f"level-{number}")
            with engine.connect() as connection:
                assert connection.scalar(text("show transaction_isolation")) == "read committed"
    finally:
        if listening:
            event.remove(*listening)
    assert levels == [(isolation or "REPEATABLE READ").lower()] * 3
    assert target is not Session or len(looked) == 4, "only the first message has to begin twice"


@pytest.mark.parametrize(
    ("isolation", "refused"),
    [("REPEATABLE_READ", None), ("AUTOCOMMIT", UnsafeSessionError), ("SOME", UnsafeSessionError)],
)
def test_a_level_that_is_written_otherwise_is_sqlalchemys(
    engine_of: EngineOf, isolation: str, refused: type[Exception] | None
) -> None:
    """Which knows other spellings, and says what is none."""
    levels: list[str] = []
    dispatcher = dispatcher_on(
        engine_of(),
        lambda _, session: levels.append(session.scalar(text("show transaction_isolation"))),
        isolation=isolation,
    )
    for number in range(2):
        with pytest.raises(refused) if refused else nullcontext():
            dispatcher.deliver(Added(), message_id=f"level-{number}")
    assert levels == ([] if refused else ["repeatable read"] * 2)


@pytest.mark.parametrize(
    "arguments",
    [
        {"connect_args": {"prepare_threshold": None}},
        {"connect_args": {"cursor_factory": psycopg.ClientCursor}},
        {"connect_args": {"client_encoding": "LATIN1"}},
        {"execution_options": {"postgresql_deferrable": True}},
    ],
    ids=lambda given: str(next(iter(next(iter(given.values()))))),
)
def test_what_is_not_usual_stays_as_it_was(proxy: CutProxy, engine_of: EngineOf, arguments: dict[str, Any]) -> None:
    """Behind poolers, with cursors of the user's own, in other encodings: BEGIN is a trip, and all works."""
    assert warm(proxy, dispatcher_on(engine_of(**arguments))) == APART


def test_listeners_see_the_claim_and_may_change_its_text(proxy: CutProxy, engine_of: EngineOf) -> None:
    """As of any statement; and a text that is another each time does not pile up on the server."""
    engine, seen, numbers = engine_of(), list[str](), itertools.count()

    @event.listens_for(engine, "before_cursor_execute", retval=True)
    def comment(*arguments: Any) -> tuple[str, Any]:
        seen.append(arguments[2])
        return f"{arguments[2]} /* 100%% {next(numbers)} */", arguments[3]

    dispatcher = dispatcher_on(engine)
    for _ in range(40):
        trips(proxy, dispatcher)
    assert len([sql for sql in seen if sql.startswith("INSERT INTO processed_message")]) == 40
    with engine.connect() as connection:
        count = "select count(*) from pg_prepared_statements where starts_with(name, 'projector_dedup')"
        assert 0 < connection.scalar(text(count)) <= 16
    assert trips(proxy, dispatcher) <= TOGETHER


def test_a_statement_that_was_forgotten_is_prepared_again(proxy: CutProxy, engine_of: EngineOf) -> None:
    """psycopg sends DEALLOCATE ALL after a ROLLBACK. The next claim costs the trip that it would have saved."""

    def body(event: Added, session: Session) -> None:
        if event.amount == 2:
            savepoint = session.begin_nested()
            add(event, session)
            savepoint.rollback()
        add(event, session)

    dispatcher = dispatcher_on(engine_of(), body)
    assert warm(proxy, dispatcher) == TOGETHER
    dispatcher.deliver(Added(amount=2), message_id="nested")
    assert any("DEALLOCATE ALL" in each for trip in proxy.trips for each in trip)
    proxy.trips.clear()
    assert dispatcher.deliver(Added(), message_id="after").outcome is Outcome.APPLIED
    assert [trip for trip in proxy.trips if any("ROLLBACK" in each for each in trip)] != []
    assert dispatcher.deliver(Added(), message_id="after").outcome is Outcome.DUPLICATE
    assert warm(proxy, dispatcher) == TOGETHER


def test_a_redelivery_leaves_what_is_prepared(proxy: CutProxy, engine_of: EngineOf) -> None:
    """It ends by COMMIT, of nothing: at a ROLLBACK psycopg would prepare every statement anew."""
    dispatcher = dispatcher_on(engine_of())
    warm(proxy, dispatcher)
    dispatcher.deliver(Added(), message_id="twice")
    proxy.trips.clear()
    assert dispatcher.deliver(Added(), message_id="twice").outcome is Outcome.DUPLICATE
    assert [trip[-1] for trip in proxy.trips] == ["Sync", "Query: COMMIT"]
    assert trips(proxy, dispatcher) == TOGETHER


@pytest.mark.parametrize("message_id", ["it's", "100%", "%(handler)s", "$1", "'); DROP TABLE total; --", "żółw \\ 亀"])
def test_ids_are_parameters(engine_of: EngineOf, message_id: str) -> None:
    """Whatever is in them."""
    dispatcher = dispatcher_on(engine_of())
    assert dispatcher.deliver(Added(), message_id=message_id).outcome is Outcome.APPLIED
    assert dispatcher.deliver(Added(), message_id=message_id).outcome is Outcome.DUPLICATE


def test_the_table_may_have_a_percent_sign_in_its_name(proxy: CutProxy, engine_of: EngineOf) -> None:
    """SQLAlchemy doubles it for psycopg; libpq wants it as it is."""
    engine, tables = engine_of(), make_tables(default_metadata.__class__(), name="seen_50%")
    tables.marker.metadata.create_all(engine)
    assert warm(proxy, dispatcher_on(engine, tables=tables)) == TOGETHER


def test_a_claim_that_fails_leaves_the_connection_as_any_other(proxy: CutProxy, engine_of: EngineOf) -> None:
    """No table, and a rival that holds the claim: the pool's one connection goes on."""
    engine = engine_of()
    nowhere = make_tables(default_metadata.__class__(), name="not_there")
    patient, hasty = dispatcher_on(engine), dispatcher_on(engine, claim_timeout=0.05)
    warm(proxy, patient)
    with pytest.raises(MissingTableError):
        dispatcher_on(engine, tables=nowhere).deliver(Added(), message_id="x")
    rival = create_engine(engine.url)
    with UnitOfWork(sessionmaker(rival)) as uow:
        assert uow.claim("held", "totals")
        with pytest.raises(InProgress):
            hasty.deliver(Added(), message_id="held")
    rival.dispose()
    with engine.connect() as connection:
        driver: Any = connection.connection.driver_connection
        assert driver.pgconn.pipeline_status == psycopg.pq.PipelineStatus.OFF
    assert warm(proxy, patient) == TOGETHER


def test_a_line_that_is_cut_before_the_claim_is_another_attempt(proxy: CutProxy, engine_of: EngineOf) -> None:
    """The connection in the pool is dead: an OperationalError, as for any statement, and a retry."""
    engine, errors = engine_of(), list[BaseException]()
    event.listen(engine, "handle_error", lambda context: errors.append(context.sqlalchemy_exception))
    dispatcher = dispatcher_on(engine)
    warm(proxy, dispatcher)
    with engine.connect() as connection:
        backend = connection.connection.driver_connection.info.backend_pid  # type: ignore[union-attr]
    killer = create_engine(engine.url)
    with killer.begin() as connection:
        connection.execute(text("select pg_terminate_backend(:backend)"), {"backend": backend})
    killer.dispose()
    assert dispatcher.deliver(Added(), message_id="cut").outcome is Outcome.APPLIED
    assert [type(error) for error in errors] == [OperationalError]


def _wait_for_a_wait(engine: Engine) -> None:
    waiting = "select 1 from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        while connection.scalar(text(waiting)) is None:
            time.sleep(0.01)


def test_a_task_that_is_cancelled_while_its_claim_waits(postgresql: Database) -> None:
    """The statement is cancelled on the server, nothing of it stays, and the next delivery applies."""

    prepare(postgresql)

    async def body(_event: Added, session: AsyncSession) -> None:
        (await session.get_one(Total, "a")).amount += 1

    async def run() -> Outcome:
        engine = create_async_engine(postgresql.url(), pool_size=1, max_overflow=0)
        dispatcher = AsyncDispatcher(
            async_sessionmaker(engine), projector(idempotent=True, name="totals")(on(Added)(body))
        )
        await dispatcher.deliver(Added(), message_id="first")
        rival = create_engine(postgresql.url())
        with UnitOfWork(sessionmaker(rival)) as uow:
            assert uow.claim("held", "totals")
            waiting = asyncio.ensure_future(dispatcher.deliver(Added(), message_id="held"))
            await asyncio.to_thread(_wait_for_a_wait, rival)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        rival.dispose()
        outcome = (await dispatcher.deliver(Added(), message_id="held")).outcome
        await engine.dispose()
        return outcome

    assert asyncio.run(run()) is Outcome.APPLIED


def test_a_driver_that_does_not_count_is_refused(engine_of: EngineOf) -> None:
    """A claim of which nobody knows whether it is new is neither new nor a duplicate."""
    engine, marker = engine_of(connect_args={"prepare_threshold": None}), default_metadata.tables["processed_message"]
    uncounted = dialect_of(engine).claim_statement(marker, bounded=False).execution_options(preserve_rowcount=False)
    key = {"message_id": "m", "handler": "h", "occurred_at": None}
    with engine.begin() as connection, pytest.raises(UnsupportedDatabaseError, match="how many rows"):
        dialect_of(engine).claim(connection, uncounted, marker, key)
