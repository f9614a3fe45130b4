"""Events that are dictionaries: the dispatcher finds their type (``type=``) and id (``message_id=``) in the body."""

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, MetaData, create_engine
from sqlalchemy.orm import Session, sessionmaker

from databases import Database
from projector_dedup import (
    BatchFailed,
    Dispatcher,
    InvalidMessageError,
    InvalidMessageIdError,
    Message,
    UnhandledMessage,
    by_path,
    make_tables,
    on,
    projector,
)

SEEN: list[tuple[str, Any]] = []


@projector(idempotent=True, name="seen")
class Seen:
    """Writes down what comes."""

    @on("flight.scheduled")
    def scheduled(self, event: Any, _session: Session) -> None:
        """Note an event by its name."""
        SEEN.append(("flight.scheduled", event))

    @on(dict)
    def other(self, event: Any, _session: Session) -> None:
        """Note any other dictionary."""
        SEEN.append(("dict", event))


@pytest.fixture
def factory(sqlite: Database) -> Iterator[sessionmaker[Session]]:
    """A session factory on an empty database."""
    SEEN.clear()
    engine: Engine = create_engine(sqlite.url())
    metadata = MetaData()
    make_tables(metadata)
    metadata.create_all(engine)
    yield sessionmaker(engine)
    engine.dispose()


SCHEDULED = {"message_id": "m1", "meta": {"type": "flight.scheduled"}}


@pytest.mark.parametrize(
    ("event", "handler"),
    [
        (SCHEDULED, "flight.scheduled"),
        (Message("m1", SCHEDULED), "flight.scheduled"),
        (Message(None, SCHEDULED), "flight.scheduled"),
        (Message("m1", SCHEDULED, type=dict), "dict"),
        (Message("m1", {}, type="flight.scheduled"), "flight.scheduled"),
        ({"message_id": "m1"}, "dict"),
        (Message("m1", {"meta": None}), "dict"),
    ],
    ids=["in the body", "in an envelope", "id in the body", "told", "told, not in the body", "nowhere", "None"],
)
def test_the_type_is_that_of_the_message_else_that_in_the_body_else_the_class(
    factory: sessionmaker[Session], event: Any, handler: str
) -> None:
    """A type that a message was given wins over the extractor's, and that one over the class of the body."""
    dispatcher = Dispatcher(factory, Seen(), type=by_path("meta.type"))
    deliveries = [dispatcher.deliver(event), *dispatcher.deliver_batch([event])]
    assert [name for name, _ in SEEN] == [handler]
    assert [each.message_id for each in deliveries] == ["m1", "m1"]


@pytest.mark.parametrize("kind", [5, ["flight.scheduled"], {"a": 1}, b"flight.scheduled"])
def test_what_is_no_type_is_refused(factory: sessionmaker[Session], kind: object) -> None:
    """A number is not taken for its text, and nothing is applied."""
    dispatcher = Dispatcher(factory, Seen(), type=by_path("type"))
    with pytest.raises(InvalidMessageError, match="the type of a message is a class or a name"):
        dispatcher.deliver({"message_id": "m1", "type": kind})
    with pytest.raises(BatchFailed):
        dispatcher.deliver_batch([{"message_id": "m1", "type": kind}])
    assert SEEN == []


def test_a_type_that_nobody_wants_is_told_in_short(factory: sessionmaker[Session]) -> None:
    """A producer's megabyte does not become a log's."""
    dispatcher = Dispatcher(factory, Seen(), type=by_path("type"))
    with pytest.raises(UnhandledMessage, match=r"no handler for x{200}; there is one for "):
        dispatcher.deliver({"message_id": "m1", "type": "x" * 1_000_000})


@pytest.mark.parametrize(
    ("event", "name"),
    [
        ({"message_id": "m1"}, "builtins.dict"),
        (Message("m1", {}), "builtins.dict"),
        ([{"message_id": "m1"}], "builtins.list"),
        (Message("m1", {}, type="ship"), "ship"),
    ],
    ids=["a dict", "in an envelope", "a list", "a name"],
)
def test_what_nobody_handles_is_told_what_to_write(factory: sessionmaker[Session], event: object, name: str) -> None:
    """A dict needs a type beside it or from its body; a list is a batch."""

    @projector(idempotent=True, name="flights")
    @on("flight")
    def flights(event: Any, _session: Session) -> None:
        SEEN.append(("flight", event))

    with pytest.raises(UnhandledMessage, match=rf"no handler for {name}; there is one for flight\. Register") as raised:
        Dispatcher(factory, flights).deliver(event)
    assert "Message(id, body, type=...), or Dispatcher(type=by_path('type'))" in str(raised.value)
    assert "call deliver_batch" in str(raised.value)
    with pytest.raises(UnhandledMessage, match="flights does not handle "):
        flights.deliver(event, session_factory=factory)
    assert SEEN == []


def test_a_message_without_an_id_is_refused_as_ever(factory: sessionmaker[Session]) -> None:
    """Neither the envelope nor the body has one."""
    with pytest.raises(InvalidMessageIdError, match="has no id"):
        Dispatcher(factory, Seen()).deliver(Message(None, {}))


def test_an_id_in_bytes_is_refused_with_the_right_advice() -> None:
    """The text of ``str(b"7")`` would be another id."""
    with pytest.raises(InvalidMessageIdError, match=r"give value\.decode\(\), and not str\(value\)"):
        Message(b"7", {})


def test_an_extractor_of_types_is_a_function(factory: sessionmaker[Session]) -> None:
    """A path is no function."""
    with pytest.raises(ValueError, match="message_id and type take an extractor"):
        Dispatcher(factory, Seen(), type="meta.type")  # type: ignore[arg-type]
