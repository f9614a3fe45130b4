"""A delivery is answered by a verdict: acknowledged after the commit, delayed, or rejected; the consumer lives on."""

import asyncio
import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg.errors import ForeignKeyViolation
from sqlalchemy import ForeignKey, create_engine, select, text
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker
from sqlalchemy.util import await_only

import payments
from databases import Database
from incoming_garbage import ATTRIBUTES, BODIES, HEADERS
from payments import NOTES, RULES, AsyncPayments, Payments
from projector_dedup import AsyncDispatcher, Defer, Dispatcher, make_tables, on, projector
from projector_dedup.brokers.incoming import Incoming, cloudevent, json_event, json_of
from projector_dedup.brokers.settling import Settled, Settling
from projector_dedup.commands import DuplicateCommandError
from projector_dedup.errors import (
    BeyondRetention,
    CommitOutcomeUnknown,
    HandlerDefinitionError,
    InProgress,
    InvalidMessageError,
    InvalidMessageIdError,
    MissingTableError,
    OtherBodyError,
    UnhandledMessage,
)
from projector_dedup.message import IdExtractor, attribute_or_key, by_path


class UnprintableError(Exception):
    """An error whose own text fails."""

    def __str__(self) -> str:
        raise ValueError("no text")


def raises(error: Exception) -> Callable[[], object]:
    """A rule that raises."""

    def rule() -> None:
        raise error

    return rule


@pytest.fixture(autouse=True)
def _rules() -> Iterator[None]:
    """Accounts whose payments fail."""
    RULES.update(
        defer=raises(Defer("not before noon")),
        poison=raises(KeyError("carrier")),
        unprintable=raises(UnprintableError()),
    )
    yield
    RULES.clear()


class Rig:
    """A settling of either kind, and what it left in the database."""

    def __init__(self, database: Database, *, asynchronous: bool) -> None:
        self.engine = create_engine(database.url())
        payments.dispatcher(self.engine)  # makes the tables
        self.asynchronous = asynchronous
        self.url = database.async_url

    def settle(
        self,
        *incoming: Incoming,
        batch: bool = False,
        extractor: IdExtractor = attribute_or_key,
        other_body: Any = "log",
        **options: Any,
    ) -> list[Settled]:
        """Deliver, one by one or in one batch."""
        given: dict[str, Any] = {"type": by_path("type"), "message_id": extractor, "other_body": other_body}
        if self.asynchronous:
            return asyncio.run(self._asettle(incoming, batch, given, **options))
        settling = Settling(Dispatcher(sessionmaker(self.engine), Payments(), **given), **options)
        return settling.deliver_batch(incoming) if batch else [settling.deliver(each) for each in incoming]

    async def _asettle(
        self, incoming: tuple[Incoming, ...], batch: bool, given: dict[str, Any], **options: Any
    ) -> list[Settled]:
        engine = create_async_engine(self.url)
        dispatcher = AsyncDispatcher(async_sessionmaker(engine), AsyncPayments(), **given)
        settling = Settling(dispatcher, asynchronous=True, **options)
        try:
            if batch:
                return await settling.adeliver_batch(incoming)
            return [await settling.adeliver(each) for each in incoming]
        finally:
            await engine.dispose()

    @property
    def applied(self) -> tuple[dict[str, int], int]:
        """The balances, and the number of markers, from another connection."""
        return payments.applied(self.engine)


@pytest.fixture(params=[False], ids=["sync"])
def rig(sqlite: Database, request: pytest.FixtureRequest) -> Iterator[Rig]:
    """A settling for a dispatcher."""
    rig = Rig(sqlite, asynchronous=request.param)
    yield rig
    rig.engine.dispose()


EITHER = pytest.mark.parametrize("rig", [False, True], ids=["sync", "async"], indirect=True)
"""A settling for a dispatcher of each kind: both are one code."""


def paid(number: int = 1, account: str = "UA", **more: Any) -> Incoming:
    """A payment of 100, as JSON, with its id beside it."""
    body = {"type": "payment", "account": account, "amount": 100}
    return Incoming(json.dumps(body).encode(), **{"message_id": f"m{number}", "origin": "queue payments", **more})


LABELS: dict[type[Exception], str] = {
    InvalidMessageError: "invalid_message",
    InvalidMessageIdError: "invalid_id",
    UnhandledMessage: "unhandled",
    BeyondRetention: "late",
    Defer: "deferred",
    InProgress: "in_progress",
    MissingTableError: "refused",
    CommitOutcomeUnknown: "database",
    PoolTimeoutError: "database",
    OtherBodyError: "other_body",
    KeyError: "handler",
}


@pytest.mark.parametrize(("error", "label"), LABELS.items(), ids=LABELS.values())
def test_an_error_has_the_reason_under_which_it_is_counted(rig: Rig, error: type[Exception], label: str) -> None:
    """Raised by a handler; the same error of a converter that knows better has the same reason."""
    RULES["wrong"] = raises(error("no"))
    (settled,) = rig.settle(paid(account="wrong"))
    assert settled.label == label
    (settled,) = rig.settle(paid(), convert=lambda _: raises(error("no"))())
    assert settled.label == ("invalid_message" if label == "handler" else label)
    (settled,) = rig.settle(paid(7))
    assert settled.label is None


BATCH = pytest.mark.parametrize("batch", [False, True], ids=["single", "batch"])


@BATCH
@EITHER
def test_a_message_is_acknowledged_when_it_is_applied_or_was_applied(rig: Rig, batch: bool) -> None:
    """The type is found in the body; a redelivery is acknowledged and counts nothing."""
    for _ in range(2):
        settled = rig.settle(paid(1), paid(2), batch=batch)
        assert settled == [Settled(), Settled()]
        assert all(each.acknowledge and not each.reject for each in settled)
    assert rig.applied == ({"UA": 200}, 2)


@BATCH
@EITHER
def test_the_digest_is_that_of_the_body_unless_the_converter_gives_one(rig: Rig, batch: bool) -> None:
    """A body that is empty has none. The headers, and the number of the delivery, do not count."""
    digest = hashlib.sha256(b"of the fields that count").digest()

    def convert(incoming: Incoming) -> object:
        found = json_event(replace(incoming, body=paid().body))
        return replace(found, digest=digest) if incoming.headers.get("given") else found

    other = replace(paid(1), body=paid(1).body + b" ")
    empty, given = replace(paid(2), body=b""), paid(3, headers={"given": "1"})
    first = [paid(1), empty, given]
    again = [paid(1, attempt=3, headers={"x": "y"}), other, paid(2), replace(given, body=other.body)]
    assert rig.settle(*first, convert=convert, batch=batch) == [Settled()] * 3
    with rig.engine.connect() as connection:
        stored = connection.execute(text("SELECT message_id, digest FROM processed_message ORDER BY message_id")).all()
    assert [*map(tuple, stored)] == [
        *(("m1", hashlib.sha256(paid(1).body).digest()[:16]), ("m2", None), ("m3", digest[:16]))
    ]
    settled = rig.settle(*again, convert=convert, batch=batch, other_body="reject")
    assert [each.label for each in settled] == [None, "other_body", None, None]
    assert rig.applied == ({"UA": 300}, 3)


@BATCH
@EITHER
def test_each_message_has_a_verdict_of_its_own(rig: Rig, batch: bool) -> None:
    """One that is too early, one that is poison and one that is garbage take no other with them."""
    early, good, poison, garbage, last = rig.settle(
        paid(1, account="defer"),
        paid(2),
        paid(3, account="poison"),
        Incoming(b"{", "m4"),
        paid(5),
        batch=batch,
    )
    assert good.acknowledge
    assert last.acknowledge
    assert (early.acknowledge, early.reject, early.delay) == (False, False, 1.0)
    assert (poison.acknowledge, poison.reject, poison.reason) == (False, True, "KeyError: 'carrier'")
    assert (garbage.acknowledge, garbage.reject) == (False, True)
    assert garbage.reason.startswith("InvalidMessageError: the body of the message is not JSON")
    assert rig.applied == ({"UA": 200}, 2)


def test_a_command_that_was_done_before_acknowledges_no_event(rig: Rig) -> None:
    """``convert`` asks for a command and lets its error out: the event was not delivered, so it is a dead letter."""

    def convert(_incoming: Incoming) -> object:
        raise DuplicateCommandError("done", None)  # type: ignore[arg-type]

    (settled,) = rig.settle(paid(1), convert=convert)
    assert (settled.acknowledge, settled.reject) == (False, True)


def test_the_delay_grows_with_the_brokers_count(rig: Rig) -> None:
    """``Incoming.attempt`` is what the broker counted, and ``max_attempts`` its end."""
    deliveries = [paid(1, account="defer", attempt=attempt) for attempt in (1, 2, 3, 4, 9)]
    assert [rig.settle(each)[0].delay for each in deliveries] == [1.0, 5.0, 30.0, 300.0, 300.0]
    rejected = [rig.settle(each, max_attempts=4)[0].reject for each in deliveries]
    assert rejected == [False, False, False, True, True]


class _Base(DeclarativeBase):
    """A read model with a foreign key."""


class _Account(_Base):
    __tablename__ = "account"
    name: Mapped[str] = mapped_column(primary_key=True)


class _Entry(_Base):
    __tablename__ = "entry"
    number: Mapped[str] = mapped_column(primary_key=True)
    account: Mapped[str] = mapped_column(ForeignKey("account.name"))


make_tables(_Base.metadata)


@projector(idempotent=True, name="ledger")
class _Ledger:
    @on("opened")
    def opened(self, event: Any, session: Session) -> None:
        session.add(_Account(name=event["account"]))

    @on("booked")
    def booked(self, event: Any, session: Session) -> None:
        session.add(_Entry(number=event["number"], account=event["account"]))


@BATCH
@pytest.mark.parametrize("named", [IntegrityError, ForeignKeyViolation, DBAPIError], ids=lambda each: each.__name__)
def test_a_child_that_comes_before_its_parent_is_retried_by_name(
    postgresql: Database, named: type[Exception], batch: bool
) -> None:
    """By SQLAlchemy's class, the driver's, or a base; at the limit, and where nobody named it, it is a dead letter."""
    engine = create_engine(postgresql.url())
    _Base.metadata.create_all(engine)
    NOTES.all.clear()
    dispatcher = Dispatcher(sessionmaker(engine), _Ledger(), observer=NOTES)

    def settled(*incoming: Incoming, **options: Any) -> list[Settled]:
        settling = Settling(dispatcher, **options)
        return settling.deliver_batch(incoming) if batch else [settling.deliver(each) for each in incoming]

    def child(number: int, attempt: int = 1) -> Incoming:
        body = json.dumps({"account": "UA", "number": str(number)}).encode()
        return Incoming(body, f"c{number}", "booked", attempt=attempt)

    limited = {"retry_later": (named,), "max_attempts": 3}
    first, second = settled(child(1), child(2, attempt=2), **limited)
    assert [(each.acknowledge, each.reject, each.delay) for each in (first, second)] == [
        (False, False, 1.0),
        (False, False, 5.0),
    ]
    assert first.label == "database"
    (last,) = settled(child(2, attempt=3), **limited)
    assert (last.reject, last.label) == (True, "max_attempts")
    (unnamed,) = settled(child(3), retry_later=(LookupError,), max_attempts=3)
    assert (unnamed.reject, unnamed.label) == (True, "database")
    assert [(each.outcome, each.reason) for each in NOTES.all if each.kind == "delivery"] == [
        ("retried", "database"),
        ("retried", "database"),
        ("rejected", "max_attempts"),
        ("rejected", "database"),
    ]
    parent = Incoming(b'{"account": "UA"}', "p1", "opened")
    assert [each.acknowledge for each in settled(parent, child(1, attempt=2), **limited)] == [True, True]
    with Session(engine) as session:
        assert [*session.scalars(select(_Entry.number))] == ["1"]
    engine.dispose()


def test_what_retry_later_cannot_be_is_refused(sqlite: Database) -> None:
    """A message whose error stays would be retried for ever; a name, an object or a stop of the worker is no class."""
    rig = Rig(sqlite, asynchronous=False)
    dispatcher = Dispatcher(sessionmaker(rig.engine), Payments())
    with pytest.raises(ValueError, match="retry_later needs max_attempts"):
        Settling(dispatcher, retry_later=(KeyError,))
    wrong: Any
    for wrong in (KeyError, "KeyError", ("KeyError",), (KeyError("carrier"),), (KeyboardInterrupt,), (int,), None):
        with pytest.raises(TypeError, match="retry_later is a tuple of classes of errors"):
            Settling(dispatcher, retry_later=wrong, max_attempts=3)
    Settling(dispatcher, retry_later=[KeyError], max_attempts=1)


def test_no_delay_is_longer_than_its_bound(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """The log names the delay that the message gets."""
    caplog.set_level(logging.INFO, "projector_dedup.consumers")
    deliveries = [paid(1, account="defer", attempt=attempt) for attempt in (1, 2, 9)]
    assert [rig.settle(each, max_delay=2.5)[0].delay for each in deliveries] == [1.0, 2.5, 2.5]
    assert [line.split(" in ")[1].split(", after")[0] for line in caplog.messages] == ["1.0 s", "2.5 s", "2.5 s"]


@pytest.mark.parametrize(("bound", "longest"), [(0.5, 1.0), (1, 1.0), (29.9, 5.0), (30, 30.0), (9e9, 300.0)])
def test_a_broker_that_knows_certain_delays_gets_the_longest_within_the_bound(
    rig: Rig, bound: float, longest: float, caplog: pytest.LogCaptureFixture
) -> None:
    """Or the shortest; the log names it too."""
    caplog.set_level(logging.INFO, "projector_dedup.consumers")
    late = paid(1, account="defer", attempt=9)
    assert rig.settle(late, max_delay=bound, delays=(1.0, 5.0, 30.0, 300.0))[0].delay == longest
    assert f"will be delivered again in {longest} s" in caplog.text


@BATCH
@EITHER
def test_a_lost_database_is_no_reason_to_reject(rig: Rig, batch: bool) -> None:
    """The message is innocent, and comes again after a delay."""
    with rig.engine.begin() as connection:
        connection.execute(text("ALTER TABLE processed_message RENAME TO elsewhere"))
    (settled,) = rig.settle(paid(), batch=batch)
    assert (settled.acknowledge, settled.reject, settled.delay) == (False, False, 1.0)
    with rig.engine.begin() as connection:
        connection.execute(text("ALTER TABLE elsewhere RENAME TO processed_message"))
    assert rig.settle(paid(), batch=batch) == [Settled()]
    assert rig.applied[0] == {"UA": 100}


def test_a_converter_that_fails_is_answered_too(rig: Rig) -> None:
    """A registry of schemas that is down delays the message; a KeyError of the converter's rejects it."""

    def down(_incoming: Incoming) -> object:
        raise ConnectionError("the registry is down")

    def wrong(_incoming: Incoming) -> object:
        raise KeyError("miles")

    assert not rig.settle(paid(), convert=down)[0].reject
    assert rig.settle(paid(), convert=wrong)[0].reject
    assert rig.applied == ({}, 0)


@BATCH
def test_something_that_was_cancelled_in_a_handler_delays_its_message(sqlite: Database, batch: bool) -> None:
    """The consumer was not told to end: it answers. A task that is told to end does."""
    rig = Rig(sqlite, asynchronous=True)

    class Cancelling:
        async def deliver(self, _event: object) -> None:
            raise asyncio.CancelledError

        deliver_batch = deliver

    async def settle(*, told_to_end: bool) -> Settled:
        engine = create_async_engine(rig.url)
        settling = Settling(AsyncDispatcher(async_sessionmaker(engine), AsyncPayments()), asynchronous=True)
        settling._dispatcher = Cancelling()
        if told_to_end:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
        try:
            return (await settling.adeliver_batch([paid()]))[0] if batch else await settling.adeliver(paid())
        finally:
            await engine.dispose()

    settled = asyncio.run(settle(told_to_end=False))
    assert (settled.acknowledge, settled.reject, settled.delay) == (False, False, 0.0)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(settle(told_to_end=True))
    rig.engine.dispose()


def test_a_handler_that_is_cancelled_by_itself_keeps_no_other_from_being_applied(sqlite: Database) -> None:
    """It has awaited a task that somebody cancelled, in each delivery: it alone comes again."""
    rig = Rig(sqlite, asynchronous=True)

    async def wait_for_a_task_that_is_cancelled() -> None:
        other = asyncio.create_task(asyncio.sleep(9))
        other.cancel()
        await other

    RULES["cancelled"] = lambda: await_only(wait_for_a_task_that_is_cancelled())
    for attempt in (1, 2):
        batch = [paid(number, attempt=attempt, account="cancelled" if number == 2 else "UA") for number in (1, 2, 3)]
        settled = rig.settle(*batch, batch=True)
        assert [each.acknowledge for each in settled] == [True, False, True]
        assert not settled[1].reject
        assert rig.applied == ({"UA": 200}, 2)
    rig.engine.dispose()


@EITHER
def test_a_batch_that_fails_without_a_word_of_whose_fault_is_delivered_one_by_one(rig: Rig) -> None:
    """Such as an error in the dispatcher itself; what cannot be converted is rejected once."""

    def fail(*_: Any) -> Any:
        raise RuntimeError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AsyncDispatcher if rig.asynchronous else Dispatcher, "deliver_batch", fail)
        settled = rig.settle(paid(1), Incoming(b"{", "m2"), paid(3, account="poison"), paid(4), batch=True)
    assert [each.acknowledge for each in settled] == [True, False, False, True]
    assert settled[2].reason == "KeyError: 'carrier'"
    assert rig.applied == ({"UA": 200}, 2)


def test_what_a_note_of_an_error_says_to_do_is_in_the_reason(rig: Rig) -> None:
    """Dead letters and logs are all that an operator has: markers to forget, of a batch whose handler committed."""
    error = KeyError("carrier")
    error.add_note("Delete these markers")
    RULES["noted"] = raises(error)
    (settled,) = rig.settle(paid(1, account="noted"))
    assert settled.reason == "KeyError: 'carrier'; Delete these markers"


def test_the_reason_of_several_handlers_has_the_text_of_each_failure(sqlite: Database) -> None:
    """One applied the first body, the other applies the second: who republishes it blindly applies it twice there."""
    early = [True]

    @projector(idempotent=True, name="first")
    @on("payment")
    def first(_event: Any, _session: Session) -> None:
        """Apply each."""

    @projector(idempotent=True, name="second")
    @on("payment")
    def second(_event: Any, _session: Session) -> None:
        if early[0]:
            raise Defer("not before noon")

    engine = create_engine(sqlite.url())
    payments.dispatcher(engine)
    dispatcher = Dispatcher(sessionmaker(engine), first, second, type=by_path("type"), other_body="reject")
    settling = Settling(dispatcher)
    waits = settling.deliver(paid(1, account="a"))
    early[0] = False
    rejected = settling.deliver(paid(1, account="b"))
    assert (waits.acknowledge, waits.reject, rejected.reject) == (False, False, True)
    assert rejected.reason.startswith("DeliveryFailed: the message was not applied by first (OtherBodyError)")
    digests = [hashlib.sha256(paid(1, account=each).body).hexdigest()[:12] for each in "ba"]
    assert f"begins with {digests[0]}, and that of the applied body with {digests[1]}" in rejected.reason
    assert "unless another handler has applied it: `idempotency show` prints" in rejected.reason
    engine.dispose()


def test_a_batch_whose_consumer_is_told_to_end_is_not_delivered_again(sqlite: Database) -> None:
    """Neither at once nor one by one: it ends while the first handler of the batch runs, which runs once."""
    rig = Rig(sqlite, asynchronous=True)
    begun: list[str] = []

    @projector(idempotent=True, name="payments")
    class Waiting:
        @on("payment")
        async def add(self, event: Any, _session: AsyncSession) -> None:
            begun.append(event["account"])
            await asyncio.Event().wait()

    async def main() -> None:
        engine = create_async_engine(rig.url)
        dispatcher = AsyncDispatcher(async_sessionmaker(engine), Waiting(), type=by_path("type"))
        settling = Settling(dispatcher, asynchronous=True)
        task = asyncio.create_task(settling.adeliver_batch([paid(1), paid(2)]))
        while not begun:  # noqa: ASYNC110  # a handler tells nobody
            await asyncio.sleep(0.01)
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=10)
        assert done, "the consumer goes on"
        assert task.cancelled()
        await engine.dispose()

    asyncio.run(main())
    assert begun == ["UA"]
    assert rig.applied == ({}, 0)
    rig.engine.dispose()


def test_an_error_whose_text_fails_does_not_stop_the_consumer(rig: Rig) -> None:
    """The class of the error is told."""
    (settled,) = rig.settle(paid(account="unprintable"))
    assert (settled.reject, settled.reason) == (True, "UnprintableError: (its text cannot be read)")


def test_every_answer_but_yes_is_logged(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """With the id, the place and the number of the delivery; a control character forges no line."""
    caplog.set_level(logging.INFO, "projector_dedup.consumers")
    rig.settle(
        paid(1), paid(2, account="defer", attempt=2), paid(3, account="poison", message_id="m\n3"),
        paid(4, account="poison", message_id=b"m\xff4"),
        Incoming(b"{"),
    )  # fmt: skip
    lines = [(each.levelname, each.getMessage()) for each in caplog.records if each.name.endswith("consumers")]
    assert lines[:2] == [
        (
            "INFO",
            "message m2 from queue payments will be delivered again in 5.0 s, after delivery 2: Defer: not before noon",
        ),
        ("ERROR", "message m\\n3 from queue payments is rejected at delivery 1: KeyError: 'carrier'"),
    ]
    assert lines[2][1].startswith(
        "message m\\xff4 from queue payments is rejected at delivery 1: InvalidMessageIdError"
    )
    assert lines[3][1].startswith("message (without an id) from a queue is rejected")


def test_an_id_in_the_body_is_logged(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """Where the dispatcher finds it: for whoever looks for the message. What is no id is no reason to fail."""
    with_id = {"type": "payment", "account": "poison", "amount": 100}
    ids = ["m5", "m\n6", "x" * 200, 7, None]
    bodies = [json.dumps({**with_id, "message_id": each}).encode() for each in ids]
    settled = rig.settle(*(Incoming(body, origin="queue payments") for body in bodies))
    assert [each.reject for each in settled] == [True] * 5
    lines = [each.getMessage() for each in caplog.records if each.name.endswith("consumers")]
    named = [line.partition(" from queue payments is rejected")[0] for line in lines]
    assert sorted(named) == sorted(
        ["message m5", "message m\\n6", f"message {'x' * 80}", "message (without an id)", "message (without an id)"]
    )
    assert rig.applied == ({}, 0)


def test_an_extractor_that_fails_does_not_stop_the_consumer(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """It has failed in the delivery already, and fails again when the line is written."""

    def fails(_event: Any) -> object:
        raise KeyError("meta")

    (settled,) = rig.settle(paid(message_id=None), extractor=fails)
    assert (settled.reject, settled.reason) == (True, "KeyError: 'meta'")
    (line,) = [each.getMessage() for each in caplog.records if each.name.endswith("consumers")]
    assert line == "message (without an id) from queue payments is rejected at delivery 1: KeyError: 'meta'"


@pytest.mark.parametrize("batch", [False, True], ids=["alone", "in a batch"])
def test_a_missing_id_is_to_be_set_by_the_producer(rig: Rig, batch: bool) -> None:
    """Nobody can pass it to ``deliver`` there. An id that is there and wrong keeps the error that says why."""
    body = {"type": "payment", "account": "UA", "amount": 100}
    missing, wrong = (
        Incoming(json.dumps({**body, **more}).encode(), id_name="header id") for more in ({}, {"message_id": 7})
    )
    of_missing, of_wrong = rig.settle(missing, wrong, batch=batch)
    assert of_missing.reason == (
        "InvalidMessageIdError: the message has no id, so a redelivery could not be detected; the producer must set "
        "the header id. If the body contains the id, give the dispatcher message_id=by_path(...)"
    )
    assert of_wrong.reason.startswith("InvalidMessageIdError: a message id must be text, not int")
    assert (of_missing.label, of_wrong.label) == ("invalid_id", "invalid_id")


def test_the_reason_is_short_and_printable(rig: Rig) -> None:
    """Brokers limit what fits into a header."""
    (settled,) = rig.settle(paid(message_id="m", type="a\0b" * 100))
    assert settled.reject
    assert settled.reason.isprintable()
    (settled,) = rig.settle(Incoming(json.dumps({"type": "\n" * 100_000}).encode(), "m"))
    assert settled.reject
    assert settled.reason.isprintable()
    assert len(settled.reason) < 3_000


def test_a_settling_takes_the_dispatcher_of_its_kind(sqlite: Database) -> None:
    """Mistaken at start-up, and not at the first message."""
    rig = Rig(sqlite, asynchronous=False)
    dispatcher = Dispatcher(sessionmaker(rig.engine), Payments())
    with pytest.raises(HandlerDefinitionError, match="takes AsyncDispatcher, not Dispatcher"):
        Settling(dispatcher, asynchronous=True)
    with pytest.raises(HandlerDefinitionError, match="takes Dispatcher, not sessionmaker"):
        Settling(sessionmaker(rig.engine))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_attempts is at least 1"):
        Settling(dispatcher, max_attempts=0)
    with pytest.raises(TypeError, match=r"^max_delay is a number of seconds, as in max_delay=5, not str$"):
        Settling(dispatcher, max_delay="5")  # type: ignore[arg-type]
    for wrong in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=f"max_delay is a number of seconds above 0, not {wrong}"):
            Settling(dispatcher, max_delay=wrong)
    with pytest.raises(ValueError, match="convert takes a function"):
        Settling(dispatcher, "json")  # type: ignore[arg-type]


EVENTS = st.dictionaries(
    st.sampled_from([*ATTRIBUTES, "account", "amount", "message_id"]), st.one_of(st.text(), st.integers())
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(
    garbage=st.lists(
        st.builds(
            Incoming,
            body=st.one_of(BODIES, EVENTS.map(lambda event: json.dumps(event).encode())),
            message_id=HEADERS,
            type=HEADERS,
            occurred_at=HEADERS,
            content_type=HEADERS,
            headers=st.dictionaries(st.sampled_from([f"ce_{name}" for name in ATTRIBUTES]), HEADERS),
            attempt=st.integers(1, 30),
        ),
        max_size=5,
    ),
    convert=st.sampled_from([json_event, cloudevent, json_of]),
    batch=st.booleans(),
)
def test_garbage_applies_nothing_and_takes_nothing_with_it(
    sqlite: Database, garbage: list[Incoming], convert: Any, batch: bool
) -> None:
    """Whatever comes, the message behind it is applied, and nothing else is."""
    rig = Rig(sqlite, asynchronous=False)
    good = {
        json_event: paid(0, type="payment"),
        json_of: Incoming(b'{"message_id": "m0", "type": "payment", "account": "UA", "amount": 100}'),
        cloudevent: Incoming(
            b'{"account": "UA", "amount": 100}',
            headers={"ce_specversion": "1.0", "ce_id": "0", "ce_source": "s", "ce_type": "payment"},
        ),
    }[convert]
    settled = rig.settle(*garbage, good, batch=batch, convert=convert)
    assert [each.acknowledge for each in settled] == [False] * len(garbage) + [True]
    assert all(each.reject for each in settled[:-1])
    assert rig.applied == ({"UA": 100}, 1)
    with rig.engine.begin() as connection:
        connection.execute(text("DELETE FROM balance"))
        connection.execute(text("DELETE FROM processed_message"))
    rig.engine.dispose()
