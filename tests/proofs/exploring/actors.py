"""What clients do at the same time, and what must be true afterwards: deliver, prune, rename, forget.

asking.py has the cases of commands and effects. A `Case` has the work of each client. A `Stage` runs it in one order,
on a database and by one driver. Each run has a `Round` of its own: messages, accounts and names that no other run uses.
Message number k adds 10 ** k to the account of its round, so the digits of the amount say how often each message was
applied.

After each order a broker, which no scheduler holds, delivers every message once more. Then every digit is 1.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Self

from sqlalchemy import Engine, create_engine, event, func, select, text, update
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

import command_rig
from algorithms import REQUEST
from command_rig import Placed, PlaceOrder, place
from databases import Database, Driver
from fault_points import add
from projector_dedup import AsyncDispatcher, Dispatcher, Message, Outcome, on, projector
from projector_dedup.commands import AsyncCall, AsyncCommands, Call, Commands, command
from projector_dedup.effects import default_effect_tables
from projector_dedup.errors import BatchFailed, DeliveryFailed, ProjectorDedupError
from projector_dedup.maintenance.cleanup import prune
from projector_dedup.maintenance.rows import forget, rename
from projector_dedup.observer import Observation
from rig import QUICK, Outside, Total
from scheduler import PATIENCE, Client, Order, Scheduler, Step, server_of

NAME = "added"
_ROUNDS = count(1)
Body = Callable[[Any, Session], None]  # of a handler


class Round:
    """The names of one run, and what its clients were told."""

    def __init__(self) -> None:
        self.name = f"r{next(_ROUNDS)}"
        self.told: list[tuple[int, Outcome]] = []  # message, outcome
        self.failed: list[Outcome] = []  # of deliveries that raised an error
        self.answers: list[tuple[str, Any]] = []  # command, answer
        self.deeds: list[str] = []  # what a provider outside has done: the key of each
        self.returned: list[tuple[int, str]] = []  # client, answer of the provider
        self.before: set[int] = set()  # messages that were applied before

    def message(self, number: int) -> Message:
        """Return a message; the digit of the account at its place counts how often it is applied.

        The ids look alike: they differ in the case of a letter, or in a space at their end.
        """
        message_id = f"{self.name}{'-A' if number % 2 else '-a'}{' ' * (number // 2)}"
        return Message(message_id, {"account": self.name, "amount": 10**number}, type="added")

    def applied(self, number: int) -> int:
        """Return how many clients were told that they have applied the message."""
        return self.told.count((number, Outcome.APPLIED))


class Listening(Session):
    """A session with a listener that fails after each COMMIT, when everything is durable."""


@event.listens_for(Listening, "after_commit")
def _fail(_: Session) -> None:
    raise RuntimeError("the listener fails")


class Worker(Client):
    """A client with an engine, a dispatcher and commands, sync or async."""

    def __init__(self, number: int, driver: Driver, database: Database) -> None:
        self._url = database.url(driver.drivername)
        super().__init__(self._url)
        self.number, self.driver = number, driver
        self._warm: set[int] = set()  # the connections with which the last run began
        self._dispatchers: dict[tuple[Any, ...], Any] = {}
        self.handed: Counter[object] = Counter()  # how often a handler was given a message, by its id
        self.observations: list[Observation] = []

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
        return self._factory(Session)

    def _factory(self, kind: type[Session]) -> Any:
        if isinstance(self._engine, AsyncEngine):
            return async_sessionmaker(self._engine, sync_session_class=kind)
        return sessionmaker(self._engine, class_=kind)

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

    def borrowed(self) -> int:
        """Return how many connections are out of the pool."""
        pool: Any = self.engine.pool
        return int(pool.checkedout())

    def renew(self, warm: Callable[[], object]) -> None:
        """Come to life, connect anew, and do some work to fill all caches."""
        self.proxy.trips.clear()
        self.proxy.is_dead = False
        self.wait(self._engine.dispose())
        warm()
        warm()  # by now everything is known, and a duplicate
        self._warm = {*self.proxy.sessions}

    @contextlib.contextmanager
    def calling(self, statement: str) -> Iterator[None]:
        """Make a call outside the database a round trip; a killed client makes none. Raises EOFError if it is cut."""
        self.refuse_if_killed()
        try:
            self.at_trip("before", [f"Query: {statement}"])
            yield
            self.at_trip("after", [f"Query: {statement}"])
        finally:
            self.refuse_if_killed()

    # What it can do -------------------------------------------------------------------------------------------------

    def observed(self, observation: Observation) -> None:
        """Note what an observer is told, and fail: that must hurt no delivery."""
        self.observations.append(observation)
        if observation.kind == "message":
            raise RuntimeError("the observer fails")

    def check_observations(self, at: Round) -> None:
        """An observer is told once how each delivery has ended, and never that an old message is applied now."""
        messages = [each for each in self.observations if each.kind == "message" and each.outcome != "retried"]
        ended = Counter(each.message_id for each in messages)
        assert self.proxy.is_dead or ended == self.handed, f"observed were {ended}, and {self.handed} delivered"
        now = [each for each in messages if each.outcome == "applied" or each.after_unknown_commit]
        old = {at.message(number).id for number in at.before}
        assert not old & {each.message_id for each in now}, "an old message is said to be applied now"

    def dispatcher(
        self, body: Body, beside: Body | None, name: str = NAME, *, listens: bool = False, **declared: Any
    ) -> Any:
        """Return a dispatcher with one handler, or with another one behind it, and perhaps with a listener."""
        known = body, beside, name, listens, *((key, str(value)) for key, value in declared.items())
        if known not in self._dispatchers:
            handlers = [self._handler(body, name=name, **declared)]
            handlers += [self._handler(beside, name="beside")] if beside else []
            kind: Any = AsyncDispatcher if self._runner else Dispatcher
            factory = self._factory(Listening if listens else Session)
            self._dispatchers[known] = kind(factory, *handlers, retry=QUICK, observer=self)
        return self._dispatchers[known]

    def _handler(self, body: Body, **declared: Any) -> Any:
        async def awaited(happened: Any, session: AsyncSession) -> None:
            await session.run_sync(lambda inner: body(happened, inner))

        return projector(idempotent=True, **declared)(on("added")(awaited if self._runner else body))

    def deliver(
        self, at: Round, *numbers: int, body: Body | None = None, beside: Body | None = None, **declared: Any
    ) -> None:
        """Deliver messages one by one, and acknowledge each."""
        dispatcher = self.dispatcher(body or add, beside, **declared)
        for number in numbers:
            self.handed[at.message(number).id] += 2 if beside else 1
            delivery = self.wait(dispatcher.deliver(at.message(number)))
            self.acknowledge(at, [(number, delivery.outcome)])

    def deliver_batch(self, at: Round, *numbers: int, body: Body | None = None, **declared: Any) -> None:
        """Deliver messages in one batch, and acknowledge all."""
        messages = [at.message(number) for number in numbers]
        self.handed.update(message.id for message in messages)
        deliveries = self.wait(self.dispatcher(body or add, None, **declared).deliver_batch(messages))
        self.acknowledge(at, [(number, each.outcome) for number, each in zip(numbers, deliveries, strict=True)])

    def acknowledge(self, at: Round, told: list[tuple[int, Outcome]]) -> None:
        """Note what the client was told, unless it is dead."""
        self.refuse_if_killed()
        at.told += told

    def ask(
        self, at: Round, order: PlaceOrder, *, key: str | None = None, scope: str | None = None,
        body: Callable[[PlaceOrder, Call], Placed] = place, name: str = "place", told: str = "", **settings: Any,
    ) -> None:  # fmt: skip
        """Ask for a command, and note the answer under `told`, or the note of the order."""

        async def awaited(order: PlaceOrder, call: AsyncCall) -> Placed:
            return await call.session.run_sync(lambda inner: body(order, Call(inner, call.key)))

        kind: Any = AsyncCommands if self._runner else Commands
        operation = command(name=name, **settings)(awaited if self._runner else body)
        commands = kind(self.factory, retry=QUICK, observer=self)
        handled = self.wait(commands.handle(operation, order, key=key or at.name, scope=scope))
        self.refuse_if_killed()
        at.answers.append((told or order.note, handled.rejection or handled.value))


def add_and_fail(happened: Any, session: Session) -> None:
    """A handler that writes, and fails."""
    add(happened, session)
    session.flush()
    raise ValueError("the handler fails")


def add_units(happened: Any, session: Session) -> None:
    """A handler that fails at an amount of more than 1."""
    (add if happened["amount"] == 1 else add_and_fail)(happened, session)


def add_by_statements(happened: Any, session: Session) -> None:
    """A handler that adds to the account by SQL if the message is an odd one, and by the ORM if not."""
    if len(str(happened["amount"])) % 2:
        add(happened, session)
    else:
        added = text("update total set amount = amount + :amount where account = :account")
        session.connection().execute(added, happened)  # without autoflush


def add_or_explain(happened: Any, session: Session) -> None:
    """A handler that raises an error of its own where the database raises one."""
    try:
        add(happened, session)
        session.flush()
    except DBAPIError as error:
        raise RuntimeError("the account cannot be changed") from error


def add_to_two(happened: Any, session: Session) -> None:
    """A handler that adds to the account, and to a second one, which it changes again after it has created it."""
    add(happened, session)
    second = session.get(Total, f"{happened['account']}+")
    if second is None:
        second = Total(account=f"{happened['account']}+", amount=0)
        session.add(second)
        session.flush()
    second.amount += happened["amount"]


def insert_or_update(happened: Any, session: Session) -> None:
    """A handler that inserts the account in a savepoint, and lets the database add if the account is there."""
    try:
        with session.begin_nested():
            session.add(Total(account=happened["account"], amount=happened["amount"]))
    except IntegrityError:
        _add_in_database(happened, session)


def skip_bad_lines(happened: Any, session: Session) -> None:
    """A handler that adds in a savepoint, and goes on if the database refuses it."""
    with contextlib.suppress(DBAPIError), session.begin_nested():
        _add_in_database(happened, session)


def _add_in_database(happened: Any, session: Session) -> None:
    account, more = happened["account"], happened["amount"]
    session.execute(update(Total).where(Total.account == account).values(amount=Total.amount + more))


def append_line(happened: Any, session: Session) -> None:
    """A handler that locks the account, reads the last line of its ledger and inserts the next."""
    account, more = happened["account"], happened["amount"]
    session.get_one(Total, account, with_for_update=True)
    lines = select(func.coalesce(func.max(Total.amount), 0)).where(Total.account.like(f"{account}|%"))
    session.add(Total(account=f"{account}|{more}", amount=session.scalars(lines).one() + more))


def change_the_event(happened: Any, session: Session) -> None:
    """A handler that changes its event, and adds what it was."""
    happened["amount"] *= 2
    add(happened | {"amount": happened["amount"] // 2}, session)


def add_beside(happened: Any, session: Session) -> None:
    """A handler that adds to the second account of the round."""
    add(happened | {"account": f"{happened['account']}+"}, session)


NEW: dict[str, Any] = {"name": "new", "formerly": ("old",)}
LOCKED: dict[str, Any] = {"body": add_to_two, "read_models": (Total,)}

# The work -----------------------------------------------------------------------------------------------------------

Work = Callable[[Round, Any], object]


def delivering(*numbers: int, **declared: Any) -> Work:
    """Return work that delivers these messages to a handler that is declared so."""

    def work(at: Round, worker: Worker) -> None:
        worker.deliver(at, *numbers, **declared)

    return work


def delivering_own(body: Body, **declared: Any) -> Work:
    """Return work that delivers a message that no other client delivers, on the same account."""

    def work(at: Round, worker: Worker) -> None:
        worker.deliver(at, worker.number, body=body, **declared)

    return work


def delivering_batch(*numbers: int, **declared: Any) -> Work:
    """Return work that delivers these messages in one batch."""

    def work(at: Round, worker: Worker) -> None:
        worker.deliver_batch(at, *numbers, body=add_by_statements, **declared)

    return work


deliver = delivering(0)
deliver_by_old_code = delivering(0, name="old")
deliver_by_new_code = delivering(0, **NEW)
deliver_with_listener = delivering(0, listens=True)
deliver_young = delivering(1, 2)  # the first was applied five hours ago, and the second is new
deliver_own = delivering_own(add)
deliver_or_explain = delivering_own(add_or_explain)
deliver_locked = delivering_own(**LOCKED)
deliver_batch = delivering_batch(0, 1, 2)
deliver_batch_backwards = delivering_batch(2, 1, 0)
deliver_batch_by_new_code = delivering_batch(0, 1, 2, 3, **NEW)  # old code has applied the last


def fail_and_deliver(at: Round, worker: Worker) -> None:
    """Deliver the first message to a handler that writes and fails; then again, as a broker does, and it succeeds."""
    try:
        worker.deliver(at, 0, body=add_and_fail)
    except ValueError:
        worker.deliver(at, 0)


def fail_beside_another(at: Round, worker: Worker) -> None:
    """Deliver the first message to a handler that always fails, and to one behind it, which does not."""
    try:
        worker.deliver(at, 0, body=add_and_fail, beside=add)
    except DeliveryFailed as failed:
        at.failed.append(failed.delivery.outcome)


def deliver_failing_batch(at: Round, worker: Worker) -> None:
    """Deliver two messages in a batch whose second message fails; then each that was not applied."""
    try:
        worker.deliver_batch(at, 0, 1, body=add_units)
    except BatchFailed as failed:
        done = [(number, each.outcome) for number, each in enumerate(failed.deliveries) if each.error is None]
        worker.acknowledge(at, done)
        worker.deliver(at, *({0, 1} - dict(done).keys()))


def deliver_by_both(at: Round, worker: Worker) -> None:
    """Deliver a new message by old code, and by new code one that old code has applied."""
    worker.deliver(at, 2, name=f"{at.name} old")
    worker.deliver(at, 0, name=f"{at.name} new", formerly=(f"{at.name} old",))


def do_rename(at: Round, worker: Worker) -> None:
    """Rename the markers, two in each transaction, and again until it has succeeded."""
    names = f"{at.name} old", f"{at.name} new"
    until_done(worker, partial(rename, worker.engine, *names, batch_size=2, remove_old=True))


def do_prune(_at: Round, worker: Worker) -> None:
    """Delete old markers, and again until it has succeeded."""
    until_done(worker, partial(prune, worker.engine, retry=QUICK))


def do_forget(at: Round, worker: Worker) -> None:
    """Forget that one of two handlers has applied the first message, and again until it has succeeded."""
    until_done(worker, partial(forget, worker.engine, at.message(0).id, handler=NAME))


def deliver_to_two(at: Round, worker: Worker) -> None:
    """Deliver the first message to two handlers."""
    worker.deliver(at, 0, beside=add_beside)


def until_done(worker: Worker, task: Callable[[], object]) -> None:
    """Run a task of maintenance; if its connection was lost, run it again, as an operator does."""
    try:
        task()
    except (DBAPIError, ProjectorDedupError, worker.engine.dialect.loaded_dbapi.Error):
        task()


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
    is_long: bool = False  #: True: only `make nightly` and `make explore` run it
    is_sync: bool = False  #: True: the work is not written for asyncio


def with_row(stage: "Stage", at: Round) -> None:
    """The account is there."""
    stage.outside.execute(f"insert into total values ('{at.name}', 0)")


def applied(stage: "Stage", at: Round) -> None:
    """Two handlers have applied the first message before."""
    stage.broker.call(deliver_to_two, at, stage.broker)
    at.told.clear()


def applied_by_old_code(stage: "Stage", at: Round) -> None:
    """Old code has applied two messages, the second one first, a month ago."""
    stage.broker.call(partial(stage.broker.deliver, at, 1, 0, name=f"{at.name} old"))
    at.told.clear()
    make_older(stage, at, 0, 720)
    make_older(stage, at, 1, 720)


def last_applied_by_old_code(stage: "Stage", at: Round) -> None:
    """The account is there, and old code has applied the last message of the batch."""
    with_row(stage, at)
    stage.broker.call(partial(stage.broker.deliver, at, 3, name="old"))
    at.told.clear()
    at.before = {3}


def applied_long_ago(stage: "Stage", at: Round) -> None:
    """The first message was applied a month ago, and the second one five hours ago, with a retention of seven days."""
    stage.broker.call(stage.broker.deliver, at, 0, 1)
    at.told.clear()
    make_older(stage, at, 0, 720)
    make_older(stage, at, 1, 5)


def make_older(stage: "Stage", at: Round, number: int, hours: int) -> None:
    """Put the time back at which a message was applied."""
    stage.outside.execute(
        f"update processed_message set processed_at = processed_at - interval '{hours}' hour "
        f"where message_id = '{at.message(number).id}'"
    )


def check_locked(stage: "Stage", at: Round) -> None:
    """Each message counts once, on each of two accounts."""
    stage.check_counts(at, 2, **LOCKED)
    assert stage.counts(at, 2, "+") == [1, 1], "the second account differs"


def check_beside(stage: "Stage", at: Round) -> None:
    """Each delivery has failed, and the second handler has applied the message once."""
    assert not at.told, "a message is acknowledged although a handler has failed"
    assert {*at.failed} <= {Outcome.FAILED}, f"told were {at.failed}, and one handler fails"
    assert stage.counts(at, 1) == [1] or not at.failed, "a handler was not called, because another one had failed"
    stage.broker.call(fail_beside_another, at, stage.broker)
    assert stage.counts(at, 1) == [1]


def check_renamed(stage: "Stage", at: Round) -> None:
    """When the rename has ended, code that knows the new name alone applies no message again, and times are kept."""
    stage.broker.call(do_rename, at, stage.broker)
    young = "processed_at > current_timestamp - interval '1' hour"
    markers = f"select count(*) from processed_message where {young} and handler = '{at.name} new' and message_id"
    for number in (0, 1):
        assert stage.outside.execute(f"{markers} = '{at.message(number).id}'") == [(0,)], "a marker is too young"
    stage.check_counts(at, 3, name=f"{at.name} new")


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
    assert stage.counts(at, 1, "+") == [1], "the other handler has applied it again"


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
            each.exception(PATIENCE)  # a failure is for the order to find, which can be pasted
        at = self.new_round(case)
        for worker in self.workers:
            worker.observations.clear()
            worker.handed.clear()
        work = {each: partial(each, at) for each in case.work}
        steps = self.scheduler.run(order, [work[each] for each in case.work], case.faults)
        for worker in self.workers:
            assert worker.error is None or worker.proxy.is_dead, f"client {worker.number}: {worker.error!r}"
        for worker in self.workers:
            worker.check_observations(at)
            # SQLAlchemy's pool forgets a connection to MariaDB that is lost while maintenance's level is reset.
            if not (worker.proxy.is_dead or (case.is_sync and self.driver.module in ("pymysql", "MySQLdb"))):
                assert not worker.borrowed(), f"client {worker.number} has not returned a connection"
        sessions = set().union(*(worker.proxy.sessions for worker in self.workers))
        assert not self._server.busy(sessions), "a client has ended, and its transaction is open"
        try:
            case.check(self, at)
        except AssertionError:
            raise
        except Exception as error:
            raise AssertionError(f"afterwards, without a rival: {error!r}") from error
        return steps

    def check_counts(self, at: Round, messages: int = 1, account: str = "", **handler: Any) -> None:
        """What was acknowledged counts once, nothing counts twice, and after a redelivery everything counts once."""
        counts = self.counts(at, messages, account)
        outcomes = ", ".join(f"{number} {outcome.value}" for number, outcome in at.told)
        told = f"told was: {outcomes or 'nothing'}; the messages count {counts}"
        for number, times in enumerate(counts):
            assert times == 1 or (times == 0 and number not in dict(at.told)), told
            assert at.applied(number) <= times - (number in at.before), told
        self.broker.call(partial(self.broker.deliver, at, *range(messages), **handler))
        counts = self.counts(at, messages, account)
        assert counts == [1] * messages, f"after a redelivery the messages count {counts}"

    def counts(self, at: Round, messages: int, account: str = "") -> list[int]:
        """Return how often each message was applied, on the account of the round or another one.

        Of several accounts that fit a pattern, the highest amount counts: that of the last line of a ledger.
        """
        rows = self.outside.execute(f"select max(amount) from total where account like '{at.name}{account}'")
        amount = sum(int(amount or 0) for (amount,) in rows)
        assert amount < 10**messages, f"the account has {amount}"
        return [amount // 10**number % 10 for number in range(messages)]


def two_messages(
    name: str, body: Body, prepare: Callable[[Stage, Round], object] = with_row, account: str = ""
) -> Case:
    """Two messages for one account, to a handler that is right in a session of its own."""
    work = delivering_own(body)
    return Case(name, (work, work), prepare, partial(Stage.check_counts, messages=2, account=account, body=body))


CASES = {
    each.name: each
    for each in (
        Case("one message", (deliver, deliver), with_row, surprises=None, is_long=True),
        Case("two messages, one row", (deliver_own, deliver_own), with_row, partial(Stage.check_counts, messages=2)),
        Case("two messages, a new row", (deliver_own, deliver_own), check=partial(Stage.check_counts, messages=2)),
        Case(
            "a handler that fails", (fail_and_deliver, deliver_own), with_row, partial(Stage.check_counts, messages=2)
        ),
        Case("a handler that fails, and a rival", (fail_and_deliver, deliver), with_row),
        Case(
            "a batch that fails",
            (deliver_failing_batch, deliver),
            with_row,
            partial(Stage.check_counts, messages=2),
            is_long=True,
        ),
        Case(
            "a batch and a message",
            (deliver_batch_by_new_code, deliver_by_old_code),
            last_applied_by_old_code,
            partial(Stage.check_counts, messages=4, **NEW),
        ),
        Case(
            "two batches", (deliver_batch, deliver_batch_backwards), with_row, partial(Stage.check_counts, messages=3)
        ),
        Case("two messages, locked rows", (deliver_locked, deliver_locked), with_row, check_locked),
        Case("two handlers, one fails", (fail_beside_another, fail_beside_another), with_row, check_beside),
        Case(
            "old and new code", (deliver_by_old_code, deliver_by_new_code), with_row, partial(Stage.check_counts, **NEW)
        ),
        Case(
            "rename",
            (do_rename, deliver_by_both),
            applied_by_old_code,
            check_renamed,
            faults=0,
            is_long=True,
            is_sync=True,
        ),
        Case(
            "cleanup", (do_prune, deliver_young), applied_long_ago, check_pruned, faults=0, is_long=True, is_sync=True
        ),
        Case("forget", (do_forget, deliver_to_two), applied, check_forgotten, is_sync=True, is_long=True),
        two_messages("insert or update, a new row", insert_or_update, lambda _stage, _round: None),
        two_messages("bad lines are skipped", skip_bad_lines),
        two_messages("a ledger under a lock", append_line, account="|%"),
        two_messages("an event that is changed", change_the_event),
        Case("one message, three times", (deliver_with_listener,) * 3, with_row),
        Case(
            "three messages, one row",
            (deliver_or_explain,) * 3,
            with_row,
            partial(Stage.check_counts, messages=3),
        ),
    )
}
