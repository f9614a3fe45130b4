"""Where the contenders run: a server, and on it a database for each of them, dropped when the run ends."""

from __future__ import annotations

import contextlib
import secrets
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import URL, NullPool, create_engine, make_url, text

DRIVERS = {"postgresql": "postgresql+psycopg", "mariadb": "mariadb+pymysql", "sqlite": "sqlite+pysqlite"}


@dataclass(frozen=True)
class Place:
    """A database that one contender has to itself: with the tables of others in it, nothing could be told apart."""

    url: URL

    @property
    def engine(self) -> str:
        """``postgresql``, ``mariadb`` or ``sqlite``."""
        return self.url.drivername.partition("+")[0]

    def by(self, driver: str) -> URL:
        """Its URL for another driver, such as ``postgresql+asyncpg``."""
        return self.url.set(drivername=driver)

    def ask(self, sql: str) -> int:
        """One number, by a connection of the harness's own."""
        engine = create_engine(self.url, poolclass=NullPool)
        with engine.connect() as connection:
            return int(connection.scalar(text(sql)) or 0)

    def run(self, *statements: str) -> None:
        """Each statement by itself, outside a transaction."""
        engine = create_engine(self.url, poolclass=NullPool, isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            for statement in statements:
                connection.execute(text(statement))

    def total(self) -> int:
        """What the read model has added up."""
        return self.ask("SELECT sum(amount) FROM total")


class Server:
    """Makes databases and drops them; for SQLite, files in a folder."""

    def __init__(self, url: str | URL) -> None:
        given = make_url(url)
        engine = "mariadb" if given.get_backend_name() in ("mysql", "mariadb") else given.get_backend_name()
        self._root = Place(given.set(drivername=DRIVERS[engine]))
        self._made: list[str] = []
        self._run = f"bench_{secrets.token_hex(3)}"

    @property
    def engine(self) -> str:
        """``postgresql``, ``mariadb`` or ``sqlite``."""
        return self._root.engine

    @property
    def url(self) -> URL:
        """Of the database that was given."""
        return self._root.url

    @property
    def version(self) -> str:
        """As the server says it."""
        engine = create_engine(self._root.url, poolclass=NullPool)
        with engine.connect() as connection:
            function = "sqlite_version()" if self.engine == "sqlite" else "version()"
            name = {"postgresql": "PostgreSQL", "mariadb": "MariaDB", "sqlite": "SQLite"}[self.engine]
            return f"{name} {str(connection.scalar(text(f'SELECT {function}'))).removeprefix('PostgreSQL ').split()[0]}"

    def settings(self) -> dict[str, str]:
        """What decides what a COMMIT costs."""
        names = {
            "postgresql": ["fsync", "synchronous_commit", "shared_buffers", "wal_level", "max_wal_size"],
            "mariadb": ["innodb_flush_log_at_trx_commit", "innodb_buffer_pool_size", "log_bin"],
            "sqlite": [],
        }[self.engine]
        show = "SELECT current_setting('{}')" if self.engine == "postgresql" else "SELECT @@{}"
        engine = create_engine(self._root.url, poolclass=NullPool)
        with engine.connect() as connection:
            return {name: str(connection.scalar(text(show.format(name)))) for name in names}

    def place(self) -> Place:
        """A new database."""
        name = f"{self._run}_{len(self._made)}"
        self._made.append(name)
        if self.engine == "sqlite":
            return Place(
                self._root.url.set(database=str(Path(str(self._root.url.database)).parent / f"{name}.sqlite3"))
            )
        self._root.run(f"CREATE DATABASE {name}")
        return Place(self._root.url.set(database=name))

    def drop(self, place: Place) -> None:
        """What a place takes, tens of megabytes or a few gigabytes, before the run ends."""
        name = Path(str(place.url.database)).stem
        if name not in self._made:
            return
        self._made[self._made.index(name)] = ""
        if self.engine == "sqlite":
            for file in Path(str(place.url.database)).parent.glob(f"{name}.sqlite3*"):
                file.unlink()
        else:
            self._root.run(f"DROP DATABASE {name}" + (" WITH (FORCE)" if self.engine == "postgresql" else ""))

    def close(self) -> None:
        """Drop what is left."""
        for name in filter(None, list(self._made)):
            database = str(Path(str(self._root.url.database)).parent / f"{name}.sqlite3")
            self.drop(Place(self._root.url.set(database=database if self.engine == "sqlite" else name)))


@contextlib.contextmanager
def postgresql(url: str | None) -> Iterator[Server]:
    """The server of ``url``, or one from a wheel, whose data lies beside the interpreter: /tmp may be memory."""
    with contextlib.ExitStack() as stack:
        if url is None:
            from private_postgres import embedded_postgres

            folder = stack.enter_context(tempfile.TemporaryDirectory(dir=sys.prefix, prefix="postgres-"))
            url = stack.enter_context(embedded_postgres(Path(folder) / "data"))
        yield stack.enter_context(contextlib.closing(Server(url)))


@contextlib.contextmanager
def sqlite() -> Iterator[Server]:
    """Files, beside the interpreter too."""
    with (
        tempfile.TemporaryDirectory(dir=sys.prefix, prefix="sqlite-") as folder,
        contextlib.closing(Server(f"sqlite:///{folder}/unused.sqlite3")) as server,
    ):
        yield server
