"""What an observer is told: one observation for each message and handler, after the commit, and at no risk for it."""

import logging
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import FrameType
from typing import Any, cast

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.orm.exc import StaleDataError

import projector_dedup.observer
from cut_proxy import CutProxy
from databases import DRIVERS, Database
from kit import Added, Harness, Subject, add
from projector_dedup import Defer, Dispatcher, Message, on, projector
from projector_dedup.errors import (
    BatchFailed,
    DeliveryFailed,
    InProgress,
    InvalidMessageIdError,
    RetriesExhaustedError,
    UnhandledMessage,
)
from projector_dedup.message import by_path
from projector_dedup.observer import Observation
from projector_dedup.options import RetryPolicy
from reach import reach
from ready import engine_on, ready

THREE = [each for each in DRIVERS if str(each) in ("postgresql+psycopg", "mariadb+asyncmy (async)", "sqlite+pysqlite")]
ADDED = f"{Added.__module__}.Added"
QUICK = RetryPolicy(attempts=3, base=0)


class Notes:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.all: list[Observation] = []

    def observed(self, observation: Observation) -> None:
        """Keep it."""
        self.all.append(observation)

    def told(self, *fields: str) -> list[tuple[Any, ...]]:
        """Outcome and message id of each, and other fields."""
        return [tuple(getattr(each, name) for name in ("outcome", "message_id", *fields)) for each in self.all]


class Fails:
    """A handler that adds, but first raises what a message asks for, as often as it asks for it."""

    def __init__(self, error: Exception | None = None, times: int = 10**9, at: int = -1) -> None:
        self.error, self.times, self.at = error, times, at

    def __call__(self, happened: Added, session: Session) -> None:
        """Fail, or add."""
        add(happened, session)
        session.flush()
        if self.error is not None and happened.amount in (self.at, 1) and self.times > 0:
            self.times -= 1
            raise self.error


@pytest.fixture
def notes() -> Notes:
    """An observer."""
    return Notes()


@pytest.fixture(params=THREE, ids=str)
def harness(request: pytest.FixtureRequest) -> Iterator[Harness]:
    """The contract's tables on each database, through a synchronous driver or an asynchronous one."""
    with ready(reach(request, request.param)) as harness:
        yield harness


@pytest.fixture
def on_sqlite(sqlite: Database) -> Iterator[Harness]:
    """The contract's tables, where it does not matter on which engine."""
    with ready(sqlite.url()) as harness:
        yield harness


def test_what_is_applied_and_what_comes_again(harness: Harness, notes: Notes) -> None:
    """Each delivery is observed once, with who handled what."""
    dispatcher = harness.dispatcher(observer=notes)
    for _ in range(2):
        harness.deliver(dispatcher, Added())
    first, second = notes.all
    assert (first.outcome, second.outcome) == ("applied", "duplicate")
    for each in notes.all:
        assert (each.handler, each.message_type, each.message_id) == ("totals", ADDED, "m1")
        assert (each.attempts, each.batch_size, each.age, each.error) == (1, 1, None, None)
        assert each.duration > 0
        assert not each.after_unknown_commit
    assert harness.totals() == {"a": 1}


def test_an_observer_sees_what_is_durable(harness: Harness) -> None:
    """It is called after the commit: another connection sees the write and the marker by then."""
    seen = []

    class Looks:
        """Looks from another connection."""

        def observed(self, observation: Observation) -> None:
            """Look."""
            looking = threading.Thread(target=lambda: seen.append((observation.outcome, *rows())))
            looking.start()
            looking.join()

    def rows() -> tuple[Any, ...]:
        with Harness(Subject(harness.subject.url)) as another:
            return another.totals(), another.markers()

    harness.deliver(harness.dispatcher(observer=Looks()))
    assert seen == [("applied", {"a": 1}, [("m1", "totals")])]


@pytest.mark.parametrize(
    ("error", "outcome"),
    [(Defer("too early"), "deferred"), (InProgress("as if"), "in_progress"), (ValueError("poison"), "failed")],
    ids=["Defer", "InProgress", "ValueError"],
)
def test_what_is_raised_is_told_apart(harness: Harness, notes: Notes, error: Exception, outcome: str) -> None:
    """Too early, held by another delivery, or failed: with the error itself."""
    dispatcher = harness.dispatcher(harness.handler(Fails(error)), observer=notes)
    with pytest.raises(type(error)):
        harness.deliver(dispatcher)
    assert notes.told("error", "handler", "attempts") == [(outcome, "m1", error, "totals", 1)]
    assert harness.totals() == {}


def test_a_rival_that_holds_the_claim(postgresql: Database, notes: Notes) -> None:
    """The claim's own timeout is observed as a message in progress."""
    with ready(postgresql.url()) as harness:
        dispatcher = harness.dispatcher(observer=notes, claim_timeout=0.2)

        def deliver_meanwhile(_session: Session) -> None:
            with pytest.raises(InProgress):
                harness.start(harness.deliver, dispatcher).result()

        harness.unit_of_work("m1", deliver_meanwhile)
    assert notes.told() == [("in_progress", "m1")]


def test_each_retry_is_observed(harness: Harness, notes: Notes) -> None:
    """Two failures that pass: the number of the attempt to come, as in the log, and then the outcome."""
    passing = StaleDataError("somebody was faster")
    dispatcher = harness.dispatcher(harness.handler(Fails(passing, times=2)), observer=notes, retry=QUICK)
    harness.deliver(dispatcher)
    assert notes.told("attempts", "error") == [
        ("retried", "m1", 2, passing),
        ("retried", "m1", 3, passing),
        ("applied", "m1", 3, None),
    ]
    durations = [each.duration for each in notes.all]
    assert durations == sorted(durations)


def test_retries_that_are_used_up(harness: Harness, notes: Notes) -> None:
    """It ends as failed, after all the attempts there were."""
    dispatcher = harness.dispatcher(harness.handler(Fails(StaleDataError("again"))), observer=notes, retry=QUICK)
    with pytest.raises(RetriesExhaustedError) as exhausted:
        harness.deliver(dispatcher)
    assert notes.told("attempts") == [("retried", "m1", 2), ("retried", "m1", 3), ("failed", "m1", 3)]
    assert notes.all[-1].error is exhausted.value


@pytest.mark.parametrize("engine", ["postgresql", "mariadb"])
def test_a_commit_whose_answer_was_lost(request: pytest.FixtureRequest, engine: str, notes: Notes) -> None:
    """The retry finds the marker that this delivery wrote itself: a duplicate that counts as applied."""
    url = request.getfixturevalue(engine).url()
    with CutProxy(url) as proxy, ready(proxy.through(url)) as harness:
        dispatcher = harness.dispatcher(observer=notes)
        proxy.cut_commit("after")
        harness.deliver(dispatcher)
        harness.deliver(dispatcher)
        assert harness.totals() == {"a": 1}
    assert notes.told("after_unknown_commit") == [
        ("retried", "m1", False),
        ("duplicate", "m1", True),
        ("duplicate", "m1", False),
    ]


@pytest.mark.parametrize("batch", [False, True])
def test_a_redelivery_whose_commit_was_interrupted_was_applied_before(
    postgresql: Database, notes: Notes, batch: bool
) -> None:
    """This delivery applied only what its own COMMIT may have written: an older duplicate does not count as applied."""
    url = postgresql.url()
    with CutProxy(url) as proxy, ready(proxy.through(url)) as harness:
        harness.deliver(harness.dispatcher())
        dispatcher = harness.dispatcher(observer=notes)
        proxy.cut_commit("after")
        if batch:
            dispatcher.deliver_batch([Message("m1", Added()), Message("m2", Added())])
        else:
            harness.deliver(dispatcher)
    settled = [told for told in notes.told("after_unknown_commit") if told[0] != "retried"]
    assert settled == [("duplicate", "m1", False), ("duplicate", "m2", True)][: 1 + batch]


def test_each_handler_is_observed(harness: Harness, notes: Notes) -> None:
    """One that fails beside one that applies: an observation for each."""
    poison = ValueError("poison")
    handlers = [harness.handler(Fails(poison), "first"), harness.handler(Fails(), "second")]
    with pytest.raises(DeliveryFailed):
        harness.deliver(harness.dispatcher(*handlers, observer=notes))
    assert notes.told("handler", "error") == [("failed", "m1", "first", poison), ("applied", "m1", "second", None)]


def batch(*amounts: int) -> list[Message]:
    """Messages `m<amount>`."""
    return [Message(f"m{amount}", Added(amount=amount)) for amount in amounts]


def test_each_message_of_a_batch_is_observed(harness: Harness, notes: Notes) -> None:
    """Applied, known before, twice in the batch: each message once, and how many shared the transaction."""
    dispatcher = harness.dispatcher(observer=notes)
    harness.run(dispatcher.deliver_batch, batch(2))
    harness.run(dispatcher.deliver_batch, batch(2, 3, 4, 3))
    assert notes.told("batch_size", "attempts") == [
        ("applied", "m2", 1, 1),
        ("duplicate", "m2", 4, 1),
        ("applied", "m3", 4, 1),
        ("applied", "m4", 4, 1),
        ("duplicate", "m3", 4, 1),
    ]


def test_a_batch_that_is_split_tells_each_message_once(harness: Harness, notes: Notes) -> None:
    """Observations say of each message what its delivery says, however often the batch was tried."""
    poison = ValueError("poison")
    dispatcher = harness.dispatcher(harness.handler(Fails(poison, at=5)), observer=notes)
    with pytest.raises(BatchFailed) as failed:
        harness.run(dispatcher.deliver_batch, batch(2, 3, 4, 5, 6, 7))
    told = {each.message_id: (each.outcome, each.error) for each in notes.all}
    assert len(notes.all) == len(told) == 6
    assert told == {
        each.message_id: (each.outcome.value, each.errors.get("totals")) for each in failed.value.deliveries
    }
    assert told["m5"] == ("failed", poison)


def test_a_batch_whose_retry_is_observed_for_each_message(harness: Harness, notes: Notes) -> None:
    """All of them are rolled back and tried again."""
    passing = StaleDataError("somebody was faster")
    handler = harness.handler(Fails(passing, times=1, at=3))
    harness.run(harness.dispatcher(handler, observer=notes, retry=QUICK).deliver_batch, batch(2, 3))
    assert notes.told("attempts") == [
        ("retried", "m2", 2),
        ("retried", "m3", 2),
        ("applied", "m2", 2),
        ("applied", "m3", 2),
    ]


def test_a_batch_that_is_given_up_is_observed_whole(on_sqlite: Harness, notes: Notes) -> None:
    """Two messages in a row outlive their retries, the rest is not tried: those have failed too, once each."""
    handler = projector(idempotent=True, name="totals")(on(Added, batch=True)(_never))
    with pytest.raises(BatchFailed):
        on_sqlite.dispatcher(handler, observer=notes, retry=QUICK).deliver_batch(batch(*range(2, 10)))
    outcomes = Counter((each.outcome, each.message_id) for each in notes.all if each.outcome != "retried")
    assert outcomes == {("failed", f"m{number}"): 1 for number in range(2, 10)}


def _never(_happened: list[Added], _session: Session) -> None:
    raise StaleDataError("always")


class Nobody:
    """An event that no handler wants."""


@pytest.mark.parametrize(
    ("event", "error", "message_type", "message_id"),
    [
        (Message("m1", Nobody()), UnhandledMessage, f"{Nobody.__module__}.Nobody", "m1"),
        (Message("m1", {}, type="nobody.wants"), UnhandledMessage, "nobody.wants", "m1"),
        (Added(), InvalidMessageIdError, ADDED, None),
    ],
    ids=["class", "name", "no id"],
)
@pytest.mark.parametrize("many", [False, True], ids=["deliver", "deliver_batch"])
def test_a_message_that_goes_to_no_handler_is_observed(
    on_sqlite: Harness,
    notes: Notes,
    event: object,
    error: type[Exception],
    message_type: str,
    message_id: str,
    many: bool,
) -> None:
    """Failed, by nobody: after no attempt at all."""
    dispatcher = on_sqlite.dispatcher(observer=notes)
    with pytest.raises(BatchFailed if many else error):
        dispatcher.deliver_batch([event]) if many else dispatcher.deliver(event)
    (each,) = notes.all
    assert (each.outcome, each.handler, each.message_type, each.message_id) == (
        "failed",
        None,
        message_type,
        message_id,
    )
    assert (each.attempts, each.duration, type(each.error)) == (0, 0.0, error)


@pytest.mark.parametrize("many", [False, True], ids=["deliver", "deliver_batch"])
def test_the_type_that_is_found_in_the_body(on_sqlite: Harness, notes: Notes, many: bool) -> None:
    """With `Dispatcher(type=...)` an observation has the type by which the handler was found."""

    @projector(idempotent=True, name="totals")
    @on("added")
    def handler(_body: object, session: Session) -> None:
        add(Added(), session)

    dispatcher = on_sqlite.dispatcher(handler, observer=notes, type=by_path("kind"), message_id=by_path("id"))
    body = {"kind": "added", "id": "m1"}
    dispatcher.deliver_batch([body]) if many else dispatcher.deliver(body)
    assert notes.told("message_type", "handler") == [("applied", "m1", "added", "totals")]


def test_a_message_that_nobody_wants_is_observed_as_skipped(harness: Harness, notes: Notes) -> None:
    """With `unhandled="ignore"` that is an outcome like any other."""
    dispatcher = harness.dispatcher(observer=notes, unhandled="ignore")
    harness.run(dispatcher.deliver, Message("m1", Nobody()))
    harness.run(dispatcher.deliver_batch, [Message("m2", Nobody()), *batch(3)])
    assert notes.told("handler") == [("skipped", "m1", None), ("skipped", "m2", None), ("applied", "m3", "totals")]


def test_the_age_of_a_message(on_sqlite: Harness, notes: Notes) -> None:
    """Seconds since `occurred_at`, whatever its time zone; negative if the producer's clock is ahead."""
    dispatcher = on_sqlite.dispatcher(observer=notes)
    zone = datetime.now().astimezone().tzinfo
    for hours, at in ((2, UTC), (2, zone), (-2, UTC)):
        dispatcher.deliver(Message(f"{hours} {at}", Added(), occurred_at=datetime.now(at) - timedelta(hours=hours)))
    ages = [each.age for each in notes.all]
    assert [round(cast(float, age) / 3600) for age in ages] == [2, 2, -2]


def test_a_time_that_is_none_costs_no_observation(on_sqlite: Harness, notes: Notes) -> None:
    """A message that was made past its checks fails, and is observed as any that fails."""
    message = Message("m1", Added())
    object.__setattr__(message, "occurred_at", datetime(2026, 1, 1))  # noqa: DTZ001  # no time zone, on purpose
    with pytest.raises(ValueError, match="no time zone"):
        on_sqlite.dispatcher(observer=notes).deliver(message)
    assert notes.told("age") == [("failed", "m1", None)]


# An observer that fails ----------------------------------------------------------------------------------------------

SECRET = "4929-1234-5678-9012"


class Broken:
    """An observer that raises whenever it is called."""

    def __init__(self, error: BaseException) -> None:
        self.error, self.called = error, 0

    def observed(self, _observation: Observation) -> None:
        """Raise."""
        self.called += 1
        raise self.error


def test_an_observer_that_raises_changes_no_delivery(harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
    """Applied, duplicate, retried, failed, batches: all as without it, and one line in the log, without its text."""
    broken = Broken(RuntimeError(SECRET))
    poison = ValueError("poison")
    fails = harness.handler(Fails(poison, at=5))
    dispatcher = harness.dispatcher(fails, observer=broken, retry=QUICK)
    assert harness.deliver(dispatcher, Added(amount=2)).outcome.value == "applied"
    assert harness.deliver(dispatcher, Added(amount=2)).outcome.value == "duplicate"
    with pytest.raises(ValueError, match="poison"):
        harness.deliver(dispatcher, Added(amount=5), "m5")
    with pytest.raises(BatchFailed) as failed:
        harness.run(dispatcher.deliver_batch, batch(3, 4, 5))
    assert [each.outcome.value for each in failed.value.deliveries] == ["applied", "applied", "failed"]
    assert broken.called == 6
    assert harness.totals() == {"a": 2 + 3 + 4}
    (line,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert line.name == "projector_dedup"
    assert (
        "the observer failed; deliveries continue, and later failures are not logged: RuntimeError in"
        in line.getMessage()
    )
    assert Path(__file__).name in line.getMessage()
    assert SECRET not in repr(vars(line))


def test_an_interrupt_that_meets_an_observer_passes(on_sqlite: Harness) -> None:
    """Ctrl-C while it runs ends the worker, as anywhere; what was committed stays, and comes again as a duplicate."""
    with pytest.raises(KeyboardInterrupt):
        on_sqlite.dispatcher(observer=Broken(KeyboardInterrupt())).deliver(*batch(2))
    assert on_sqlite.totals() == {"a": 2}
    assert on_sqlite.dispatcher().deliver(*batch(2)).outcome.value == "duplicate"


class Later:
    """No observer: nothing would await it."""

    async def observed(self, _observation: Observation) -> None:
        """Do nothing."""


@pytest.mark.parametrize("wrong", [Later(), Notes, print, object()], ids=["async", "a class", "a function", "nothing"])
def test_what_is_no_observer_is_refused_at_once(on_sqlite: Harness, wrong: Any) -> None:
    """When the dispatcher is made, not at the first message."""
    with pytest.raises(ValueError, match=r"a plain method observed\(observation\)"):
        on_sqlite.dispatcher(observer=wrong)


# Without an observer -------------------------------------------------------------------------------------------------


def _calls_into_the_observers_file(deliver: Callable[[], object]) -> int:
    calls = 0

    def count(frame: FrameType, kind: str, _argument: object) -> None:
        nonlocal calls
        calls += kind == "call" and frame.f_code.co_filename == projector_dedup.observer.__file__

    sys.setprofile(count)
    try:
        deliver()
    finally:
        sys.setprofile(None)
    return calls


def test_without_an_observer_nothing_is_called(on_sqlite: Harness, notes: Notes) -> None:
    """What it costs whoever has none is a comparison with None."""

    def deliver(dispatcher: Dispatcher, name: str) -> None:
        dispatcher.deliver(Added(), message_id=name)
        dispatcher.deliver_batch([Message(f"{name} {number}", Added()) for number in range(3)])

    assert _calls_into_the_observers_file(lambda: deliver(on_sqlite.dispatcher(), "first")) == 0
    observed = _calls_into_the_observers_file(lambda: deliver(on_sqlite.dispatcher(observer=notes), "second"))
    assert observed > len(notes.all) == 4


# What operators read: one logger, one line for a duplicate, fields to count by, and nothing of the payload -----------


class Transient:
    """A handler that meets a transient error a few times."""

    def __init__(self, times: int) -> None:
        self.times = times

    def __call__(self, event: dict[str, Any], _session: Session) -> None:
        """Fail, or do nothing."""
        assert event["card"] == SECRET
        self.times -= 1
        if self.times >= 0:
            raise StaleDataError(f"somebody was faster, and here is {SECRET}")


def meets(sessions: sessionmaker[Session], times: int = 0, *, name: str = "h", **options: Any) -> Dispatcher:
    """A dispatcher whose handler meets a transient error a few times."""
    return Dispatcher(sessions, projector(idempotent=True, name=name)(on(dict)(Transient(times))), **options)


@pytest.fixture(params=["postgresql", "mariadb"])
def server(request: pytest.FixtureRequest) -> Database:
    """An empty database on each server."""
    database: Database = request.getfixturevalue(request.param)
    return database


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Everything that the library logs."""
    caplog.set_level(logging.DEBUG, logger="projector_dedup")
    return caplog


def fields(record: logging.LogRecord) -> tuple[Any, ...]:
    """What a structured handler would index."""
    return tuple(getattr(record, name) for name in ("message_id", "handler", "outcome", "attempts"))


def test_a_redelivery_is_one_line_at_info(factory: sessionmaker[Session], log: pytest.LogCaptureFixture) -> None:
    """A duplicate is ordinary: INFO, with handler and id; what applied is at DEBUG."""
    dispatcher = meets(factory)
    for _ in range(2):
        dispatcher.deliver({"card": SECRET}, message_id="m1")
    assert [(record.name, record.levelname, fields(record)) for record in log.records] == [
        ("projector_dedup", "DEBUG", ("m1", "h", "applied", 1)),
        ("projector_dedup", "INFO", ("m1", "h", "duplicate", 1)),
    ]
    assert log.messages == ["applied: message m1, handler h", "duplicate: message m1, handler h"]
    assert [vars(record)["after_unknown_commit"] for record in log.records] == [False, False]


def test_retries_are_counted(factory: sessionmaker[Session], log: pytest.LogCaptureFixture) -> None:
    """Each further attempt is a line, and the outcome says how many there were."""
    meets(factory, 2, retry=RetryPolicy(base=0)).deliver({"card": SECRET}, message_id="m1")
    assert [fields(record)[2:] for record in log.records] == [("retry", 2), ("retry", 3), ("applied", 3)]


def test_no_payload_and_no_error_text_is_logged(factory: sessionmaker[Session], log: pytest.LogCaptureFixture) -> None:
    """Not when it applies, is retried or is refused; SQLAlchemy's parameters do not come along either."""
    dispatcher = meets(factory, 1, retry=RetryPolicy(base=0))
    for _ in range(2):
        dispatcher.deliver({"card": SECRET}, message_id="m1")
    assert len(log.records) == 3
    for record in log.records:
        assert SECRET not in repr(vars(record))


@pytest.mark.parametrize(
    "message_id", ["m1\nINFO forged line", "m1\r\n", "\x1b[2Jm1", "m1\u2028x", "m1\u202ex", "m1\x85x", "m1\u200b"]
)
def test_an_id_cannot_forge_a_line(
    factory: sessionmaker[Session], log: pytest.LogCaptureFixture, message_id: str
) -> None:
    """Line ends, terminal codes and direction marks come out escaped, in the text and in the fields."""
    dispatcher = meets(factory, name="h\nx")  # a pinned name is the programmer's, and printed by the same rule
    for _ in range(2):
        dispatcher.deliver({"card": SECRET}, message_id=message_id)
    for record in log.records:
        assert record.getMessage().isprintable()
        assert vars(record)["message_id"].isprintable()


def test_a_chosen_read_committed_is_warned_of_once(server: Database, log: pytest.LogCaptureFixture) -> None:
    """Where lost updates are possible because the user asked for that level, a dispatcher says so, once.

    Also once for all copies of an engine: a Session class may make one for every session, with a tenant's schema say.
    """
    for copies in (False, True):
        with engine_on(server.url(), isolation_level="READ COMMITTED") as engine:

            class Copying(Session):
                """Asks for each session's own copy of the engine."""

                def get_bind(self, *_: Any, engine: Engine = engine, **__: Any) -> Engine:
                    return engine.execution_options(schema_translate_map={None: None})

            log.clear()
            dispatcher = meets(sessionmaker(engine, class_=Copying if copies else Session))
            for number in range(3):
                dispatcher.deliver({"card": SECRET}, message_id=f"{copies} {number}")
            (warning,) = [record.getMessage() for record in log.records if record.levelname == "WARNING"]
            assert "read_models" in warning
