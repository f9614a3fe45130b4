"""A PgBouncer of one's own before a PostgreSQL server: transaction mode, on a port of its own, open to everybody.

    with PgBouncer(database.url(), pool_size=2) as bouncer:
        engine = create_engine(bouncer.through(database.url()), **recipe(driver))

A client gets one of `pool_size` server connections for each transaction, and another the next time.
"""

import contextlib
import functools
import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from sqlalchemy import URL

from databases import Driver, EngineUnavailableError
from projector_dedup.testing.provider import free_port

UNNAMED: dict[str, dict[str, Any]] = {
    "psycopg": {"prepare_threshold": None},
    "asyncpg": {
        "statement_cache_size": 0,
        "prepared_statement_cache_size": 0,
        "prepared_statement_name_func": str,
    },
}


def recipe(driver: Driver) -> dict[str, Any]:
    """The arguments of `create_engine` that docs/production.md names for this driver."""
    return {"connect_args": UNNAMED[driver.module]} if driver.module in UNNAMED else {}


class PgBouncer:
    """Runs while its `with` block does; raises `EngineUnavailableError` where it is not installed."""

    def __init__(self, server: URL, *, pool_size: int, pool_mode: str = "transaction") -> None:
        program = shutil.which("pgbouncer", path=f"{os.environ['PATH']}{os.pathsep}/usr/sbin")
        if program is None:
            raise EngineUnavailableError("it is not installed; on Debian: apt-get install pgbouncer")
        self.version = _version(program)
        self._port = free_port()
        self._stack = contextlib.ExitStack()
        self._command = [program]
        settings = {
            "listen_addr": "127.0.0.1",
            "listen_port": self._port,
            "unix_socket_dir": "",
            "auth_type": "any",
            "pool_mode": pool_mode,
            "default_pool_size": pool_size,
            "max_client_conn": 200,
        }
        if tuple(map(int, self.version.split(".")[:2])) >= (1, 21):
            settings["max_prepared_statements"] = 0  # what older ones have no word for
        target = {"host": server.host, "port": server.port or 5432, "user": server.username}
        if server.password is not None:
            target["password"] = server.password
        self._settings = "\n".join(
            [
                "[databases]",
                "* = " + " ".join(f"{name}={_quoted(value)}" for name, value in target.items()),
                "[pgbouncer]",
                *(f"{name} = {value}" for name, value in settings.items()),
            ]
        )

    def through(self, url: URL) -> URL:
        """Return a URL that leads to the same database through this PgBouncer."""
        return url.set(host="127.0.0.1", port=self._port)

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pgbouncer-")))
            folder.chmod(0o755)
            (folder / "pgbouncer.ini").write_text(self._settings)
            if os.geteuid() == 0:
                self._command += ["-u", "nobody"]  # it refuses to run as root
            with (folder / "log").open("w") as log:
                process = subprocess.Popen(
                    [*self._command, "-q", str(folder / "pgbouncer.ini")], stdout=log, stderr=log, cwd=folder
                )
            stack.callback(process.wait)
            stack.callback(process.kill)
            deadline = time.monotonic() + 10
            while not self._answers():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise EngineUnavailableError(f"it does not start: {(folder / 'log').read_text()}")
                time.sleep(0.01)
            self._stack = stack.pop_all()
        return self

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), timeout=1):
            return True
        return False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()


@functools.cache
def _version(program: str) -> str:
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    return said.split()[1]


def _quoted(value: object) -> str:
    return "'" + str(value).replace("'", "''") + "'"
