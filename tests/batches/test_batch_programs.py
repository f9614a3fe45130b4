"""Whatever handlers do with their session, a batch leaves what its messages leave one by one: programs by lot."""

from dataclasses import dataclass
from typing import Any

import pytest
from sqlalchemy.orm import Session

import programs
from databases import USUAL_DRIVERS, Driver
from projector_dedup import BatchFailed, Message, Outcome, RetryPolicy
from projector_dedup.read_models import Reads
from projector_dedup.testing.kit import Added, Harness
from reach import reach

pytestmark = pytest.mark.filterwarnings("ignore")  # programs do what SQLAlchemy warns of
slow = pytest.mark.slow


@dataclass(frozen=True)
class Way:
    """How a program is delivered: together or one by one, and what is declared of the rows that it asks for."""

    name: str
    reads: Reads | None = None
    together: bool = False
    shared: bool = False


def _rows(event: Added) -> list[int]:
    return [int(key) for key in dict.fromkeys(event.keys)][:3]


def _others(event: Added) -> list[int]:
    return [row + 1 for row in _rows(event)]


def _absent(event: Added) -> list[int]:
    return [row + 1000 for row in _rows(event)]


RIGHT: Reads = {programs.Plain: _rows, programs.Simple: _rows}
WRONG: Reads = {programs.Plain: _others, programs.Rich: _rows, programs.Simple: _absent}
PLAINLY = Way("one by one")
WAYS = (
    Way("one by one, declared", RIGHT),
    Way("one by one, declared wrongly", WRONG),
    Way("together", together=True),
    Way("together, declared", RIGHT, together=True),
    Way("together, declared wrongly", WRONG, together=True),
)
SHARED = (
    Way("together, shared", together=True, shared=True),
    Way("together, shared, declared", RIGHT, together=True, shared=True),
)


def check(harness: Harness, name: str, program: programs.Program, ways: tuple[Way, ...]) -> None:
    """Outcomes, what those that were applied saw, and the database must be the same in all ways."""
    plainly = run(harness, name, program, PLAINLY)
    ordered = any(step.__name__ in programs.ORDERED for message in program for step, _, _ in message)
    for way in ways:
        if ordered and way.reads is not None:
            continue  # a `get` of a declared row does not flush (docs/handlers.md)
        assert run(harness, name, program, way) == plainly, f"program {name}, {way.name}"


def run(harness: Harness, name: str, program: programs.Program, way: Way) -> tuple[Any, ...]:
    """Deliver a program in one way."""
    seen: dict[int, list[Any]] = {}
    programs.HELD.clear()
    harness.transact(programs.reset)

    def body(event: Added, session: Session) -> None:
        programs.REACHED.clear()
        seen[event.amount] = []
        for step, ident, argument in program[event.amount]:
            step(session, ident, argument, seen[event.amount])

    handler = harness.handler(body, "program", reads=way.reads, shared_session=way.shared)
    dispatcher = harness.dispatcher(handler, retry=RetryPolicy(attempts=2))
    batch = [
        Message(f"{name}, {way.name}, {number}", Added(tuple(str(ident) for _, ident, _ in steps), number))
        for number, steps in enumerate(program)
    ]
    if way.together:
        try:
            outcomes = [delivery.outcome for delivery in harness.run(dispatcher.deliver_batch, batch)]
        except BatchFailed as failed:
            outcomes = [delivery.outcome for delivery in failed.deliveries]
    else:
        outcomes = [_outcome_of(harness, dispatcher, message) for message in batch]
    left = harness.transact(programs.state)
    return outcomes, [seen[number] for number, outcome in enumerate(outcomes) if outcome is Outcome.APPLIED], left


def _outcome_of(harness: Harness, dispatcher: Any, message: Message) -> Outcome:
    try:
        outcome: Outcome = harness.run(dispatcher.deliver, message).outcome
    except Exception:  # noqa: BLE001  # whatever a program provokes
        return Outcome.FAILED
    return outcome


def checked(
    request: pytest.FixtureRequest, driver: Driver, drawn: dict[str, programs.Program], **arguments: Any
) -> None:
    """Check these programs through one driver: those of shared sessions in the ways of theirs."""
    with Harness(reach(request, driver, **arguments)) as harness:
        harness.create_tables()
        harness.transact(lambda session: programs.prepare(session.connection()))
        for name, program in drawn.items():
            check(harness, name, program, SHARED if name.startswith("shared") else WAYS)


# Below the session every driver of a database is the same, so each database has one; asyncio has aiosqlite.
ONE_OF_EACH = [each for each in USUAL_DRIVERS if each.engine == "sqlite" or not each.is_async]
EACH = [each if each.is_async else pytest.param(each, marks=slow) for each in ONE_OF_EACH]


@pytest.mark.parametrize("driver", EACH, ids=str)
def test_whatever_handlers_do_nobody_can_tell_how_rows_were_read(
    request: pytest.FixtureRequest, driver: Driver
) -> None:
    """Outcomes, what every applied message saw, and every table; after a change thousands are worth drawing."""
    number = 30 if driver.module == "sqlite3" else 8
    checked(request, driver, {f"{seed}": programs.draw(seed) for seed in range(60, 60 + number)})


@slow
@pytest.mark.parametrize(("engine", "isolation"), [("postgresql", "READ COMMITTED"), ("mariadb", "SERIALIZABLE")])
def test_nor_at_another_level(request: pytest.FixtureRequest, engine: str, isolation: str) -> None:
    """Where rows do not last, or reading them counts, what is declared changes nothing either."""
    (driver,) = (each for each in ONE_OF_EACH if each.engine == engine)
    drawn = {f"{seed}": programs.draw(seed) for seed in range(100, 103)}
    checked(request, driver, drawn, dispatcher_isolation=isolation)


@slow
@pytest.mark.parametrize("driver", ONE_OF_EACH, ids=str)
def test_a_shared_session_leaves_what_the_messages_leave_one_by_one(
    request: pytest.FixtureRequest, driver: Driver
) -> None:
    """Outcomes, what every applied message saw, and every row: for handlers that do only what the docs allow."""
    checked(request, driver, {f"shared {seed}": programs.draw_shared(seed) for seed in range(12)})
