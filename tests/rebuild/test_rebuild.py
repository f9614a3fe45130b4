"""A new generation is built beside live traffic; and what it lacks is found, whatever the cause."""

import asyncio
import logging
import re
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, String, create_engine, select, update
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from databases import DRIVERS, Database, Driver
from projector_dedup import AsyncDispatcher, Defer, Dispatcher, Message, Outcome, on, projector
from projector_dedup.building import building
from projector_dedup.effects import arm, default_effect_tables, effect, stop
from projector_dedup.errors import BatchFailed, BeyondRetention, DeliveryFailed, HandlerDefinitionError, RefusedError
from projector_dedup.handler import handlers_of
from projector_dedup.late import REDELIVERY_HORIZON
from projector_dedup.maintenance.cleanup import cleanup, count_expired, prune
from projector_dedup.maintenance.rebuilds import open_rebuilds
from projector_dedup.maintenance.rows import rename
from projector_dedup.maintenance.state import pruned_until, write_state
from projector_dedup.observer import Observation
from projector_dedup.rebuild.lacking import Lacking, alacking, lacking, pairs_of
from projector_dedup.rebuild.rebuild import Rebuilt, aend_rebuild, arebuild, end_rebuild, rebuild
from projector_dedup.tables import default_metadata, default_tables

MARKER = default_tables.marker
BEGAN = datetime(2026, 1, 1, tzinfo=UTC)


class Base(DeclarativeBase):
    """The user's own metadata."""


class _Totals:
    account: Mapped[str] = mapped_column(String(20), primary_key=True)
    amount: Mapped[int] = mapped_column(default=0)


class Old(_Totals, Base):
    """The totals of the old generation."""

    __tablename__ = "old_total"


class New(_Totals, Base):
    """Those of the new one."""

    __tablename__ = "new_total"


def adding(model: type[_Totals], fails: Callable[[Any], bool] = lambda _body: False) -> Callable[[Any, Session], None]:
    """A handler that adds the amount of a payment to its account."""

    def add(body: Any, session: Session) -> None:
        if fails(body):
            raise ValueError("this one is not understood")
        total = session.get(model, body["account"], with_for_update=True)
        if total is None:
            total = model()
            total.account, total.amount = body["account"], 0
            session.add(total)
            session.flush()
        total.amount += body["amount"]

    return add


def named(name: str, handler: Callable[[Any, Session], None], *events: str, asynchronous: bool = False) -> Any:
    """An idempotent projector of one function."""

    async def awaits(body: Any, session: Any) -> None:
        await session.run_sync(lambda plain: handler(body, plain))

    def calls(body: Any, session: Any) -> None:
        handler(body, session)

    function = awaits if asynchronous else calls
    return projector(idempotent=True, name=name)(on(*(events or ("paid",)))(function))


def always(_body: Any) -> bool:
    """Fail on every message."""
    return True


def payments(number: int, first: int = 0) -> list[Message]:
    """Payments of 1, 2, 3 ... to three accounts, a minute apart."""
    return [
        Message(
            f"p{index:05}",
            {"account": f"a{index % 3}", "amount": index + 1},
            "paid",
            BEGAN + timedelta(minutes=index),
        )
        for index in range(first, first + number)
    ]


def totals_of(messages: Sequence[Message]) -> dict[str, int]:
    """The totals by the input alone."""
    totals: dict[str, int] = {}
    for message in messages:
        totals[message.body["account"]] = totals.get(message.body["account"], 0) + message.body["amount"]
    return totals


@dataclass
class Shop:
    """A database with both read models, and the same calls for a driver of either kind."""

    driver: Driver
    outside: Engine
    factory: Any
    run: Callable[[Any], Any]

    def dispatcher(self, *projectors: Any, **arguments: Any) -> Any:
        """A dispatcher of the driver's kind."""
        return (AsyncDispatcher if self.driver.is_async else Dispatcher)(self.factory, *projectors, **arguments)

    def old(self, *events: str, **arguments: Any) -> Any:
        """The projector in use."""
        return named("totals", adding(Old, **arguments), *events, asynchronous=self.driver.is_async)

    def new(self, *events: str, **arguments: Any) -> Any:
        """Its new generation."""
        return named("totals-2", adding(New, **arguments), *events, asynchronous=self.driver.is_async)

    def both(self, **arguments: Any) -> Any:
        """A dispatcher of both, with the new one building."""
        return self.dispatcher(self.old(), building(self.new(**arguments), beside="totals"))

    def deliver(self, dispatcher: Any, messages: Sequence[Message]) -> None:
        """Deliver messages one by one."""
        for message in messages:
            self.wait(dispatcher.deliver(message))

    def wait(self, result: Any) -> Any:
        """The result, awaited if need be."""
        return self.run(result) if self.driver.is_async else result

    def rebuild(self, dispatcher: Any, source: Any, projector: str = "totals-2", **arguments: Any) -> Rebuilt:
        """Run a rebuild to its end."""
        function: Any = arebuild if self.driver.is_async else rebuild
        result: Rebuilt = self.wait(function(dispatcher, projector, source, **arguments))
        return result

    def lacking(self, dispatcher: Any, projector: str = "totals-2", **arguments: Any) -> Lacking:
        """Compare both generations."""
        function: Any = alacking if self.driver.is_async else lacking
        result: Lacking = self.wait(function(dispatcher, projector, **arguments))
        return result

    def end(self, dispatcher: Any) -> bool:
        """End the rebuild."""
        result: bool = self.wait((aend_rebuild if self.driver.is_async else end_rebuild)(dispatcher, "totals-2"))
        return result

    def totals(self, model: type[_Totals]) -> dict[str, int]:
        """A read model, as another connection sees it."""
        with Session(self.outside) as session:
            return {row.account: row.amount for row in session.scalars(select(model))}

    def age(self, hours: float) -> None:
        """Make every marker so much older."""
        with self.outside.begin() as connection:
            for row in connection.execute(select(MARKER)).all():
                same = (MARKER.c.message_id == row.message_id) & (MARKER.c.handler == row.handler)
                older = row.processed_at - timedelta(hours=hours)
                connection.execute(update(MARKER).where(same).values(processed_at=older))


@pytest.fixture(params=DRIVERS, ids=str)
def driver(request: pytest.FixtureRequest) -> Driver:
    """Each driver in turn."""
    found: Driver = request.param
    if not found.installed:
        pytest.skip(f"{found.module} is not installed")
    return found


@pytest.fixture
def shop(driver: Driver, request: pytest.FixtureRequest) -> Iterator[Shop]:
    """A shop on an empty database."""
    database: Database = request.getfixturevalue(driver.engine)
    url = database.url(driver.drivername)
    with ExitStack() as stack:
        outside = create_engine(database.url())
        stack.callback(outside.dispose)
        default_metadata.create_all(outside)
        Base.metadata.create_all(outside)
        if driver.is_async:
            runner = stack.enter_context(asyncio.Runner())
            engine = create_async_engine(url)
            stack.callback(lambda: runner.run(engine.dispose()))
            yield Shop(driver, outside, async_sessionmaker(engine), runner.run)
        else:
            plain = create_engine(url)
            stack.callback(plain.dispose)
            yield Shop(driver, outside, sessionmaker(plain), lambda result: result)


on_sqlite = pytest.mark.parametrize(
    "driver", [each for each in DRIVERS if str(each) == "sqlite+pysqlite"], indirect=True
)
one_of_each = pytest.mark.parametrize(
    "driver",
    [each for each in DRIVERS if str(each) in ("sqlite+pysqlite", "postgresql+psycopg", "mariadb+pymysql")],
    indirect=True,
    ids=str,
)


# A projector that is building --------------------------------------------------------------------------------------


def test_a_failure_of_the_new_generation_fails_no_delivery(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    """The old one has settled the message; the log, an observer and dead= are told of the failure."""
    told: list[Observation] = []
    dead: list[tuple[object, str]] = []

    class Observer:
        def observed(self, observation: Observation, /) -> None:
            told.append(observation)

    third = payments(3)[2]
    dispatcher = shop.dispatcher(
        shop.old(),
        building(
            shop.new(fails=lambda body: body["amount"] == 3),
            beside="totals",
            dead=lambda message, error: dead.append((message.id, str(error))),
        ),
        observer=Observer(),
    )
    with caplog.at_level(logging.WARNING):
        deliveries = [shop.wait(dispatcher.deliver(message)) for message in payments(3)]
        (batched,) = shop.wait(dispatcher.deliver_batch([third]))
    assert deliveries[2].outcomes == {"totals": Outcome.APPLIED}
    assert batched.outcomes == {"totals": Outcome.DUPLICATE}
    assert deliveries[0].outcomes == {"totals": Outcome.APPLIED, "totals-2": Outcome.APPLIED}
    assert dead == [(third.id, "this one is not understood")] * 2
    assert [each.message_id for each in told if each.outcome == "failed"] == [third.id] * 2
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert all("totals-2 failed on message p00002 (ValueError: this one" in line for line in lines)
    assert shop.totals(Old) == totals_of(payments(3))
    assert shop.totals(New) == totals_of(payments(2))


@on_sqlite
def test_what_only_the_new_generation_handles_is_delivered_as_usual(shop: Shop) -> None:
    """Nobody else would hear of its failure."""
    dispatcher = shop.dispatcher(shop.old(), building(shop.new("paid", "refunded", fails=always), beside="totals"))
    with pytest.raises(ValueError, match="not understood"):
        dispatcher.deliver(Message("r", {"account": "a", "amount": -1}, "refunded"))
    with pytest.raises(BatchFailed):
        dispatcher.deliver_batch([*payments(1), Message("r", {"account": "a", "amount": -1}, "refunded")])


@on_sqlite
def test_the_error_of_the_old_generation_is_raised_alone(shop: Shop) -> None:
    """Both fail: what the new one needs decides nothing, so the consumer gets the old one's error as it is."""
    old, new = shop.old(fails=always), building(shop.new(fails=always), beside="totals")
    with pytest.raises(ValueError, match="not understood"):
        shop.dispatcher(old, new).deliver(payments(1)[0])
    other = named("other", adding(Old, always))
    with pytest.raises(DeliveryFailed) as failed:
        shop.dispatcher(old, other, new).deliver(payments(1)[0])
    assert set(failed.value.delivery.outcomes) == {"totals", "other"}


@on_sqlite
def test_a_function_for_dead_letters_that_fails_changes_nothing(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    """It is logged, and the delivery stays settled."""

    def dead(_message: Message, _error: Exception) -> None:
        raise OSError("the disk is full")

    dispatcher = shop.dispatcher(shop.old(), building(shop.new(fails=always), beside="totals", dead=dead))
    assert dispatcher.deliver(payments(1)[0]).outcome is Outcome.APPLIED
    assert "the function dead= of totals-2 failed on message p00000: OSError" in caplog.text


def test_two_generations_that_cannot_be_told_apart_are_refused() -> None:
    """By name, by markers, or by the table they write to."""
    factory = sessionmaker(create_engine("sqlite://"))
    old = named("totals", adding(Old))
    plain = projector(name="totals")(on("paid")(lambda _body, _session: None))
    shared = [
        projector(idempotent=True, name=name, read_models=[Old])(on("paid")(lambda _body, _session: None))
        for name in ("totals", "totals-2")
    ]
    new = named("totals-2", adding(New))
    for projectors, words in (
        ([old, building(new, beside="total")], "no old generation with this name"),
        ([building(new, beside="totals")], "no old generation with this name"),
        ([building(old, beside="totals")], "no old generation with this name"),
        ([plain, building(new, beside="totals")], "has no markers"),
        ([shared[0], building(shared[1], beside="totals")], "both have Old in their read_models"),
    ):
        with pytest.raises(HandlerDefinitionError, match=words):
            Dispatcher(factory, *projectors)
    with pytest.raises(HandlerDefinitionError, match="beside must be the name"):
        building(new, beside=old)

    async def dead(_message: Message, _error: Exception) -> None:
        pass

    with pytest.raises(HandlerDefinitionError, match="no async def"):
        building(new, beside="totals", dead=dead)  # type: ignore[arg-type]  # that is the point


@effect(name="mail", unknown=stop, lease=10)
def _mail(_request: str, _attempt: Any) -> None:
    raise AssertionError("nothing settles")


def test_effects_are_not_armed_again(shop: Shop) -> None:
    """Neither by a projector that is building, nor by a rebuild: the customer has the mail already."""
    default_effect_tables.marker.metadata.create_all(shop.outside)

    def arms(body: Any, session: Session) -> None:
        arm(session, _mail, body["account"], key=body["account"])

    old = shop.old()
    new = named("totals-2", arms, asynchronous=shop.driver.is_async)
    dead: list[str] = []
    both = shop.dispatcher(old, building(new, beside="totals", dead=lambda _m, error: dead.append(str(error))))
    shop.deliver(both, payments(1))
    assert len(dead) == 1
    assert "mail was armed by a projector that is building, or by a rebuild" in dead[0]
    with pytest.raises(BatchFailed):
        shop.rebuild(both, payments(1))
    in_use = shop.dispatcher(old, new)
    with pytest.raises(BatchFailed) as failed:
        shop.rebuild(in_use, payments(1))
    assert "Arm effects in a separate projector" in str(failed.value.exceptions[0])
    shop.deliver(in_use, payments(1))
    with shop.outside.connect() as connection:
        assert len(connection.execute(select(default_effect_tables.marker)).all()) == 1


# A rebuild beside live traffic --------------------------------------------------------------------------------------


def test_a_new_generation_is_built_beside_live_deliveries(shop: Shop) -> None:
    """Old messages by the rebuild, new ones by deliveries, some by both: each total is that of the input."""
    old_messages, live = payments(30), payments(10, first=30)
    shop.deliver(shop.dispatcher(shop.old()), old_messages)
    both = shop.both()
    shop.deliver(both, live[:5])
    found = shop.lacking(both)
    assert (found.old, found.number, found.new_only) == (35, 30, 0)
    assert found.building
    assert found.known_since is None
    assert list(found.ids) == [message.id for message in old_messages]
    assert shop.lacking(both, limit=2).ids == ("p00000", "p00001")
    done = shop.rebuild(both, old_messages + live[:7], batch_size=8)
    assert done == Rebuilt(read=37, applied=32, duplicates=5, complete=True)
    shop.deliver(both, live)
    assert shop.lacking(both).number == 0
    assert shop.totals(New) == shop.totals(Old) == totals_of(old_messages + live)
    in_use = shop.dispatcher(shop.old(), shop.new())
    assert not shop.lacking(in_use).building  # the open rebuild tells beside which one it was built
    assert shop.end(in_use)
    assert not shop.end(in_use)
    with pytest.raises(RefusedError, match="nothing says beside which projector"):
        shop.lacking(in_use)
    assert shop.lacking(in_use, beside="totals").number == 0


def test_every_cause_of_an_omission_is_found(shop: Shop) -> None:
    """The source lacked it, the handler failed, a filter was wrong, or a process of old code applied it."""
    messages = payments(20)
    shop.deliver(shop.dispatcher(shop.old()), messages)
    failed: list[str | None] = []
    both = shop.both(fails=lambda body: body["amount"] in (4, 8))
    source = [message for message in messages if message.id not in ("p00001", "p00009")]
    done = shop.rebuild(both, source, batch_size=6, failed=lambda delivery: failed.append(delivery.message_id))
    assert (done.read, done.applied, done.failed, failed) == (18, 16, 2, ["p00003", "p00007"])
    shop.deliver(shop.dispatcher(shop.old()), payments(2, first=20))  # old code, which knows one generation
    found = shop.lacking(both)
    assert found.ids == ("p00001", "p00003", "p00007", "p00009", "p00020", "p00021")
    assert (found.old, found.number, found.source_read) == (22, 6, False)  # two have failed
    done = shop.rebuild(shop.both(), messages + payments(2, first=20))
    assert (done.applied, done.duplicates) == (6, 16)
    assert shop.lacking(both).number == 0
    assert shop.totals(New) == totals_of(payments(22))


def test_a_failing_message_ends_the_run_unless_somebody_is_told(shop: Shop) -> None:
    """What was applied stays, and the rebuild stays open."""
    both = shop.both(fails=lambda body: body["amount"] == 4)
    with pytest.raises(BatchFailed):
        shop.rebuild(both, payments(6), batch_size=3)
    assert shop.totals(New) == totals_of([*payments(3), *payments(2, first=4)])
    told: list[Any] = []

    def defers(_body: Any) -> bool:
        raise Defer("not now")

    with pytest.raises(BatchFailed):  # it would not fail again: nobody is told, and the run ends
        shop.rebuild(shop.both(fails=defers), payments(12), failed=told.append)
    assert told == []
    with shop.outside.connect() as connection:
        assert set(open_rebuilds(connection, default_tables)) == {"totals-2"}


class _Killed(BaseException):
    pass


def test_an_interrupted_rebuild_is_started_again(shop: Shop) -> None:
    """Killed behind a batch, in a handler and in the source, it reads all again: nothing counts twice or is lost."""
    messages, places = payments(12), ["batch", "handler", "source"]

    def dies(place: str) -> bool:
        if places and places[0] == place:
            places.pop(0)
            raise _Killed
        return False

    def archive() -> Iterator[Message]:
        yield from messages[:10]
        dies("source")
        yield from messages[10:]

    shop.deliver(shop.dispatcher(shop.old()), messages)
    both = shop.both(fails=lambda body: body["amount"] == 7 and dies("handler"))
    for applied in (4, 4, 8):  # the batch in which the handler dies is rolled back
        with pytest.raises(_Killed):
            shop.rebuild(both, archive, batch_size=4, on_batch=lambda _number: dies("batch"))
        assert shop.totals(New) == totals_of(messages[:applied])
    shop.deliver(both, payments(1, first=12))
    assert shop.rebuild(both, archive, batch_size=4) == Rebuilt(read=12, applied=4, duplicates=8, complete=True)
    assert shop.totals(New) == shop.totals(Old) == totals_of(payments(13))
    found = shop.lacking(both)
    assert (found.old, found.number, found.source_read) == (13, 0, True)


def test_a_source_may_be_asynchronous_or_a_function(shop: Shop) -> None:
    """An async iterable needs an AsyncDispatcher; `limit` and `until` end a run early."""

    async def archive() -> AsyncIterator[Message]:
        for message in payments(10):
            yield message

    both = shop.both()
    if not shop.driver.is_async:
        with pytest.raises(RefusedError, match="by arebuild"):
            rebuild(both, "totals-2", archive())  # type: ignore[arg-type]  # that is the point
        assert shop.rebuild(both, lambda: payments(10), limit=4) == Rebuilt(read=4, applied=4)
    else:
        assert shop.rebuild(both, archive, limit=4) == Rebuilt(read=4, applied=4)
        assert shop.rebuild(both, archive()).applied == 6
    until = BEGAN + timedelta(minutes=8)
    assert shop.rebuild(both, payments(10), until=until).read == 8
    with pytest.raises(RefusedError, match="the time of each message"):
        shop.rebuild(both, [Message("x", {}, "paid")], until=until)


@on_sqlite
def test_a_run_can_be_stopped_between_two_batches(shop: Shop) -> None:
    """`stop` is asked after each batch, `on_batch` is told of each; and a rebuild that somebody ends stays ended."""
    told: list[int] = []
    both = shop.both()
    done = shop.rebuild(both, payments(10), batch_size=4, on_batch=told.append, stop=lambda: len(told) == 2)
    assert (told, done.read, done.complete) == ([4, 4], 8, False)
    assert shop.rebuild(both, payments(10), on_batch=lambda _number: shop.end(both)).complete
    with shop.outside.connect() as connection:
        assert open_rebuilds(connection, default_tables) == {}


@on_sqlite
def test_a_rebuild_that_could_not_be_right_is_refused(shop: Shop) -> None:
    """And nothing is written."""
    plain = projector(name="plain")(on("paid")(lambda _body, _session: None))
    both = shop.dispatcher(shop.old(), building(shop.new(), beside="totals"), plain)
    for call, words in (
        (lambda: rebuild(both, "total-2", []), "has no projector total-2; it has: plain, totals, totals-2"),
        (lambda: rebuild(both, "plain", []), "plain has no markers"),
        (lambda: rebuild(both, "totals", []), "totals is in use: register the new generation by building"),
        (lambda: lacking(both, "totals-3"), "has no projector totals-3"),
    ):
        with pytest.raises(RefusedError, match=words):
            call()
    for call in (lambda: rebuild(both, "totals-2", [], batch_size=0), lambda: rebuild(both, "totals-2", [], limit=0)):
        with pytest.raises(ValueError, match="must be at least 1"):
            call()
    with pytest.raises(ValueError, match="source is an iterable of messages"):
        rebuild(both, "totals-2", 7)  # type: ignore[arg-type]  # that is the point
    with shop.outside.connect() as connection:
        assert open_rebuilds(connection, default_tables) == {}


@one_of_each
def test_a_message_in_flight_is_not_lacking(shop: Shop) -> None:
    """Its old marker has committed, its new one not yet: with `settle` the same messages are looked at again."""
    entered, go_on = threading.Event(), threading.Event()

    def slow(body: Any, session: Session) -> None:
        entered.set()
        assert go_on.wait(30)
        adding(New)(body, session)

    both = shop.dispatcher(shop.old(), building(named("totals-2", slow), beside="totals"))
    worker = threading.Thread(target=shop.deliver, args=(both, payments(1)))
    worker.start()
    try:
        assert entered.wait(30)
        assert lacking(both, "totals-2").ids == ("p00000",)
        looks = threading.Timer(1.0, go_on.set)
        looks.start()
        found = lacking(both, "totals-2", settle=30)
        assert (found.old, found.number, found.ids) == (1, 0, ())
    finally:
        go_on.set()
        worker.join()


# Cleanup, while a rebuild is open -----------------------------------------------------------------------------------


@one_of_each
def test_cleanup_keeps_both_generations_while_a_rebuild_is_open(shop: Shop) -> None:
    """A rebuild that is started again after the retention applies nothing twice; other handlers are pruned as ever."""
    messages = [replace(message, occurred_at=None) for message in payments(12)]  # no horizon is declared yet
    other = named("other", lambda _body, _session: None)
    shop.deliver(shop.dispatcher(shop.old(), other), messages)
    both = shop.both()
    shop.rebuild(both, messages[:6])
    shop.age(500)
    assert count_expired(shop.outside) == 12
    done = prune(shop.outside, batch_size=5)
    assert (done.deleted, done.complete, done.rebuilt) == (12, True, ("totals-2",))
    assert cleanup(shop.outside, handler="totals-2") == 0
    assert pruned_until(shop.outside) is not None  # of the other one
    assert shop.rebuild(both, messages) == Rebuilt(read=12, applied=6, duplicates=6, complete=True)
    assert shop.totals(New) == totals_of(messages)
    found = shop.lacking(both)
    assert (found.number, found.known_since, found.source_read) == (0, None, True)  # those of both are kept since
    assert shop.end(both)
    done = prune(shop.outside)
    assert (done.deleted, done.rebuilt) == (18, ())
    found = shop.lacking(both)
    assert found.known_since == pruned_until(shop.outside)
    assert (found.old, found.number, found.new_only) == (0, 0, 6)


@one_of_each
def test_a_rebuild_applies_what_is_late_for_everybody_else(shop: Shop) -> None:
    """Its messages are older than the retention, and the markers of the old one were pruned: that is what it is for."""
    messages = payments(6)
    shop.deliver(shop.dispatcher(shop.old()), messages)
    shop.age(500)
    _pruned(shop, 6)
    both = shop.both()
    with pytest.raises(BeyondRetention):
        shop.deliver(both, messages[:1])
    assert shop.rebuild(both, messages) == Rebuilt(read=6, applied=6, complete=True)
    assert shop.totals(New) == shop.totals(Old) == totals_of(messages)  # it is delivered to the new one alone


PAGE = Path(__file__).parents[2] / "docs" / "rebuild.md"


@one_of_each
def test_a_generation_that_nobody_wants_is_dropped(shop: Shop) -> None:
    """By the statements of docs/rebuild.md, run twice: cleanup deletes as ever, and a rebuild can begin anew."""
    (statements,) = re.findall(r"^ *```sql\n(.*?)^ *```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    for theirs, ours in (("account-totals-2.add_payment", "totals-2"), ("account-", ""), ("totals_2", "new_total")):
        statements = statements.replace(theirs, ours)
    messages = [replace(message, occurred_at=None) for message in payments(8)]
    both = shop.both()
    shop.deliver(both, messages[:3])
    shop.rebuild(both, messages[3:], limit=2)
    for statement in statements.split(";")[:-1] * 2:
        with shop.outside.begin() as connection:
            connection.exec_driver_sql(statement)
    with shop.outside.connect() as connection:
        assert open_rebuilds(connection, default_tables) == {}
        assert set(connection.scalars(select(MARKER.c.handler))) == {"totals"}
    shop.age(500)
    assert prune(shop.outside).deleted == 3
    Base.metadata.create_all(shop.outside)
    assert shop.rebuild(both, messages).applied == 8
    assert shop.totals(New) == totals_of(messages)


# What would make a rebuild lie -------------------------------------------------------------------------------------


@one_of_each
def test_a_generation_whose_markers_were_pruned_is_not_filled(shop: Shop) -> None:
    """Its messages would be applied again, and nothing would show it."""
    both, messages = shop.both(), payments(4)
    shop.deliver(both, messages)
    shop.age(500)
    _pruned(shop, 8)
    with pytest.raises(RefusedError, match="cleanup has deleted markers of totals-2, so a rebuild would apply"):
        shop.rebuild(shop.both(), messages)
    assert shop.totals(New) == totals_of(messages)


@on_sqlite
def test_a_handler_whose_markers_were_pruned_does_not_join_an_open_rebuild(shop: Shop) -> None:
    """Its messages would be applied again too, though the rebuild was opened before."""

    def counting(part: str) -> Any:
        return on("paid", name=part)(lambda _self, body, session: adding(New)(body, session))

    def grown(*parts: str) -> Any:
        methods = {part: counting(part) for part in parts}
        return projector(idempotent=True, name="totals-2")(type("Grown", (), methods))()

    def both(*parts: str) -> Any:
        return shop.dispatcher(shop.old(), building(grown(*parts), beside="totals"))

    messages = [replace(message, occurred_at=None) for message in payments(3)]
    shop.deliver(shop.dispatcher(grown("later")), messages)
    shop.age(500)
    _pruned(shop, 3)
    shop.rebuild(both("first"), messages)
    with pytest.raises(RefusedError, match=r"cleanup has deleted markers of totals-2\.later, so a rebuild would apply"):
        shop.rebuild(both("first", "later"), messages)
    assert sum(shop.totals(New).values()) == 2 * sum(message.body["amount"] for message in messages)


def _pruned(shop: Shop, number: int) -> None:
    """Prune by a horizon that was declared long ago."""
    with shop.outside.begin() as connection:
        write_state(connection, default_tables, {REDELIVERY_HORIZON: "168"})
    assert prune(shop.outside).deleted == number


@one_of_each
def test_what_was_pruned_before_is_told_also_of_one_handler(shop: Shop) -> None:
    """`cleanup --handler` leaves a trace too: before that moment, only the source can vouch."""
    messages = [replace(message, occurred_at=None) for message in payments(6)]
    shop.deliver(shop.dispatcher(shop.old()), messages[:4])
    shop.age(500)
    shop.deliver(shop.dispatcher(shop.old()), messages[4:])
    assert cleanup(shop.outside, handler="totals") == 4
    both = shop.both()
    shop.rebuild(both, messages[4:])
    found = shop.lacking(both)
    assert (found.old, found.number, found.known_since) == (2, 0, pruned_until(shop.outside))
    assert found.known_since is not None


@on_sqlite
def test_markers_that_an_open_rebuild_needs_are_not_moved(shop: Shop) -> None:
    """Neither renamed, nor taken over by a rebuild beside another generation."""
    both = shop.both()
    rebuild(both, "totals-2", payments(3), limit=2)
    with pytest.raises(RefusedError, match="the rebuild of totals-2 is open, and needs these markers"):
        rename(shop.outside, "totals", "sums")
    sums = named("sums", adding(Old))
    with pytest.raises(RefusedError, match="another rebuild of totals-2 is open, beside totals"):
        rebuild(shop.dispatcher(sums, building(shop.new(), beside="sums")), "totals-2", payments(3))
    in_use = shop.dispatcher(shop.old(), shop.new())
    assert rebuild(in_use, "totals-2", payments(3)).applied == 1  # for what is lacking, when building was taken away
    without = shop.dispatcher(sums, shop.new())
    with pytest.raises(RefusedError, match="has no projector totals"):
        lacking(without, "totals-2")
    former = projector(idempotent=True, name="totals-2", formerly=["totals-1"])(on("paid")(adding(New)))
    rebuild(shop.dispatcher(shop.old(), building(former, beside="totals")), "totals-2", payments(3))
    with pytest.raises(RefusedError, match="handlers that the dispatcher does not have any more: totals-1"):
        lacking(in_use, "totals-2")
    with pytest.raises(RefusedError, match="said in two ways, or is itself"):
        lacking(both, "totals-2", beside="totals-2")


@on_sqlite
def test_a_line_that_cannot_be_read_is_named_and_can_be_deleted(shop: Shop) -> None:
    """It was written by another version, or by hand."""
    both = shop.both()
    for value in ("not JSON", '{"opened": "2026-01-01T00:00:00+00:00", "beside": null, "later": 1}'):
        with shop.outside.begin() as connection:
            write_state(connection, default_tables, {"rebuild:totals-2": value})
        for call in (lambda: prune(shop.outside), lambda: rebuild(both, "totals-2", payments(1))):
            with pytest.raises(RefusedError, match="has a value that is no rebuild of this version"):
                call()
        assert end_rebuild(both, "totals-2")


# Which handlers are compared ----------------------------------------------------------------------------------------


def _handlers(name: str, *events: tuple[type | str, ...], subclasses: bool = False) -> Any:
    members = {
        f"h{number}": on(*some, subclasses=subclasses)(lambda _self, _event, _session: None)
        for number, some in enumerate(events)
    }
    return handlers_of(projector(idempotent=True, name=name)(type("P", (), members))())


def test_handlers_are_compared_by_their_events() -> None:
    """One that takes all events of an old handler must have all its messages; several that share them, each once."""

    def named_pairs(old: Any, new: Any) -> list[tuple[set[str], set[str]]]:
        return [(set(pair.old), set(pair.new)) for pair in pairs_of(old, new)]

    one, two = _handlers("o", ("A", "B")), _handlers("o", ("A",), ("B",))
    assert named_pairs(one, _handlers("n", ("A", "B", "C"))) == [({"o.h0"}, {"n.h0"})]
    assert named_pairs(one, _handlers("n", ("A",), ("B", "C"))) == [({"o.h0"}, {"n.h0", "n.h1"})]
    assert named_pairs(two, _handlers("n", ("A", "B"))) == [({"o.h0"}, {"n.h0"}), ({"o.h1"}, {"n.h0"})]
    assert named_pairs(two, _handlers("n", ("A",), ("A", "B"))) == [
        ({"o.h0"}, {"n.h0"}),
        ({"o.h0"}, {"n.h1"}),
        ({"o.h1"}, {"n.h1"}),
    ]
    assert named_pairs(_handlers("o", (int,)), _handlers("n", (object,), subclasses=True)) == [({"o.h0"}, {"n.h0"})]
    for old, new in (
        (one, _handlers("n", ("A",))),
        (one, _handlers("n", ("A",), ("A", "B"))),
        (two, _handlers("n", ("A",))),
        (_handlers("o", (int,), subclasses=True), _handlers("n", (int,))),
        (_handlers("o", (int,), subclasses=True), _handlers("n", (int,), subclasses=True) + _handlers("n2", (bool,))),
    ):
        with pytest.raises(RefusedError, match=r"a marker of o\.h\d does not tell"):
            pairs_of(old, new)
    shared = [replace(each, formerly=("o.both",)) for each in two]
    with pytest.raises(RefusedError, match=r"o\.h0 and o\.h1 share a former name"):
        pairs_of(shared, _handlers("n", ("A",), ("B",)))


@one_of_each
def test_former_names_and_names_that_begin_alike_are_told_apart(shop: Shop) -> None:
    """`totals` begins `totals-2`; and what was applied under a former name of the old one counts as applied by it."""
    messages = payments(6)
    former = named("sums", adding(Old))
    shop.deliver(shop.dispatcher(former), messages[:3])
    old = projector(idempotent=True, name="totals", formerly=["sums"])(on("paid")(adding(Old)))
    both = shop.dispatcher(old, building(shop.new(), beside="totals"))
    shop.deliver(both, messages[3:])
    found = lacking(both, "totals-2")
    assert (found.old, found.ids) == (6, ("p00000", "p00001", "p00002"))
    assert rebuild(both, "totals-2", messages).applied == 3
    assert lacking(both, "totals-2").number == 0
