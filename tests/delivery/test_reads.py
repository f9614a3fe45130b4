"""`@on(..., reads={...})`: what may be declared, which rows are read then, and that it is only advice."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, text, update
from sqlalchemy.event import listen
from sqlalchemy.orm import Session, sessionmaker

from databases import Database
from few_rows import ROWS, Added, Named, Total, engine_of, sent_by, totals
from projector_dedup import Dispatcher, HandlerDefinitionError, Message, Outcome, on, projector

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
        ({Total: ("row", "row")}, "does not fit 1 column; write a tuple"),
        ({Named: "shop"}, "does not fit 2 columns; write a tuple"),
        ({Named: ["shop", "number"]}, "2 columns"),
        ({Total: _awaited}, "no async def"),
        ({Total: []}, "has no path"),
        ({}, "must be a mapping"),
        ([Total], "must be a mapping"),
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


NO_KEYS: dict[str, Any] = {
    "no such attribute": {Total: "nowhere"},
    "an attribute of a number": {Total: "row.deeper"},
    "None among keys": {Total: lambda event: [event.row, None]},
    "a number for a list": {Total: lambda _event: 7},
    "a text for a list": {Total: lambda _event: "1"},
    "a key of too many columns": {Total: lambda _event: [(1, 2), (2, 3)]},
    "keys that cannot be sorted": {Total: lambda _event: [1, "2"]},
    "a list as a key": {Total: lambda _event: [[1]]},
    "a text that no database takes": {Named: lambda _event: [("a\0b", 1), ("\udc80", 2)]},
    "a function that fails": {Total: _raises},
}


@pytest.mark.parametrize("case", NO_KEYS)
def test_a_declaration_that_finds_no_keys_warns_once(
    engine: Engine, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    """Each message is applied; one warning for each handler says what was wrong."""
    name = f"{case} on {engine.name}"

    @projector(idempotent=True, name=name)
    @on(Added, reads=NO_KEYS[case])
    def add(event: Added, session: Session) -> None:
        session.get_one(Total, event.row).amount += 1

    dispatcher = Dispatcher(sessionmaker(engine), add)
    with caplog.at_level(logging.WARNING, "projector_dedup"):
        for number in range(3):
            dispatcher.deliver(Added(1), message_id=f"m{number}")
    assert totals(engine) == [0, 3, 0, 0]
    assert [each.getMessage().startswith(f"handler {name}: reads={{") for each in caplog.records] == [True]


def test_rows_that_cannot_be_read_keep_no_message(postgresql: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A role without the right to read them: the message is applied without, and a warning says so."""
    with engine_of(postgresql) as engine:
        with engine.begin() as connection:
            connection.execute(text("DROP ROLE IF EXISTS reads_outsider"))
            connection.execute(text("CREATE ROLE reads_outsider"))
            connection.execute(text("GRANT USAGE ON SCHEMA public TO reads_outsider"))
            connection.execute(text("GRANT ALL ON ALL TABLES IN SCHEMA public TO reads_outsider"))
            connection.execute(text("REVOKE ALL ON few_named FROM reads_outsider"))
        outsider = create_engine(engine.url, connect_args={"options": "-c role=reads_outsider"})
        reads = {Named: lambda _event: [("a", 1), ("b", 2)]}
        with caplog.at_level(logging.WARNING, "projector_dedup"):
            dispatcher = Dispatcher(sessionmaker(outsider), handler_of(reads))
            assert dispatcher.deliver(Moved(0, 1), message_id="m").outcome is Outcome.APPLIED
        outsider.dispose()
        assert "ProgrammingError" in caplog.text
        assert totals(engine) == [-1, 1, 0, 0]
        with engine.begin() as connection:
            connection.execute(text("DROP OWNED BY reads_outsider; DROP ROLE reads_outsider"))


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
