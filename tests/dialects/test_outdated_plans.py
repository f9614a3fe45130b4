"""A column gets another type while workers run: what their drivers had prepared is outdated, and nothing is lost.

PostgreSQL says 0A000, "cached plan must not change result type", which is also its code for what a handler does wrong.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from sqlalchemy import select, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from databases import DRIVERS, Driver
from projector_dedup import Outcome
from projector_dedup.options import RetryPolicy
from rig import NOTHING, Durable, Rig, RigOn, Total, add, done

POSTGRESQL = [driver for driver in DRIVERS if driver.engine == "postgresql"]
AT_ONCE = RetryPolicy(base=0)
POOL = 5
RANK = "alter table total add rank integer not null default 0"
WIDER = "alter table total alter column rank type bigint"
EVERYTHING = "select * from total where account <> 'z'"


@pytest.fixture(name="warm")
def warm_fixture(rig_on: RigOn) -> Iterator[Callable[[Driver], Rig]]:
    """A rig with a full pool, each connection of which has prepared what the handler will ask."""
    rigs: list[Rig] = []

    def make(driver: Driver) -> Rig:
        arguments = {"connect_args": {"prepare_threshold": 0}} if driver.module == "psycopg" else {}
        rig = rig_on(driver, pool_size=POOL, max_overflow=0, **arguments)
        rigs.append(rig)
        rig.outside.execute(RANK)
        rig.fill(POOL, _prepare)
        for _ in range(2 * POOL):  # a connection's first unit of work ends with a ROLLBACK of what it has asked
            rig.deliver(look, idempotent=False)
        rig.fill(POOL, _prepare)
        return rig

    yield make
    for rig in rigs:
        rig.outside.execute("alter table total drop column rank")


def _prepare(connection: Any) -> None:
    done(connection.execute(text(EVERYTHING))).all()
    done(connection.commit())  # after a ROLLBACK psycopg would prepare anew


def look(session: Session) -> None:
    """Change nothing."""
    session.execute(select(1))


@pytest.mark.parametrize("driver", POSTGRESQL, ids=str)
def test_messages_are_applied_whatever_was_prepared(driver: Driver, warm: Callable[[Driver], Rig]) -> None:
    """However many connections had prepared it, and each message is applied once, in its second run if need be."""
    rig = warm(driver)
    rig.outside.execute(WIDER)
    runs: list[int] = []

    def read_everything(session: Session) -> None:
        runs.append(1)
        session.execute(text(EVERYTHING)).all()
        add(session)

    for number in range(POOL + 1):
        assert rig.deliver(read_everything, f"m{number}", retry=AT_ONCE).outcome is Outcome.APPLIED
    assert (len(runs) > POOL + 1) == (driver.module != "psycopg2"), "the others had prepared it"
    rig.assert_settled(Durable(POOL + 1, POOL + 1))


@pytest.mark.parametrize("driver", POSTGRESQL, ids=str)
def test_a_handler_that_swallows_it_is_run_again(driver: Driver, warm: Callable[[Driver], Rig]) -> None:
    """PostgreSQL answers its COMMIT by a ROLLBACK and no error; asyncpg does not tell, so the error is remembered."""
    rig = warm(driver)
    rig.outside.execute(WIDER)

    def swallow(session: Session) -> None:
        add(session)
        with suppress(DBAPIError):
            session.execute(text(EVERYTHING)).all()

    assert rig.deliver(swallow, retry=AT_ONCE).outcome is Outcome.APPLIED
    assert rig.durable() == Durable(1, 1)


@pytest.mark.parametrize("driver", POSTGRESQL, ids=str)
def test_what_the_server_does_not_support_is_the_users_error(rig: Rig) -> None:
    """The handler ran once: trying again would not help."""
    runs: list[int] = []

    def not_supported(session: Session) -> None:
        runs.append(1)
        session.execute(select(Total.account).distinct().with_for_update())

    with pytest.raises(DBAPIError, match="FOR UPDATE is not allowed with DISTINCT"):
        rig.deliver(not_supported)
    assert len(runs) == 1
    assert rig.durable() == NOTHING
