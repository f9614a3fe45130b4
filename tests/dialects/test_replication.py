"""A URL of two PostgreSQL servers, of which one is a standby, leads to the one that takes writes."""

from collections.abc import Iterator

import pytest
from sqlalchemy import make_url

from databases import DRIVERS, Driver
from kit import Harness, Subject
from projector_dedup import Outcome
from projector_dedup.errors import RetriesExhaustedError
from projector_dedup.options import RetryPolicy
from reached import reached
from standby import Primary, Standby, either, own_primary, standby_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def primary() -> Iterator[Primary]:
    """A server that nobody else uses, with the contract's tables."""
    with own_primary() as server:
        with Harness(Subject(make_url(server.url).set(drivername="postgresql+psycopg"))) as harness:
            harness.create_tables()
        yield server


@pytest.fixture(scope="module")
def standby(primary: Primary) -> Iterator[Standby]:
    """One that streams."""
    with standby_of(primary) as server:
        yield server


@pytest.mark.parametrize("driver", [each for each in DRIVERS if each.engine == "postgresql"], ids=str)
def test_a_url_of_both_servers_leads_to_the_one_that_takes_writes(
    primary: Primary, standby: Standby, driver: Driver
) -> None:
    """With `target_session_attrs=read-write`, whichever stands first; without it, a standby is refused as read-only."""
    if not driver.installed:
        reached.give_up("postgresql", str(driver), f"{driver.module} is not installed")
    for number, servers in enumerate(((primary, standby), (standby, primary))):
        with Harness(Subject(either(*servers).set(drivername=driver.name_in_url))) as harness:
            assert harness.deliver(harness.dispatcher(), message_id=f"{driver} {number}").outcome is Outcome.APPLIED
    only = either(standby, standby).difference_update_query(["target_session_attrs"])
    with Harness(Subject(only.set(drivername=driver.name_in_url))) as harness:
        dispatcher = harness.dispatcher(retry=RetryPolicy(attempts=2))
        with pytest.raises(RetriesExhaustedError, match="read-only"):
            harness.deliver(dispatcher, message_id="m3")
