"""Whatever handlers do with their session, a batch leaves what its messages leave one by one: programs by lot."""

from typing import Any

import pytest
from sqlalchemy.orm import Session

import programs
from databases import USUAL_DRIVERS, Driver
from kit import Added, Harness
from projector_dedup import Message, Outcome
from projector_dedup.errors import BatchFailed
from projector_dedup.options import RetryPolicy
from reach import reach
from ready import ready

pytestmark = pytest.mark.filterwarnings("ignore")  # programs do what SQLAlchemy warns of
slow = pytest.mark.slow


def run(harness: Harness, name: str, program: programs.Program, *, together: bool) -> tuple[Any, ...]:
    """Deliver a program together or one by one; return the outcomes, what applied messages saw, and what is left."""
    seen: dict[int, list[Any]] = {}
    programs.HELD.clear()
    harness.transact(programs.reset)

    def body(event: Added, session: Session) -> None:
        programs.REACHED.clear()
        seen[event.amount] = []
        for step, ident, argument in program[event.amount]:
            step(session, ident, argument, seen[event.amount])

    dispatcher = harness.dispatcher(harness.handler(body, "program"), retry=RetryPolicy(attempts=2))
    batch = [Message(f"{name}, {together}, {number}", Added(amount=number)) for number in range(len(program))]
    if together:
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
    """Check these programs through one driver: together and one by one, all must be the same."""
    with ready(reach(request, driver, **arguments)) as harness:
        harness.transact(lambda session: programs.prepare(session.connection()))
        for name, program in drawn.items():
            one_by_one = run(harness, name, program, together=False)
            assert run(harness, name, program, together=True) == one_by_one, f"program {name}"


# Below the session every driver of a database is the same, so each database has one; asyncio has aiosqlite.
ONE_OF_EACH = [each for each in USUAL_DRIVERS if each.engine == "sqlite" or not each.is_async]
EACH = [each if each.is_async else pytest.param(each, marks=slow) for each in ONE_OF_EACH]


@pytest.mark.parametrize("driver", EACH, ids=str)
def test_whatever_handlers_do_nobody_can_tell_a_batch(request: pytest.FixtureRequest, driver: Driver) -> None:
    """Outcomes, what every applied message saw, and every table; after a change thousands are worth drawing."""
    number = 30 if driver.module == "sqlite3" else 8
    checked(request, driver, {f"{seed}": programs.draw(seed) for seed in range(60, 60 + number)})


@slow
@pytest.mark.parametrize(("engine", "isolation"), [("postgresql", "READ COMMITTED"), ("mariadb", "SERIALIZABLE")])
def test_nor_at_another_level(request: pytest.FixtureRequest, engine: str, isolation: str) -> None:
    """Where rows do not last, or reading them counts, a batch changes nothing either."""
    (driver,) = (each for each in ONE_OF_EACH if each.engine == engine)
    drawn = {f"{seed}": programs.draw(seed) for seed in range(100, 103)}
    checked(request, driver, drawn, dispatcher_isolation=isolation)
