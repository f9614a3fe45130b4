"""`@on(..., reads={...})`: what may be declared, and which rows are read then."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import permutations
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, select, text, update
from sqlalchemy.event import listen
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from databases import ENGINES, Database
from few_rows import ROWS, Added, Named, Total, engine_of, sent_by, totals
from projector_dedup import (
    Action,
    Dispatcher,
    HandlerDefinitionError,
    Message,
    Outcome,
    ProcessedMessage,
    on,
    projector,
    verdict_of,
)

READ = "SELECT few_total"


@pytest.fixture(name="engine", params=["postgresql", "mariadb", "sqlite"])
def engine_fixture(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """The tables, and rows of zeros."""
    with engine_of(request.getfixturevalue(request.param)) as engine:
        yield engine


@pytest.fixture(name="server", params=["postgresql", "mariadb"])
def server_fixture(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """The same, where rows are locked."""
    with engine_of(request.getfixturevalue(request.param)) as engine:
        yield engine


async def _awaited(_event: object) -> list[int]:
    return []


class NoEntity:
    """Not mapped."""


@pytest.mark.parametrize(
    ("reads", "words"),
    [
        ({NoEntity: "id"}, "no mapped class"),
        ({"Total": "id"}, "no mapped class"),
        ({Total.__table__: "id"}, "no mapped class"),
        ({Total: 1}, "dotted path"),
        ({Total: ""}, "dotted path"),
        ({Total: "row..id"}, "dotted path"),
        ({Total: ("row", "row")}, "is not for 1 column: write a tuple"),
        ({Named: "shop"}, "is not for 2 columns: write a tuple"),
        ({Named: ["shop", "number"]}, "2 columns"),
        ({Total: _awaited}, "not an async one"),
        ({Total: []}, "says nothing"),
        ({}, "takes a mapping"),
        ([Total], "takes a mapping"),
    ],
    ids=map(str, range(13)),
)
def test_what_is_no_declaration_is_refused_where_it_stands(reads: Any, words: str) -> None:
    """Before anything is delivered, with words that say what to write."""
    with pytest.raises(HandlerDefinitionError, match=words):
        on(Added, reads=reads)


@dataclass(frozen=True)
class Moved:
    """From one row to another."""

    source: int
    target: int


def handler_of(reads: Any, **settings: Any) -> Any:
    """Move one from row to row, with these declarations."""

    @projector(idempotent=True, name="moving", **settings)
    @on(Moved, reads=reads)
    def move(event: Moved, session: Session) -> None:
        source, target = session.get_one(Total, event.source), session.get_one(Total, event.target)
        source.amount -= 1
        target.amount += 1

    return move


RIGHT: dict[str, Any] = {
    "paths": {Total: ["source", "target"]},
    "a function": {Total: lambda event: {event.source, event.target}},
    "tuples": {Total: lambda event: [(event.target,), event.source]},
}
WRONG = {
    "partly": {Total: "source"},
    "more than is asked for": {Total: lambda _event: [0, 1, 2, 3, 99]},
    "another entity": {Named: lambda _event: [("a", 1), ("b", 2)]},
    "none": {Total: lambda _event: []},
}


@pytest.mark.parametrize("reads", RIGHT.values(), ids=RIGHT)
def test_several_rows_are_read_by_one_select(engine: Engine, reads: Any) -> None:
    """The handler's own `session.get` sends nothing."""
    dispatcher = Dispatcher(sessionmaker(engine), handler_of(reads))
    with sent_by(engine) as sent:
        dispatcher.deliver(Moved(0, 1), message_id="m")
    assert len([each for each in sent if each.startswith(READ)]) == 1
    assert totals(engine) == [-1, 1, 0, 0]


@pytest.mark.parametrize("reads", WRONG.values(), ids=WRONG)
def test_a_declaration_that_is_not_right_changes_nothing(engine: Engine, reads: Any) -> None:
    """The handler gets its rows, and they are what they are."""
    dispatcher = Dispatcher(sessionmaker(engine), handler_of(reads))
    for number, moved in enumerate([Moved(0, 1), Moved(0, 1), Moved(2, 2)]):
        assert dispatcher.deliver(moved, message_id=f"m{number}").outcome is Outcome.APPLIED
        assert dispatcher.deliver(moved, message_id=f"m{number}").outcome is Outcome.DUPLICATE
    assert totals(engine) == [-2, 2, 0, 0]


def test_a_single_row_is_left_to_the_handler(engine: Engine) -> None:
    """One SELECT either way, and none for a row that the handler does not ask for after all."""
    ignoring = projector(idempotent=True, name="ignoring")(
        on(Added, reads={Total: "row"})(lambda _event, _session: None)
    )
    with sent_by(engine) as sent:
        Dispatcher(sessionmaker(engine), ignoring).deliver(Added(1), message_id="m")
    assert [each for each in sent if each.startswith(READ)] == []


def _raises(_event: object) -> list[int]:
    raise RuntimeError("a bug")


@pytest.mark.parametrize(
    "declared",
    ["nowhere", "row.deeper", lambda event: [event.row, None], lambda event: [None, event.row, 2]],
    ids=["no such attribute", "an attribute of a number", "one row and None", "two rows and None"],
)
def test_none_declares_no_row(engine: Engine, declared: Any) -> None:
    """An event need not have every row that its handler declares."""

    @projector(idempotent=True, name="optional")
    @on(Added, reads={Total: declared})
    def add(event: Added, session: Session) -> None:
        session.get_one(Total, event.row).amount += 1

    assert Dispatcher(sessionmaker(engine), add).deliver(Added(1), message_id="m").outcome is Outcome.APPLIED
    assert totals(engine) == [0, 1, 0, 0]


NO_KEYS: dict[str, Any] = {
    "a number for a list": lambda _event: 7,
    "a text for a list": lambda _event: "1",
    "a key of too many columns": lambda _event: [(1, 2), (2, 3)],
    "keys that cannot be sorted": lambda _event: [1, "2"],
    "a list as a key": lambda _event: [[1]],
    "a function that fails": _raises,
}


@pytest.mark.parametrize("case", NO_KEYS)
def test_a_declaration_that_finds_no_keys_is_refused(engine: Engine, case: str) -> None:
    """Nothing is applied until the declaration is corrected: a consumer keeps the message for later."""
    dispatcher = Dispatcher(sessionmaker(engine), handler_of({Total: NO_KEYS[case]}))
    with pytest.raises(HandlerDefinitionError, match=r"moving: reads=\{Total: \.\.\.\} finds no keys") as refused:
        dispatcher.deliver(Moved(0, 1), message_id="m")
    assert verdict_of(refused.value).action is Action.RETRY_LATER
    assert totals(engine) == [0, 0, 0, 0]
    corrected = Dispatcher(sessionmaker(engine), handler_of(RIGHT["a function"]))
    assert corrected.deliver(Moved(0, 1), message_id="m").outcome is Outcome.APPLIED


def test_a_row_that_a_statement_has_changed_is_read_again(engine: Engine) -> None:
    """SQL text, Core and the driver's cursor write past the session, so nothing that was read before them is kept."""

    def by_text(session: Session) -> None:
        session.execute(text("UPDATE few_total SET amount = amount + 10"))

    def by_core(session: Session) -> None:
        session.connection().execute(update(Total.__table__).values(amount=Total.__table__.c.amount + 10))  # type: ignore[arg-type]  # a table

    def by_driver(session: Session) -> None:
        session.connection().connection.cursor().execute("UPDATE few_total SET amount = amount + 10")

    for number, write in enumerate([by_text, by_core, by_driver]):

        @projector(idempotent=True, name=f"writes {number}")
        @on(Moved, reads={Total: ["source", "target"]})
        def handler(event: Moved, session: Session, write: Any = write) -> None:
            write(session)
            session.get_one(Total, event.target).amount += 1

        Dispatcher(sessionmaker(engine), handler).deliver(Moved(0, 1), message_id="m")
    assert totals(engine) == [30, 33, 30, 30]


def test_declared_rows_are_locked_in_the_order_of_their_keys(server: Engine) -> None:
    """With `read_models`; so messages that meet on several rows seldom wait for each other."""
    dispatcher = Dispatcher(sessionmaker(server), handler_of(RIGHT["paths"], read_models=[Total]))
    with sent_by(server) as sent:
        dispatcher.deliver(Moved(3, 1), message_id="m")
    (reading,) = [each for each in sent if each.startswith(READ)]
    assert "ORDER BY few_total.id FOR " in " ".join(reading.split())
    assert totals(server) == [0, 1, 0, -1]


def test_an_envelope_has_its_keys_in_its_body(engine: Engine) -> None:
    """A handler that gets the `Message` declares where they are in the event."""

    @projector(idempotent=True, name="enveloped")
    @on(Moved, envelope=True, reads=RIGHT["paths"])
    def handler(message: Message, session: Session) -> None:
        session.get_one(Total, message.body.target).amount += session.get_one(Total, message.body.source).amount + 1

    with sent_by(engine) as sent:
        Dispatcher(sessionmaker(engine), handler).deliver(Moved(0, 1), message_id="m")
    assert len([each for each in sent if each.startswith(READ)]) == 1
    assert totals(engine) == [0, 1, 0, 0]


@pytest.mark.parametrize("way", ["shared_session", "batch"])
def test_a_batch_reads_what_all_its_messages_declare_at_once(engine: Engine, way: str) -> None:
    """One SELECT and one UPDATE, for rows that are nowhere in the event too."""
    reads = {Total: lambda event: [3 - event.row]}
    if way == "batch":

        @projector(idempotent=True, name="together")
        @on(Added, reads=reads, batch=True)
        def handler(events: list[Added], session: Session) -> None:
            for event in events:
                session.get_one(Total, 3 - event.row).amount += 1

    else:

        @projector(idempotent=True, name="together", shared_session=True)
        @on(Added, reads=reads)
        def handler(event: Added, session: Session) -> None:
            session.get_one(Total, 3 - event.row).amount += 1

    with sent_by(engine) as sent:
        batch = [Message(f"m{number}", Added(number % ROWS)) for number in range(40)]
        Dispatcher(sessionmaker(engine), handler).deliver_batch(batch)
    assert len([each for each in sent if each.startswith(READ)]) == 1
    assert len([each for each in sent if each.startswith("UPDATE")]) == 1
    assert totals(engine) == [10] * ROWS


def test_a_flush_does_not_end_what_one_call_for_all_has_read(engine: Engine) -> None:
    """A handler that flushes after each of its messages gets the next row without a SELECT."""

    @projector(idempotent=True, name="flushing")
    @on(Added, reads={Total: "row"}, batch=True)
    def handler(events: list[Added], session: Session) -> None:
        for event in events:
            session.get_one(Total, event.row).amount += 1
            session.flush()

    with sent_by(engine) as sent:
        Dispatcher(sessionmaker(engine), handler).deliver_batch([Message(f"m{row}", Added(row)) for row in range(ROWS)])
    assert len([each for each in sent if each.startswith(READ)]) == 1
    assert totals(engine) == [1] * ROWS


def test_many_rows_are_read_in_parts_in_the_order_of_their_keys(sqlite: Database) -> None:
    """No SELECT names more keys than a database takes, and the parts are locked in one order, too."""
    with engine_of(sqlite) as engine:
        named: list[int] = []

        def note(*given: Any) -> None:
            if given[2].startswith(READ):
                named.extend(given[3])

        listen(engine, "before_cursor_execute", note)
        reads = {Total: lambda event: [event.target, *range(1200, 0, -1), event.source]}
        Dispatcher(sessionmaker(engine), handler_of(reads)).deliver(Moved(0, 1), message_id="m")
        assert named == list(range(1201))
        assert totals(engine) == [-1, 1, 0, 0]


def test_an_instance_that_the_handler_brought_along_is_the_one(engine: Engine) -> None:
    """Added without a statement, it is in the session, and `get` returns it."""
    with Session(engine, expire_on_commit=False) as session:
        kept = session.get_one(Total, 1)
        session.expunge(kept)

    @projector(idempotent=True, name="brought")
    @on(Added, reads={Total: "row"})
    def handler(event: Added, session: Session) -> None:
        session.add(kept)
        assert session.get(Total, event.row) is kept
        kept.amount += 1

    Dispatcher(sessionmaker(engine), handler).deliver(Added(1), message_id="m")
    assert totals(engine) == [0, 1, 0, 0]


# One handler, given one database after another ------------------------------------------------------------------------

MESSAGES = [f"m{number}" for number in range(4)]
MOVED = sessionmaker()
EXPECTED = [Outcome.APPLIED] * len(MESSAGES) + [Outcome.DUPLICATE] * len(MESSAGES)


@projector(idempotent=True, name="wandering")
@on(Added, reads={Total: "row"})
def wandering(change: Added, session: Session) -> None:
    """As most handlers are."""
    session.get_one(Total, change.row).amount += 1


@projector(idempotent=True, name="wandering")
@on(Added, reads={Total: "row"})
async def wandering_awaited(change: Added, session: AsyncSession) -> None:
    """The same under asyncio."""
    (await session.get_one(Total, change.row)).amount += 1


def delivered_to_a_function(database: Database, _dispatcher: Dispatcher) -> list[Outcome]:
    """A function projector's own `deliver`."""
    engine = create_engine(database.url())
    factory = sessionmaker(engine)
    found = [wandering.deliver(Added(0), message_id=each, session_factory=factory).outcome for each in MESSAGES * 2]
    engine.dispose()
    return found


def delivered_under_asyncio(database: Database, _dispatcher: Dispatcher) -> list[Outcome]:
    """The same, awaited."""

    async def run() -> list[Outcome]:
        engine = create_async_engine(database.async_url)
        deliver = partial(wandering_awaited.adeliver, session_factory=async_sessionmaker(engine))
        found = [(await deliver(Added(0), message_id=each)).outcome for each in MESSAGES * 2]
        await engine.dispose()
        return found

    return asyncio.run(run())


def delivered_by_one_dispatcher(database: Database, dispatcher: Dispatcher) -> list[Outcome]:
    """`sessionmaker.configure(bind=...)` moves the factory of a living dispatcher to another database."""
    engine = create_engine(database.url())
    MOVED.configure(bind=engine)
    found = [dispatcher.deliver(Added(0), message_id=each).outcome for each in MESSAGES * 2]
    engine.dispose()
    return found


@pytest.mark.parametrize("deliver", [delivered_to_a_function, delivered_under_asyncio, delivered_by_one_dispatcher])
@pytest.mark.parametrize(("first", "second"), list(permutations(ENGINES, 2)))
def test_what_a_handler_met_on_one_database_says_nothing_of_the_next(
    request: pytest.FixtureRequest, first: str, second: str, deliver: Callable[..., list[Outcome]]
) -> None:
    """Each message is applied once in each database, and there is a marker of it."""
    dispatcher = Dispatcher(MOVED, wandering)
    for name in (first, second):
        database: Database = request.getfixturevalue(name)
        with engine_of(database) as outside:
            assert deliver(database, dispatcher) == EXPECTED
            assert totals(outside) == [len(MESSAGES), 0, 0, 0]
            with Session(outside) as session:
                assert len(session.scalars(select(ProcessedMessage)).all()) == len(MESSAGES)
