"""The database of a test, through a driver, as the contract takes it."""

from typing import Any

import pytest

from contract import Subject
from databases import Driver
from reached import reached


def reach(request: pytest.FixtureRequest, driver: Driver, **arguments: Any) -> Subject:
    """The database of this test, through ``driver``."""
    if not driver.installed:
        reached.give_up(driver.engine, str(driver), f"{driver.module} is not installed")
    return Subject(request.getfixturevalue(driver.engine).url(driver.name_in_url), **arguments)
