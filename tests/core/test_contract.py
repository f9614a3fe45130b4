"""The contract, on every engine, driver and isolation level, and wherever a level can be set."""

import pytest

from contract import ISOLATION, ConcurrencyContract, ProjectorContract, Subject
from databases import DRIVERS, USUAL_DRIVERS
from projector_dedup.dialects import configure_sqlite
from reach import reach

SQLITE = [driver for driver in DRIVERS if driver.engine == "sqlite"]

PLACES = ("engine", "option", "dispatcher")
LEVELS = ("READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE")
CHOSEN = [
    (driver, f"{level} on {PLACES[(row + column) % 3]}")
    for row, driver in enumerate(driver for driver in USUAL_DRIVERS if driver.engine != "sqlite")
    for column, level in enumerate(LEVELS[:1] if driver.is_async else LEVELS)
]
"""The usual driver of each server meets every level, at each place in turn; the asynchronous one meets one."""


class TestDefault(ProjectorContract):
    """Every driver, with nothing said about isolation."""

    @pytest.fixture(params=DRIVERS, ids=str)
    def subject(self, request: pytest.FixtureRequest) -> Subject:
        """An engine as ``create_engine(url)`` makes it."""
        return reach(request, request.param)


@pytest.mark.nightly
class TestChosenIsolation(ConcurrencyContract):
    """The levels that a user may choose, set at each place where that can be done."""

    @pytest.fixture(params=CHOSEN, ids=lambda pair: f"{pair[0]}, {pair[1]}")
    def subject(self, request: pytest.FixtureRequest) -> Subject:
        """An engine, an option of it, or a dispatcher that names the level."""
        driver, isolation = request.param
        return reach(request, driver, **ISOLATION[isolation])


class TestConfiguredSQLite(ConcurrencyContract):
    """SQLite as docs/production.md says to set it up for several workers."""

    note = "write-ahead log"

    @pytest.fixture(params=SQLITE, ids=str)
    def subject(self, request: pytest.FixtureRequest) -> Subject:
        """With write-ahead logging, and a long wait."""
        return reach(request, request.param, prepare=configure_sqlite)
