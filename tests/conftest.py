"""Fixtures that give every test a database, and the report of what was not tested.

`postgresql`, `sqlite`   an empty `Database` of that engine
`database`               the test runs once for each engine
`sync_url`, `async_url`  the test runs once for each driver of that kind
`engine`                 the same, as a SQLAlchemy Engine that is disposed of in the end

`PROJECTOR_DEDUP_TEST_REQUIRE=postgresql,sqlite` makes it a failure when a driver of these engines is not tested.
"""

import gc
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest
from sqlalchemy import URL, Connection, Engine, create_engine, event

from databases import (
    DRIVERS,
    ENGINES,
    Database,
    Driver,
    EngineUnavailableError,
    empty,
    postgresql_database,
    postgresql_server,
    sqlite_database,
)

REQUIRED = set(os.environ.get("PROJECTOR_DEDUP_TEST_REQUIRE", "").replace(",", " ").split())
if unknown := REQUIRED - set(ENGINES):
    raise pytest.UsageError(f"PROJECTOR_DEDUP_TEST_REQUIRE names {unknown}; known are {ENGINES}.")

_ran: dict[Driver, str] = {}  # driver -> version of the server it reached
_unavailable: dict[str, str] = {}  # engine or driver -> why it could not be had


@event.listens_for(Engine, "engine_connect")
def _remember(connection: Connection) -> None:
    """Believe only connections that were made: a fixture that was asked for proves nothing."""
    dialect = connection.dialect
    driver = f"{dialect.name}+{dialect.driver.removesuffix('_async')}"
    for known in DRIVERS:
        if known.drivername == driver and known.is_async == dialect.is_async:
            _ran[known] = ".".join(map(str, dialect.server_version_info or ()))


def _not_run() -> list[Driver]:
    return [driver for driver in DRIVERS if driver not in _ran]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> None:
    """Collect what failed tests left open before a traceback is rendered.

    A connection that is collected while `ast.parse` runs, and logs a traceback of its own, brings Python 3.11 down
    with a SystemError (pytest-dev/pytest#10763) that ends the whole run and hides the failure.
    """
    if call.excinfo is not None:
        gc.collect()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """An engine that is required and was not reached turns success into failure."""
    missing = any(driver.engine in REQUIRED for driver in _not_run())
    if missing and session.exitstatus == pytest.ExitCode.OK and not session.config.option.collectonly:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what these results do not cover."""
    ran = ", ".join(f"{driver} {version}" for driver, version in sorted(_ran.items(), key=str))
    terminalreporter.write_sep("-", "databases")
    terminalreporter.write_line(f"engines and drivers run: {ran or 'none'}")
    for driver in _not_run():
        why = _unavailable.get(driver.engine) or _unavailable.get(str(driver)) or "no test asked for it"
        required = "REQUIRED, but " if driver.engine in REQUIRED else ""
        terminalreporter.write_line(f"{required}NOT run: {driver} ({why})", yellow=True)


def _give_up(engine: str, what: str, why: str) -> NoReturn:
    _unavailable[what] = why
    if engine in REQUIRED:
        pytest.fail(f"{what} is required here, but: {why}", pytrace=False)
    pytest.skip(f"{what}: {why}")


@pytest.fixture(scope="session")
def _postgresql_for_the_session() -> Iterator[Database | str]:
    # Not pytest's own folder: a second run as root would close it to the user that the server runs as.
    try:
        with (
            tempfile.TemporaryDirectory(prefix="projector-dedup-", ignore_cleanup_errors=True) as folder,
            postgresql_server(Path(folder) / "data") as server,
            postgresql_database(server) as database,
        ):
            yield database
    except EngineUnavailableError as reason:
        yield str(reason)


@pytest.fixture
def postgresql(_postgresql_for_the_session: Database | str) -> Iterator[Database]:
    """An empty PostgreSQL database; whatever the test leaves in it is swept away."""
    if isinstance(_postgresql_for_the_session, str):
        _give_up("postgresql", "postgresql", _postgresql_for_the_session)
    yield _postgresql_for_the_session
    empty(_postgresql_for_the_session)


@pytest.fixture
def sqlite(tmp_path: Path) -> Database:
    """An SQLite database that is not there yet."""
    return sqlite_database(tmp_path)


@pytest.fixture(params=ENGINES)
def database(request: pytest.FixtureRequest) -> Database:
    """An empty database of each engine in turn."""
    return _database(request, request.param)


@pytest.fixture(params=[driver for driver in DRIVERS if not driver.is_async], ids=str)
def sync_url(request: pytest.FixtureRequest) -> URL:
    """The URL of an empty database, for each synchronous driver in turn."""
    return _url(request, request.param)


@pytest.fixture(params=[driver for driver in DRIVERS if driver.is_async], ids=str)
def async_url(request: pytest.FixtureRequest) -> URL:
    """The URL of an empty database, for each asynchronous driver in turn."""
    return _url(request, request.param)


@pytest.fixture
def engine(sync_url: URL) -> Iterator[Engine]:
    """A SQLAlchemy Engine on an empty database, for each synchronous driver in turn."""
    engine = create_engine(sync_url)
    yield engine
    engine.dispose()


def _database(request: pytest.FixtureRequest, name: str) -> Database:
    found: Database = request.getfixturevalue(name)
    return found


def _url(request: pytest.FixtureRequest, driver: Driver) -> URL:
    if not driver.installed:
        _give_up(driver.engine, str(driver), f"{driver.module} is not installed")
    return _database(request, driver.engine).url(driver.drivername)
