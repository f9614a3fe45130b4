"""The source of an id: two producers may give the same id, and both messages are applied."""

import json
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, select
from sqlalchemy.orm import Session, sessionmaker

import payments
from databases import Database
from payments import NOTES, Balance, Payments, payment
from projector_dedup import Dispatcher, Message
from projector_dedup.brokers.incoming import Incoming, cloudevent, json_event, json_of
from projector_dedup.brokers.settling import Settled, Settling
from projector_dedup.brokers.typed_events import into
from projector_dedup.message import by_path, cloudevents, from_uuid7, stored_id
from projector_dedup.tables import ProcessedMessage

BATCH = pytest.mark.parametrize("batch", [False, True], ids=["single", "batch"])
BODY = payment(1)


@pytest.fixture
def engine(sqlite: Database) -> Iterator[Engine]:
    """A database with the tables."""
    engine = create_engine(sqlite.url())
    payments.dispatcher(engine)
    NOTES.all.clear()
    yield engine
    engine.dispose()


@pytest.fixture
def settle(engine: Engine) -> Callable[..., list[Settled]]:
    """Deliver messages as a consumer with these options does, one by one or in one batch."""

    def settle(*incoming: Incoming, batch: bool = False, dispatched: Any = None, **options: Any) -> list[Settled]:
        given = {"type": by_path("type"), "observer": NOTES, **(dispatched or {})}
        settling = Settling(Dispatcher(sessionmaker(engine), Payments(), **given), **options)
        return settling.deliver_batch(incoming) if batch else [settling.deliver(each) for each in incoming]

    return settle


@BATCH
@pytest.mark.parametrize("convert", [json_event, json_of, into({})], ids=["json_event", "json_of", "into"])
def test_two_sources_may_have_the_same_ids(
    engine: Engine, settle: Callable[..., list[Settled]], convert: Any, batch: bool
) -> None:
    """Beside the body or in it. The log of the library, metrics and ``show`` know the message by the stored id."""
    where: Any = {"message_id": "p1", "type": "payment"} if convert is not json_of else {}
    options = {"batch": batch, "convert": convert}
    for source in ("one", "two", None):
        sent = Incoming(BODY, **where)
        assert [each.acknowledge for each in settle(sent, sent, source=source, **options)] == [True, True]
    assert payments.applied(engine) == ({"a": 3}, 3)
    assert payments.markers(engine) == {"p1", stored_id("p1", "one"), stored_id("p1", "two")}
    applied = [each.message_id for each in NOTES.all if each.kind == "message" and each.outcome == "applied"]
    assert applied == ["3:one2:p1", "3:two2:p1", "p1"]


def test_an_id_without_a_source_that_looks_like_one_of_a_source_is_not_told_apart(
    engine: Engine, settle: Callable[..., list[Settled]]
) -> None:
    """What cannot be had, as the page says: ids without a source stay as they are. With a source it is another id."""
    forged = Incoming(BODY, "3:one2:p1", "payment")
    settle(forged, source="two")
    settle(Incoming(BODY, "p1", "payment"), source="one")
    assert payments.applied(engine) == ({"a": 2}, 2)
    settle(forged)
    assert payments.applied(engine) == ({"a": 2}, 2)


CLOUD = {"specversion": "1.0", "id": "7", "source": "/s", "type": "payment", "data": json.loads(BODY)}


@pytest.mark.parametrize("convert", [cloudevent, into({}, cloudevent)], ids=["cloudevent", "into"])
def test_a_cloudevent_keeps_its_own_source(engine: Engine, settle: Callable[..., list[Settled]], convert: Any) -> None:
    """Its id does not change, whatever the consumer declares."""
    incoming = Incoming(json.dumps(CLOUD).encode(), "other", content_type="application/cloudevents+json")
    for source in (None, "one", "two"):
        assert settle(incoming, convert=convert, source=source) == [Settled()]
    assert payments.markers(engine) == {cloudevents(CLOUD)} == {stored_id("7", "/s")}


def test_a_converter_may_choose_the_source(engine: Engine, settle: Callable[..., list[Settled]]) -> None:
    """By what is in the message; the consumer's is for the others."""

    def convert(incoming: Incoming) -> Message:
        tenant: Any = incoming.headers.get("tenant")
        return Message(incoming.message_id, json.loads(incoming.body), source=tenant)  # type: ignore[arg-type]

    settle(
        *(Incoming(BODY, "7", headers=headers) for headers in ({"tenant": "t1"}, {"tenant": "t2"}, {})),
        convert=convert,
        source="all",
    )
    assert payments.markers(engine) == {"2:t11:7", "2:t21:7", "3:all1:7"}


def test_the_time_in_an_id_is_found_behind_its_source(engine: Engine, settle: Callable[..., list[Settled]]) -> None:
    """An extractor gets the producer's id."""
    uuid7 = "0198f3c2-5d1e-7a55-b1f0-000000000001"
    settle(Incoming(BODY, uuid7, "payment"), source="one", dispatched={"occurred_at": from_uuid7, "late": "apply"})
    with Session(engine) as session:
        (marker,) = session.scalars(select(ProcessedMessage)).all()
    assert marker.message_id == f"3:one36:{uuid7}"
    assert isinstance(marker.occurred_at, datetime)


@BATCH
@pytest.mark.parametrize("beside", [True, False], ids=["beside the body", "in the body"])
def test_an_id_that_is_too_long_with_its_source_is_a_dead_letter(
    engine: Engine, settle: Callable[..., list[Settled]], batch: bool, beside: bool
) -> None:
    """To the byte: 512 with the lengths. The message beside it is applied."""
    source, places = "é" * 50, len("50:") + len("407:")
    longest = "x" * (512 - 100 - places)
    incoming = [
        Incoming(BODY, each, "payment")
        if beside
        else Incoming(json.dumps({**json.loads(BODY), "message_id": each}).encode())
        for each in (longest, f"{longest}x")
    ]
    fits, exceeds = settle(*incoming, batch=batch, source=source)
    assert fits == Settled()
    assert (exceeds.reject, exceeds.label) == (True, "invalid_id")
    assert "a message id with its source must have at most 512 bytes of UTF-8, and this one has 513" in exceeds.reason
    assert payments.applied(engine) == ({"a": 1}, 1)


def test_what_is_no_source_is_refused_when_the_consumer_is_made(engine: Engine) -> None:
    """And not at the first message. A dictionary of topics is only for Kafka."""
    wrong: Any
    for wrong in ("", "a\0", "\ud800", "x" * 513):
        with pytest.raises(ValueError, match="the source of a message id"):
            Settling(payments.dispatcher(engine), source=wrong)
    for wrong in (b"payments", 7, {"payments": "payments"}, ..., lambda _: "payments"):
        with pytest.raises(TypeError, match=r'^source is text, as in source="payments", or None'):
            Settling(payments.dispatcher(engine), source=wrong)


def test_a_message_of_a_handler_without_markers_needs_no_id_with_its_source(engine: Engine) -> None:
    """As it needs none without a source."""
    from projector_dedup import on, projector

    @projector
    class Adding:
        @on("payment")
        def paid(self, _event: Any, session: Session) -> None:
            session.add(Balance(account="a", amount=1))

    dispatcher = Dispatcher(sessionmaker(engine), Adding(), type=by_path("type"))
    body = json.dumps({"type": "payment", "message_id": "x" * 500}).encode()
    assert Settling(dispatcher, source="y" * 20).deliver(Incoming(body)) == Settled()
    assert payments.applied(engine) == ({"a": 1}, 0)
