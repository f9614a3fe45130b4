"""What clients do at the same time, and what must be true afterwards: deliver, prune, rename, forget, ask, arm.

A `Case` has the work of each client. A `Stage` runs it in one order, on a database and by one driver. Each run has a
`Round` of its own: messages, accounts and names that no other run uses. Message number k adds 10 ** k to the account
of its round, so the digits of the amount say how often each message was applied.

After each order a broker, which no scheduler holds, delivers every message once more. Then every digit is 1.
"""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Self

from sqlalchemy import Engine, create_engine, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

import command_rig
from algorithms import REQUEST, Clock, Faulty, Store
from command_rig import Placed, PlaceOrder, place
from databases import Database, Driver
from projector_dedup import AsyncDispatcher, BatchFailed, Dispatcher, Message, Outcome, on, projector
from projector_dedup.commands import AsyncCall, AsyncCommands, Call, Commands, command
from projector_dedup.effects import Attempt, arm, default_effect_tables, effect, stop
from projector_dedup.errors import ProjectorDedupError
from projector_dedup.maintenance.cleanup import prune
from projector_dedup.maintenance.rows import forget, rename
from rig import QUICK, Outside, Total
from scheduler import PATIENCE, Client, Order, Scheduler, Step, server_of

NAME = "added"
_ROUNDS = count(1)


class Round:
    """The names of one run, and what its clients were told."""

    def __init__(self) -> None:
        self.name = f"r{next(_ROUNDS)}"
        self.told: list[tuple[int, Outcome]] = []  # message, outcome
        self.answers: list[Any] = []  # to the one command of the round

    def message(self, number: int) -> Message:
        """Return a message; the digit of the account at its place counts how often it is applied."""
        return Message(f"{self.name}-{number}", {"account": self.name, "amount": 10**number}, type="added")

    def applied(self, number: int) -> int:
        """Return how many clients were told that they have applied the message."""
        return self.told.count((number, Outcome.APPLIED))


class Worker(Client):
    """A client with an engine, a dispatcher and commands, sync or async."""

    def __init__(self, number: int, driver: Driver, database: Database) -> None:
        self._url = database.url(driver.drivername)
        super().__init__(self._url)
        self.number, self.driver = number, driver
        self._warm: set[int] = set()  # the connections with which the last run began
        self._dispatchers: dict[tuple[Any, ...], Any] = {}

    def __enter__(self) -> Self:
        super().__enter__()
        self.call(self._open)
        return self

    def __exit__(self, *_: object) -> None:
        self.call(self._close)
        super().__exit__()

    def _open(self) -> None:
        self._runner = asyncio.Runner() if self.driver.is_async else None
        create: Callable[..., Any] = create_async_engine if self.driver.is_async else create_engine
        # Psycopg counts executions to decide what to prepare. No run may depend on the runs before it.
        arguments = {"prepare_threshold": 1_000_000} if self.driver.module == "psycopg" else {}
        self._engine: Engine | AsyncEngine = create(self.proxy.through(self._url), connect_args=arguments)
        event.listen(self.engine, "do_connect", lambda *_: self.refuse_if_killed())

    def _close(self) -> None:
        self.wait(self._engine.dispose())
        if self._runner:
            self._runner.close()

    @property
    def is_broker(self) -> bool:
        """True for the client that no scheduler holds."""
        return self.number < 0

    @property
    def engine(self) -> Engine:
        """The engine, or the one inside the AsyncEngine."""
        return self._engine.sync_engine if isinstance(self._engine, AsyncEngine) else self._engine

    @property
    def factory(self) -> Any:
        """Sessions on the engine."""
        return async_sessionmaker(self._engine) if isinstance(self._engine, AsyncEngine) else sessionmaker(self._engine)

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run a function in the thread of the client, without a schedule."""
        return self.thread.submit(function, *arguments).result(PATIENCE)

    def wait(self, result: Any) -> Any:
        """Return a result, or run the coroutine."""
        return self._runner.run(result) if self._runner else result

    @property
    def is_warm(self) -> bool:
        """True if the connections are those with which the last run began."""
        return bool(self._warm) and self._warm == self.proxy.sessions

    def renew(self, warm: Callable[[], object]) -> None:
        """Come to life, connect anew, and do some work to fill all caches."""
        self.proxy.trips.clear()
        self.proxy.is_dead = False
        self.wait(self._engine.dispose())
        warm()
        warm()  # by now everything is known, and a duplicate
        self._warm = {*self.proxy.sessions}

    # What it can do -------------------------------------------------------------------------------------------------

    def dispatcher(self, body: Callable[[Any, Session], None], name: str = NAME, formerly: tuple[str, ...] = ()) -> Any:
        """Return a dispatcher with one handler."""
        known = body, name, formerly
        if known not in self._dispatchers:
            self._dispatchers[known] = self._dispatcher(body, projector(idempotent=True, name=name, formerly=formerly))
        return self._dispatchers[known]

    def _dispatcher(self, body: Callable[[Any, Session], None], declared: Callable[..., Any]) -> Any:
        async def awaited(happened: Any, session: AsyncSession) -> None:
            await session.run_sync(lambda inner: body(happened, inner))

        if self._runner:
            return AsyncDispatcher(self.factory, declared(on("added")(awaited)), retry=QUICK)
        return Dispatcher(self.factory, declared(on("added")(body)), retry=QUICK)

    def deliver(
        self, at: Round, *numbers: int, body: Callable[[Any, Session], None] | None = None, **names: Any
    ) -> None:
        """Deliver messages one by one, and acknowledge each."""
        dispatcher = self.dispatcher(body or add, **names)
        for number in numbers:
            delivery = self.wait(dispatcher.deliver(at.message(number)))
            self.acknowledge(at, [(number, delivery.outcome)])

    def deliver_batch(self, at: Round, *numbers: int, body: Callable[[Any, Session], None] | None = None) -> None:
        """Deliver messages in one batch, and acknowledge all."""
        deliveries = self.wait(self.dispatcher(body or add).deliver_batch([at.message(number) for number in numbers]))
        self.acknowledge(at, [(number, each.outcome) for number, each in zip(numbers, deliveries, strict=True)])

    def acknowledge(self, at: Round, told: list[tuple[int, Outcome]]) -> None:
        """Note what the client was told, unless it is dead."""
        self.refuse_if_killed()
        at.told += told

    def ask(self, at: Round) -> None:
        """Ask for the command of the round, and note the answer."""

        async def awaited(order: PlaceOrder, call: AsyncCall) -> Placed:
            return await call.session.run_sync(lambda inner: place(order, Call(inner, call.key)))

        kind: Any = AsyncCommands if self._runner else Commands
        operation = command(name="place")(awaited if self._runner else place)
        handled = self.wait(
            kind(self.factory, retry=QUICK).handle(operation, PlaceOrder(customer=at.name), key=at.name)
        )
        self.refuse_if_killed()
        at.answers.append(handled.result)


def add(happened: Any, session: Session) -> None:
    """A handler of ordinary ORM code."""
    total = session.get(Total, happened["account"])
    if total is None:
        session.add(Total(account=happened["account"], amount=happened["amount"]))
    else:
        total.amount += happened["amount"]


def add_and_fail(happened: Any, session: Session) -> None:
    """A handler that writes, and fails."""
    add(happened, session)
    session.flush()
    raise ValueError("the handler fails")


def add_units(happened: Any, session: Session) -> None:
    """A handler that fails at an amount of more than 1."""
    (add if happened["amount"] == 1 else add_and_fail)(happened, session)


def add_and_arm(happened: Any, session: Session) -> None:
    """A handler that arms an effect too."""
    add(happened, session)
    arm(session, charge, happened["account"], key=happened["account"])


@effect(name="charge", lease=30, unknown=stop)
def charge(request: str, attempt: Attempt) -> str:
    """An effect that nobody sends here."""
    return f"{request} {attempt.key}"


# The work -----------------------------------------------------------------------------------------------------------

Work = Callable[[Round, Any], object]


def deliver(at: Round, worker: Worker) -> None:
    """Deliver the first message."""
    worker.deliver(at, 0)


def deliver_own(at: Round, worker: Worker) -> None:
    """Deliver a message that no other client delivers, on the same account."""
    worker.deliver(at, worker.number)


def fail_and_deliver(at: Round, worker: Worker) -> None:
    """Deliver the first message to a handler that writes and fails; then again, as a broker does, and it succeeds."""
    try:
        worker.deliver(at, 0, body=add_and_fail)
    except ValueError:
        worker.deliver(at, 0)


def deliver_failing_batch(at: Round, worker: Worker) -> None:
    """Deliver two messages in a batch whose second message fails; then each that was not applied."""
    try:
        worker.deliver_batch(at, 0, 1, body=add_units)
    except BatchFailed as failed:
        done = [(number, each.outcome) for number, each in enumerate(failed.deliveries) if each.error is None]
        worker.acknowledge(at, done)
        worker.deliver(at, *({0, 1} - dict(done).keys()))


def deliver_batch(at: Round, worker: Worker) -> None:
    """Deliver two messages in one batch."""
    worker.deliver_batch(at, 0, 1)


def deliver_batch_backwards(at: Round, worker: Worker) -> None:
    """Deliver them in the other order."""
    worker.deliver_batch(at, 1, 0)


def deliver_by_old_code(at: Round, worker: Worker) -> None:
    """Deliver the first message to the handler under its old name."""
    worker.deliver(at, 0, name="old")


def deliver_by_new_code(at: Round, worker: Worker) -> None:
    """Deliver it to the handler under its new name, which knows the old one."""
    worker.deliver(at, 0, name="new", formerly=("old",))


def deliver_young(at: Round, worker: Worker) -> None:
    """Deliver a message that was applied five hours ago, and one that is new."""
    worker.deliver(at, 1, 2)


def repeat_by_new_code(at: Round, worker: Worker) -> None:
    """Deliver a message that old code has applied, and one that nobody has."""
    worker.deliver(at, 0, 1, name=f"{at.name} new", formerly=(f"{at.name} old",))


def do_rename(at: Round, worker: Worker) -> None:
    """Rename the markers, and again until it has succeeded."""
    until_done(worker, partial(rename, worker.engine, f"{at.name} old", f"{at.name} new"))


def do_prune(_at: Round, worker: Worker) -> None:
    """Delete old markers, and again until it has succeeded."""
    until_done(worker, partial(prune, worker.engine, retry=QUICK))


def do_forget(at: Round, worker: Worker) -> None:
    """Forget the first message, and again until it has succeeded."""
    until_done(worker, partial(forget, worker.engine, at.message(0).id))


def until_done(worker: Worker, task: Callable[[], object]) -> None:
    """Run a task of maintenance; if its connection was lost, run it again, as an operator does."""
    try:
        task()
    except (DBAPIError, ProjectorDedupError, worker.engine.dialect.loaded_dbapi.Error):
        task()


def ask(at: Round, worker: Worker) -> None:
    """Ask for a command; all clients ask with the same key."""
    worker.ask(at)


def deliver_and_arm(at: Round, worker: Worker) -> None:
    """Deliver the first message to a handler that arms an effect."""
    worker.deliver(at, 0, body=add_and_arm)


class ScheduledStore(Store):
    """The second store of a published algorithm. A call is a round trip, and a killed client makes none."""

    def __init__(self, path: Path, worker: Worker) -> None:
        self._worker = worker
        self._path, self._clock = path, Clock()  # the table is there

    def _execute(self, sql: str, *values: object) -> list[Any]:
        self._worker.refuse_if_killed()
        try:
            self._worker.at_trip("before", [f"Query: {sql}"])
            found = super()._execute(sql, *values)
            self._worker.at_trip("after", [f"Query: {sql}"])
        finally:
            self._worker.refuse_if_killed()
        return found


def ask_of(algorithm: type[Faulty], path: Path) -> Work:
    """Return work that asks a published algorithm for a command. The broker asks once more after an error."""
    Store(path, Clock())

    def ask_it(at: Round, worker: Worker) -> None:
        handle = algorithm(worker.factory, ScheduledStore(path, worker)).handle
        try:
            answer = handle(place, PlaceOrder(customer=at.name), at.name, None)
        except Exception:
            if worker.is_broker:
                raise
        else:
            worker.refuse_if_killed()
            at.answers.append(answer)

    return ask_it


# What must be true --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Clients that work at the same time, the state in which they begin, and what must be true afterwards."""

    name: str
    work: tuple[Work, ...]
    prepare: Callable[["Stage", Round], object] = lambda _stage, _round: None
    check: Callable[["Stage", Round], object] = lambda stage, at: stage.check_counts(at)
    faults: int = 1  #: in one order, in the usual tests; `make explore` has one fault in each case
    surprises: int | None = 1  #: the usual tests leave out orders with more of them; None: none is left out
    is_slow: bool = False  #: True: a plain `make test` leaves it out
    is_sync: bool = False  #: True: the work is not written for asyncio


def with_row(stage: "Stage", at: Round) -> None:
    """The account is there."""
    stage.outside.execute(f"insert into total values ('{at.name}', 0)")


def with_customer(stage: "Stage", at: Round) -> None:
    """The customer of the command has money."""
    stage.outside.execute(f"insert into desk_balance values ('{at.name}', 1000)")


def applied(stage: "Stage", at: Round) -> None:
    """The first message was applied before."""
    stage.broker.call(stage.broker.deliver, at, 0)
    at.told.clear()


def applied_by_old_code(stage: "Stage", at: Round) -> None:
    """The first message was applied under the old name."""
    stage.broker.call(partial(stage.broker.deliver, at, 0, name=f"{at.name} old"))
    at.told.clear()


def applied_long_ago(stage: "Stage", at: Round) -> None:
    """The first message was applied a month ago, and the second one five hours ago, with a retention of seven days."""
    stage.broker.call(stage.broker.deliver, at, 0, 1)
    at.told.clear()
    for number, hours in enumerate((720, 5)):
        stage.outside.execute(
            f"update processed_message set processed_at = processed_at - interval '{hours}' hour "
            f"where message_id = '{at.message(number).id}'"
        )


def check_both_names(stage: "Stage", at: Round) -> None:
    """Old and new code have applied the message once between them."""
    stage.check_counts(at, name="new", formerly=("old",))


def check_renamed(stage: "Stage", at: Round) -> None:
    """When the rename has ended, code that knows the new name alone applies neither message again."""
    stage.broker.call(do_rename, at, stage.broker)
    stage.check_counts(at, 2, name=f"{at.name} new")


def check_pruned(stage: "Stage", at: Round) -> None:
    """The old marker is gone, the young one is not, and no message was applied again."""
    stage.broker.call(do_prune, at, stage.broker)
    markers = "select count(*) from processed_message where message_id"
    assert stage.outside.execute(f"{markers} = '{at.message(0).id}'") == [(0,)]
    assert stage.outside.execute(f"{markers} = '{at.message(1).id}'") == [(1,)]
    stage.broker.call(stage.broker.deliver, at, 1, 2)
    counts = stage.counts(at, 3)
    assert counts == [1, 1, 1], f"the messages count {counts}"


def check_forgotten(stage: "Stage", at: Round) -> None:
    """The message was applied once before, and once more if a client was told so, or was told nothing."""
    (times,) = stage.counts(at, 1)
    assert 1 + at.applied(0) <= times <= 2, f"applied {times} times, and {at.told} told"


def check_answers(stage: "Stage", at: Round) -> None:
    """Everybody who got an answer got the same, also who asks afterwards. The order was placed once."""
    stage.broker.call(stage.broker.ask, at)
    check_orders(stage, at)


def check_answers_of(work: Work) -> Callable[["Stage", Round], None]:
    """Return the same check for a published algorithm."""

    def check(stage: "Stage", at: Round) -> None:
        stage.broker.call(work, at, stage.broker)
        check_orders(stage, at)

    return check


def check_orders(stage: "Stage", at: Round) -> None:
    """All answers are one, and there is one order."""
    ((orders,),) = stage.outside.execute(f"select count(*) from desk_order where note = '{at.name}'")
    assert orders == 1, f"{orders} orders were placed for one key"
    assert len({*at.answers}) == 1, f"the answers differ: {at.answers}"


def check_armed(stage: "Stage", at: Round) -> None:
    """The effect is armed if, and only if, the message is applied."""
    query = f"select count(*) from external_effect where message_id = '0:{at.name}'"
    ((armed,),) = stage.outside.execute(query)
    assert [armed] == stage.counts(at, 1), "the effect is armed without the message, or the message without the effect"
    stage.check_counts(at, body=add_and_arm)


def more_tables(database: Database) -> None:
    """Create the tables that `rig.tables_on` does not."""
    engine = create_engine(database.url())
    for metadata in (default_effect_tables.marker.metadata, command_rig.Base.metadata, REQUEST.metadata):
        metadata.create_all(engine)
    engine.dispose()


class Stage:
    """A database with the tables of all cases, and as many clients as the largest case has."""

    def __init__(self, driver: Driver, outside: Outside, clients: int = 2) -> None:
        self.driver, self.outside = driver, outside
        self._open = contextlib.ExitStack()
        self._size = clients

    def __enter__(self) -> Self:
        database = self.outside.database
        self.workers = [self._open.enter_context(Worker(n, self.driver, database)) for n in range(self._size)]
        self.broker = self._open.enter_context(Worker(-1, self.driver, database))
        self._server = server_of(database)
        self._open.callback(self._server.close)
        self.scheduler = Scheduler(self.workers, self._server)
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def new_round(self, case: Case) -> Round:
        """Return the next round, prepared."""
        at = Round()
        case.prepare(self, at)
        return at

    def run(self, case: Case, order: Order = ()) -> list[Step]:
        """Run a case in one order, and check what must be true. Raises AssertionError if it is not."""
        warm = [
            worker.thread.submit(worker.renew, partial(work, self.new_round(case), worker))
            for worker, work in zip(self.workers, case.work, strict=True)
            if not worker.is_warm
        ]
        for each in warm:
            each.result(PATIENCE)
        at = self.new_round(case)
        work = {each: partial(each, at) for each in case.work}
        steps = self.scheduler.run(order, [work[each] for each in case.work], case.faults)
        for worker in self.workers:
            assert worker.error is None or worker.proxy.is_dead, f"client {worker.number}: {worker.error!r}"
        sessions = set().union(*(worker.proxy.sessions for worker in self.workers))
        assert not self._server.busy(sessions), "a client has ended, and its transaction is open"
        try:
            case.check(self, at)
        except AssertionError:
            raise
        except Exception as error:
            raise AssertionError(f"afterwards, without a rival: {error!r}") from error
        return steps

    def check_counts(self, at: Round, messages: int = 1, **handler: Any) -> None:
        """What was acknowledged counts once, nothing counts twice, and after a redelivery everything counts once."""
        counts = self.counts(at, messages)
        outcomes = ", ".join(f"{number} {outcome.value}" for number, outcome in at.told)
        told = f"told was: {outcomes or 'nothing'}; the messages count {counts}"
        for number, times in enumerate(counts):
            assert times == 1 or (times == 0 and number not in dict(at.told)), told
            assert at.applied(number) <= times, told
        self.broker.call(partial(self.broker.deliver, at, *range(messages), **handler))
        counts = self.counts(at, messages)
        assert counts == [1] * messages, f"after a redelivery the messages count {counts}"

    def counts(self, at: Round, messages: int) -> list[int]:
        """Return how often each message was applied."""
        rows = self.outside.execute(f"select amount from total where account = '{at.name}'")
        amount = sum(int(amount) for (amount,) in rows)
        assert amount < 10**messages, f"the account has {amount}"
        return [amount // 10**number % 10 for number in range(messages)]


CASES = {
    each.name: each
    for each in (
        Case("one message", (deliver, deliver), with_row, surprises=None, is_slow=True),
        Case("two messages, one row", (deliver_own, deliver_own), with_row, partial(Stage.check_counts, messages=2)),
        Case("two messages, a new row", (deliver_own, deliver_own), check=partial(Stage.check_counts, messages=2)),
        Case(
            "a handler that fails", (fail_and_deliver, deliver_own), with_row, partial(Stage.check_counts, messages=2)
        ),
        Case("a handler that fails, and a rival", (fail_and_deliver, deliver), with_row),
        Case("a batch that fails", (deliver_failing_batch, deliver), with_row, partial(Stage.check_counts, messages=2)),
        Case("a batch and a message", (deliver_batch, deliver), with_row, partial(Stage.check_counts, messages=2)),
        Case(
            "two batches", (deliver_batch, deliver_batch_backwards), with_row, partial(Stage.check_counts, messages=2)
        ),
        Case("old and new code", (deliver_by_old_code, deliver_by_new_code), with_row, check_both_names),
        Case(
            "rename",
            (do_rename, repeat_by_new_code),
            applied_by_old_code,
            check_renamed,
            faults=0,
            is_slow=True,
            is_sync=True,
        ),
        Case(
            "cleanup", (do_prune, deliver_young), applied_long_ago, check_pruned, faults=0, is_slow=True, is_sync=True
        ),
        Case("forget", (do_forget, deliver), applied, check_forgotten, is_sync=True),
        Case("a command", (ask, ask), with_customer, check_answers),
        Case("an effect", (deliver_and_arm, deliver_and_arm), with_row, check_armed),
        Case("one message, three times", (deliver, deliver, deliver), with_row),
        Case(
            "three messages, one row",
            (deliver_own,) * 3,
            with_row,
            partial(Stage.check_counts, messages=3),
        ),
        Case("a command, three times", (ask, ask, ask), with_customer, check_answers),
    )
}
