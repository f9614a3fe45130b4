"""Messages that meet on MariaDB: deadlocks and lock timeouts are routine there, and cost a retry, never a message."""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import event, func, select, text
from sqlalchemy.orm import Session

from databases import DRIVERS, Database, Driver
from projector_dedup import InProgress, Outcome, RetryPolicy
from projector_dedup.testing import contract
from projector_dedup.testing.kit import PATIENCE, Added, Broken, Gate, Harness, Total, add

MARIADB = [driver for driver in DRIVERS if driver.engine == "mariadb"]
ONE_OF_EACH_KIND = [driver for driver in MARIADB if driver.module in ("pymysql", "asyncmy")]
PATIENT = RetryPolicy(attempts=100, within=PATIENCE)

WAYS: dict[str, tuple[str | None, dict[str, Any]]] = {  # the dispatcher's isolation, what the projector declares
    "by default": (None, {}),
    "read_models": (None, {"read_models": [Total]}),
    "REPEATABLE READ": ("REPEATABLE READ", {}),
    "read_models at REPEATABLE READ": ("REPEATABLE READ", {"read_models": [Total]}),
    "read_models at READ COMMITTED": ("READ COMMITTED", {"read_models": [Total]}),
    "SERIALIZABLE": ("SERIALIZABLE", {}),
    "read_models at SERIALIZABLE": ("SERIALIZABLE", {"read_models": [Total]}),
}


class Seen:
    """The errors that the server sent, by number, and when each came."""

    def __init__(self, harness: Harness) -> None:
        self.numbers: Counter[int] = Counter()
        self._came = threading.Condition()
        event.listen(harness.engine, "handle_error", self._error)

    def _error(self, context: Any) -> None:
        with self._came:
            self.numbers[context.original_exception.args[0]] += 1
            self._came.notify_all()

    def wait_for(self, number: int) -> None:
        """Until there was one."""
        with self._came:
            assert self._came.wait_for(lambda: self.numbers[number], PATIENCE)


def harness_on(mariadb: Database, driver: Driver, isolation: str | None = None, **session: int) -> Harness:
    """The contract's tables through a driver, with session variables."""
    command = ", ".join(f"SESSION {name} = {value}" for name, value in session.items())
    arguments = {"connect_args": {"init_command": f"SET {command}"}} if session else {}
    url = mariadb.url(driver.drivername)
    return Harness(contract.Subject(url, dispatcher_isolation=isolation, engine_arguments=arguments))


@pytest.fixture(name="harness", params=ONE_OF_EACH_KIND, ids=str)
def harness_fixture(request: pytest.FixtureRequest, mariadb: Database) -> Iterator[Harness]:
    """One synchronous driver, one asynchronous."""
    with harness_on(mariadb, request.param) as harness:
        harness.create_tables()
        yield harness


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("driver", ONE_OF_EACH_KIND, ids=str)
def test_the_rollback_storm(mariadb: Database, driver: Driver, way: str) -> None:
    """When the winner rolls back, several of those who wait get a deadlock (1213): one applies, the rest skip."""
    isolation, settings = WAYS[way]
    rivals = 6
    with harness_on(mariadb, driver, isolation) as harness:
        harness.create_tables()
        seen, gate, runs = Seen(harness), Gate(harness), []

        def body(happened: Added, session: Session) -> None:
            runs.append(happened)
            add(happened, session)
            session.flush()
            if len(runs) == 1:
                gate.stop()
                raise Broken

        dispatcher = harness.dispatcher(harness.handler(body, **settings), retry=PATIENT)
        winner = harness.start(harness.deliver, dispatcher)
        gate.arrival()
        losers = [harness.start(harness.deliver, dispatcher) for _ in range(rivals)]
        harness.waits(rivals)
        gate.open()
        assert isinstance(winner.exception(), Broken)
        outcomes = Counter(loser.result().outcome for loser in losers)
        assert outcomes == {Outcome.APPLIED: 1, Outcome.DUPLICATE: rivals - 1}
        assert (harness.totals(), harness.markers()) == ({"a": 1}, [("m1", "totals")])
        assert seen.numbers[1213] > 0, "this was no storm"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("driver", ONE_OF_EACH_KIND, ids=str)
def test_neighbouring_rows_are_both_created(mariadb: Database, driver: Driver, way: str) -> None:
    """Both messages look for a row that is not there, in one gap, before either inserts; both count."""
    isolation, settings = WAYS[way]
    with harness_on(mariadb, driver, isolation) as harness:
        harness.create_tables()
        harness.transact(lambda session: session.add_all([Total(key="a", amount=0), Total(key="z", amount=0)]))
        gate = Gate(harness)

        def body(happened: Added, session: Session) -> None:
            assert session.get(Total, happened.keys[0]) is None
            gate.stop()
            session.add(Total(key=happened.keys[0], amount=happened.amount))

        dispatcher = harness.dispatcher(harness.handler(body, **settings), retry=PATIENT)
        keys = ("m1", "m2", "m3")
        deliveries = []
        for key in keys:
            deliveries.append(delivery := harness.start(harness.deliver, dispatcher, Added((key,)), key))
            gate.arrival(delivery.done)
        gate.open()
        assert [delivery.result().outcome for delivery in deliveries] == [Outcome.APPLIED] * len(keys)
        assert harness.totals() == {"a": 0, "z": 0, "m1": 1, "m2": 1, "m3": 1}
        assert harness.markers() == [(key, "totals") for key in keys]


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("driver", MARIADB, ids=str)
def test_the_servers_own_lock_timeout_is_no_duplicate(mariadb: Database, driver: Driver, fails: bool) -> None:
    """1205 on a claim, after `innodb_lock_wait_timeout`, is retried until the winner's end says what is true."""
    with harness_on(mariadb, driver, innodb_lock_wait_timeout=1) as harness:
        harness.create_tables()
        seen, gate = Seen(harness), Gate(harness)

        def body(happened: Added, session: Session) -> None:
            add(happened, session)
            session.flush()
            gate.stop()
            if fails and not seen.numbers[-1]:
                seen.numbers[-1] += 1
                raise Broken

        dispatcher = harness.dispatcher(harness.handler(body), retry=PATIENT)
        winner = harness.start(harness.deliver, dispatcher)
        gate.arrival()
        loser = harness.start(harness.deliver, dispatcher)
        seen.wait_for(1205)
        gate.open()
        assert isinstance(winner.exception(), Broken) is fails
        assert loser.result().outcome is (Outcome.APPLIED if fails else Outcome.DUPLICATE)
        assert (harness.totals(), harness.markers()) == ({"a": 1}, [("m1", "totals")])


@pytest.mark.parametrize("bound", [0.25, 2.5])
@pytest.mark.parametrize("driver", MARIADB, ids=str)
def test_claim_timeout_is_precise(mariadb: Database, driver: Driver, bound: float) -> None:
    """It is ended by its own bound (1969), which knows milliseconds; the server's own for locks is 1 s here (1205)."""
    with harness_on(mariadb, driver, innodb_lock_wait_timeout=1) as harness:
        harness.create_tables()
        gate = Gate(harness)

        def body(happened: Added, session: Session) -> None:
            add(happened, session)
            gate.stop()

        handler = harness.handler(body)
        winner = harness.start(harness.deliver, harness.dispatcher(handler))
        gate.arrival()
        hasty = harness.dispatcher(handler, claim_timeout=bound)
        began = time.monotonic()
        with pytest.raises(InProgress, match=f"{bound} s") as refused:
            harness.deliver(hasty)
        assert time.monotonic() - began >= bound
        cause: Any = refused.value.__cause__
        assert cause.orig.args[0] == 1969
        gate.open()
        assert winner.result().outcome is Outcome.APPLIED
        assert harness.deliver(hasty).outcome is Outcome.DUPLICATE


def test_claim_timeout_ends_with_the_claim(harness: Harness) -> None:
    """What the handler runs may take longer, and the session's variables are as they were."""
    variables = "select @@max_statement_time, @@innodb_lock_wait_timeout"
    before = harness.transact(lambda session: tuple(session.execute(text(variables)).one()))
    found: list[Any] = []

    def body(happened: Added, session: Session) -> None:
        found.append(tuple(session.execute(text(variables)).one()))
        found.append(session.scalar(select(func.sleep(0.3))))
        add(happened, session)

    dispatcher = harness.dispatcher(harness.handler(body), claim_timeout=0.1)
    assert harness.deliver(dispatcher).outcome is Outcome.APPLIED
    assert found == [before, 0]


def test_the_handlers_own_locks_wait_as_long_as_the_server_does(harness: Harness) -> None:
    """A row that somebody holds for longer than `claim_timeout` is waited for: the bound is the claim's alone."""
    harness.transact(lambda session: session.add(Total(key="a", amount=5)))
    gate = Gate(harness)

    def hold(session: Session) -> None:
        session.get(Total, "a", with_for_update=True)
        gate.stop()

    holder = harness.start(harness.transact, hold)
    gate.arrival()
    dispatcher = harness.dispatcher(harness.handler(read_models=[Total]), claim_timeout=0.1)
    delivery = harness.start(harness.deliver, dispatcher)
    harness.waits()
    time.sleep(0.3)  # not to win a race: for the bound to pass
    assert not delivery.done()
    gate.open()
    holder.result()
    assert delivery.result().outcome is Outcome.APPLIED
    assert harness.totals() == {"a": 6}
