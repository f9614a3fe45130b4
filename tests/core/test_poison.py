"""What comes from outside in a message is checked where the message is made: one that is poison fails alone."""

import copy
import logging
import uuid
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta, timezone, tzinfo
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from databases import DRIVERS, Driver, each_driver
from kit import Added, Harness
from projector_dedup import Message, Outcome
from projector_dedup.errors import (
    BatchFailed,
    InvalidMessageError,
    InvalidMessageIdError,
    RefusedError,
    UnsafeSessionError,
)
from projector_dedup.outcome import Delivery
from projector_dedup.tables import default_tables
from projector_dedup.unit_of_work import UnitOfWork
from reach import reach
from ready import ready

MARKER = default_tables.marker
APPLIED, FAILED = Outcome.APPLIED, Outcome.FAILED


class Zone(tzinfo):
    """A time zone that answers, or fails, as it was told."""

    def __init__(self, answer: timedelta | Exception | None) -> None:
        self.answer = answer

    def utcoffset(self, _at: datetime | None) -> timedelta | None:
        """What it was told."""
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    dst = utcoffset

    def tzname(self, _at: datetime | None) -> str:
        """Any."""
        return "zone"


class Hostile(datetime):
    """A moment of a class of its own, whose methods fail."""

    def _fail(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("a method of the event was called")

    astimezone = utcoffset = replace = isoformat = strftime = __str__ = __sub__ = __eq__ = __hash__ = _fail


class HostileText(str):
    """Text of a class of its own, whose methods fail."""

    def _fail(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("a method of the event was called")

    __str__ = __repr__ = __format__ = __eq__ = __hash__ = encode = _fail


class _Unhashable(type):
    __hash__ = None  # type: ignore[assignment]  # that is the mistake


class OfAnOddClass(metaclass=_Unhashable):
    """An event by whose class no handler can be found."""


def offset(**delta: float) -> timezone:
    """A zone that is so far from UTC."""
    return timezone(timedelta(**delta))


NO_MOMENTS: dict[str, object] = {
    "text": "2026-01-02T03:04:05Z",
    "number": 1767323045,
    "date": date(2026, 1, 2),
    "naive": datetime(2026, 1, 2),  # noqa: DTZ001  # that is the mistake
    "zone without an offset": datetime(2026, 1, 2, tzinfo=Zone(None)),
    "zone that fails": datetime(2026, 1, 2, tzinfo=Zone(KeyError("no such zone"))),
    "offset of two days": datetime(2026, 1, 2, tzinfo=Zone(timedelta(days=2))),
    "after the year 9999": datetime(9999, 12, 31, 23, 59, 59, tzinfo=offset(hours=-5)),
    "before the year 1": datetime(1, 1, 1, tzinfo=offset(hours=1)),
}
ENDS_OF_TIME = [datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)]
MOMENTS = [
    datetime.min.replace(tzinfo=UTC) + timedelta(microseconds=1),
    datetime(1, 1, 1, 5, tzinfo=offset(hours=4)),
    datetime(1883, 11, 18, 12, 3, 58, 999999, tzinfo=offset(seconds=-17762, microseconds=5)),
    datetime(2026, 10, 25, 2, 30, tzinfo=ZoneInfo("Europe/Berlin")),  # this hour comes twice
    datetime(2026, 10, 25, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"), fold=1),
    datetime(9999, 12, 31, 22, tzinfo=offset(hours=23, minutes=59)),
    datetime.max.replace(tzinfo=UTC) - timedelta(microseconds=1),
]


@pytest.fixture
def driver() -> Driver:
    """SQLite's, where a test does not name its drivers."""
    return DRIVERS[-2]


@pytest.fixture
def harness(request: pytest.FixtureRequest, driver: Driver) -> Iterator[Harness]:
    """The contract's tables, through the driver."""
    with ready(reach(request, driver)) as made:
        yield made


def of(harness: Harness, batch: list[Any]) -> list[Delivery]:
    """What becomes of a batch, message by message."""
    try:
        deliveries: list[Delivery] = harness.run(harness.dispatcher().deliver_batch, batch)
    except BatchFailed as failed:
        return failed.deliveries
    return deliveries


def unchecked(message: Message, **changes: Any) -> Message:
    """A message as unpickling makes it: nobody has looked at it."""
    made = copy.copy(message)
    for name, value in changes.items():
        object.__setattr__(made, name, value)
    return made


@pytest.mark.parametrize("bad", NO_MOMENTS.values(), ids=NO_MOMENTS)
def test_what_is_no_moment_is_refused_where_the_message_is_made(bad: Any) -> None:
    """The error is named, and the old one: a RefusedError and a ValueError."""
    with pytest.raises(InvalidMessageError, match="occurred_at") as refusal:
        Message("m", {}, occurred_at=bad)
    assert isinstance(refusal.value, RefusedError)
    assert isinstance(refusal.value, ValueError)


NO_TYPES = [5, True, 1.5, b"paid", ["paid"], {"paid": 1}, ("paid",), Added(), list[int], OfAnOddClass]


@pytest.mark.parametrize("bad", NO_TYPES, ids=str)
def test_a_type_that_is_no_class_or_name_is_refused(bad: Any) -> None:
    """It would find no handler, or not even be looked up."""
    with pytest.raises(InvalidMessageError, match="hashable" if bad is OfAnOddClass else "type"):
        Message("m", {}, type=bad)


@pytest.mark.parametrize("bad", ["", "\0", "\ud800", "x" * 513, 5, True, b"m", ["m"]], ids=repr)
def test_what_is_no_id_is_refused_where_the_message_is_made(bad: Any) -> None:
    """None is no id either, and allowed: deliver(message_id=...) may give one."""
    with pytest.raises(InvalidMessageIdError):
        Message(bad, {})
    assert Message(None, {}).id is None


def test_a_message_keeps_what_it_was_given() -> None:
    """The checks do not replace anything."""
    message = Message(given := uuid.uuid4(), {}, type=HostileText("paid"), occurred_at=MOMENTS[3])
    assert message.id is given
    assert type(message.type) is HostileText
    assert message.occurred_at is MOMENTS[3]


@each_driver()
def test_every_moment_that_is_accepted_is_stored(harness: Harness) -> None:
    """Alone and in a batch, to the microsecond, from the first to the last year, of a subclass too."""
    ends = [Message(str(at), Added(), occurred_at=at) for at in ENDS_OF_TIME]
    assert [each.outcome for each in of(harness, ends)] == [APPLIED] * 2, (
        "the zero time of other languages is no poison"
    )
    harness.transact(lambda session: session.execute(delete(MARKER)))
    moments = [*MOMENTS, Hostile(2026, 1, 2, 3, 4, 5, 6, UTC)]
    plain = [*MOMENTS, datetime(2026, 1, 2, 3, 4, 5, 6, UTC)]
    expected = sorted(moment.astimezone(UTC) for moment in plain * 2)
    for number, moment in enumerate(moments):
        harness.run(harness.dispatcher().deliver, Message(f"single-{number}", Added(), occurred_at=moment))
    batch = [Message(f"{number}", Added(), occurred_at=moment) for number, moment in enumerate(moments)]
    assert {each.outcome for each in of(harness, batch)} == {APPLIED}
    found = harness.transact(lambda session: list(session.scalars(select(MARKER.c.occurred_at))))
    assert sorted(at.replace(tzinfo=UTC) if at.tzinfo is None else at for at in found) == expected


@each_driver()
@pytest.mark.parametrize(
    "poison",
    [{"occurred_at": NO_MOMENTS["after the year 9999"]}, {"id": 5}, {"type": ["paid"]}, {"body": OfAnOddClass()}],
    ids=lambda poison: next(iter(poison)),
)
def test_poison_that_was_not_checked_fails_alone(poison: Any, harness: Harness) -> None:
    """A message that was unpickled, or made by a subclass, takes no other of its batch with it."""
    batch = [Message(f"m{number}", Added()) for number in range(7)]
    batch[3] = unchecked(batch[3], **poison)
    assert [each.outcome for each in of(harness, batch)] == [*[APPLIED] * 3, FAILED, *[APPLIED] * 3]
    assert harness.totals() == {"a": 6}
    assert harness.markers() == [(f"m{number}", "totals") for number in (0, 1, 2, 4, 5, 6)]


def test_an_id_is_taken_by_its_text(harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
    """In the claim, in the log and in the delivery, whatever the methods of its class do."""
    with caplog.at_level(logging.DEBUG, "projector_dedup"):
        for outcome in (APPLIED, Outcome.DUPLICATE):
            found = of(harness, [Message(HostileText("m1"), Added()), Message("m2", Added())])
            assert [(each.message_id, each.outcome) for each in found] == [("m1", outcome), ("m2", outcome)]
    assert harness.totals() == {"a": 2}


def test_an_event_of_a_class_that_cannot_be_hashed_is_refused(harness: Harness) -> None:
    """By name, and without an envelope too."""
    with pytest.raises(InvalidMessageError, match="hashable"):
        harness.deliver(harness.dispatcher(), OfAnOddClass())


@pytest.mark.parametrize("bad", NO_MOMENTS.values(), ids=NO_MOMENTS)
def test_a_unit_of_work_refuses_what_is_no_moment(bad: Any, harness: Harness) -> None:
    """In claim() and claim_many(), before anything is written."""
    with pytest.raises(InvalidMessageError, match="occurred_at"), UnitOfWork(harness.factory) as uow:
        uow.claim("m", "totals", occurred_at=bad)
    with pytest.raises(InvalidMessageError, match="occurred_at"), UnitOfWork(harness.factory) as uow:
        uow.claim_many([("m1", None), ("m2", bad)], "totals")
    assert harness.markers() == []


@pytest.mark.parametrize("bad", ["m1", "ab", ("m1",)])
def test_ids_without_a_moment_are_no_pairs(bad: Any, harness: Harness) -> None:
    """Two letters are no pair either."""
    with pytest.raises(UnsafeSessionError, match="takes pairs"), UnitOfWork(harness.factory) as uow:
        uow.claim_many([bad], "totals")
    assert harness.markers() == []


def test_an_id_that_nobody_needs_is_left_away(harness: Harness) -> None:
    """An event without handlers that claim may have anything for a message_id; given as such, it is refused."""
    plain = harness.dispatcher(harness.handler(_nothing, idempotent=False))
    event = Added()
    object.__setattr__(event, "message_id", 7)
    assert harness.run(plain.deliver, event).message_id is None
    with pytest.raises(InvalidMessageIdError):
        harness.run(plain.deliver, Added(), message_id=7)


def _nothing(_event: object, _session: Session) -> None:
    pass
