"""Engines with other pools than the usual one: a message is applied, and a redelivery is seen."""

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import AssertionPool, NullPool

from databases import DRIVERS, Driver
from projector_dedup import Outcome
from rig import ONCE, Rig, add, outsides_fixture, rig_on_fixture  # noqa: F401  # fixtures

POOLS: dict[str, dict[str, Any]] = {
    "no pool": {"poolclass": NullPool},
    "a pool of one": {"pool_size": 1, "max_overflow": 0},
    "a pool that asserts": {"poolclass": AssertionPool},
    "a pool that asks first": {"pool_pre_ping": True},
    "a pool that resets nothing": {"pool_reset_on_return": None},
    "a pool that ages": {"pool_recycle": 0},
}


@pytest.mark.parametrize("driver", DRIVERS, ids=str)
@pytest.mark.parametrize("pool", POOLS)
def test_whatever_the_pool_a_message_is_applied_once(rig_on: Callable[..., Rig], driver: Driver, pool: str) -> None:
    """The first delivery of an engine looks at the database before it claims; with NullPool on a connection more."""
    rig = rig_on(driver, **POOLS[pool])
    outcomes = [rig.deliver(add, "m1").outcome for _ in range(3)]
    assert outcomes == [Outcome.APPLIED, Outcome.DUPLICATE, Outcome.DUPLICATE]
    assert rig.durable() == ONCE
