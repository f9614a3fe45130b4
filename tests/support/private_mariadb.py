"""A MariaDB server of one's own, from the installed programs: it has a port and a folder of its own, and can be killed.

On Debian the programs are in the package mariadb-server.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pymysql
from sqlalchemy import URL

from projector_dedup.testing.provider import free_port

PATIENCE = 120.0  # seconds until a server takes statements


class NotInstalledError(Exception):
    """What the server needs is not on this machine; the text says what."""


class PrivateMariaDB:
    """One server. Its data survive `kill()`."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> URL:
        """The URL of the server, for the usual driver."""
        return URL.create("mariadb+pymysql", "root", host="127.0.0.1", port=self.port)

    def install(self) -> None:
        """Make its empty data."""
        for folder in (self._folder, self._temporary):
            folder.mkdir(parents=True)
            if _user():
                shutil.chown(folder, "mysql")
        places = [f"--datadir={self._folder / 'data'}", f"--tmpdir={self._temporary}"]
        options = ["--no-defaults", "--skip-test-db", "--auth-root-authentication-method=normal", *places, *_user()]
        done = subprocess.run([program("mariadb-install-db"), *options], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"MariaDB cannot be installed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")

    def start(self, **settings: object) -> None:
        """Start the server with settings beside our own; does not wait for it."""
        every = {
            "port": self.port,
            "bind_address": "127.0.0.1",
            "datadir": self._folder / "data",
            "tmpdir": self._temporary,
            "socket": self._folder / "socket",
            "pid_file": self._folder / "pid",
            **settings,
        }
        arguments = [f"--{name.replace('_', '-')}={value}" for name, value in every.items()]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [program("mariadbd"), "--no-defaults", *_user(), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for this process, which ends the servers
            )

    def wait(self) -> None:
        """Return when the server is ready."""
        deadline = time.monotonic() + PATIENCE
        while not self.is_ready():
            if self._process is None or self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"MariaDB does not come:\n{self._log.read_text(errors='replace')[-4000:]}")
            time.sleep(0.1)

    def is_ready(self) -> bool:
        """True if it takes statements."""
        return self.status("Uptime") is not None

    def connect(self) -> Any:
        """A connection in autocommit mode, without SQLAlchemy."""
        return pymysql.connect(host="127.0.0.1", port=self.port, user="root", autocommit=True, connect_timeout=5)

    def execute(self, sql: str) -> list[tuple[Any, ...]]:
        """Run one statement on a connection of its own."""
        with contextlib.closing(self.connect()) as connection, connection.cursor() as cursor:
            cursor.execute(sql)
            return list(cursor.fetchall())

    def status(self, name: str) -> str | None:
        """Return a status variable of the server; None if it does not answer."""
        with contextlib.suppress(pymysql.err.OperationalError):
            return "".join(str(row[1]) for row in self.execute(f"SHOW GLOBAL STATUS LIKE '{name}'"))
        return None

    def kill(self) -> None:
        """Kill the server, by its process id: it can do nothing about that."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    @property
    def _temporary(self) -> Path:
        """Its own: a server that starts deletes all temporary tables that it finds, those of a running server, too."""
        return self._folder / "tmp"

    @property
    def _log(self) -> Path:
        return self._folder / "log"


@contextlib.contextmanager
def private_mariadb() -> Iterator[URL]:
    """Run a server while the block runs; yields its URL. Raises `NotInstalledError`."""
    for name in ("mariadbd", "mariadb-install-db"):
        program(name)
    with folder_for_servers("mariadb-") as folder:
        server = PrivateMariaDB(folder / "server")
        try:
            server.install()
            server.start()
            server.wait()
            yield server.url
        finally:
            server.kill()


@contextlib.contextmanager
def folder_for_servers(prefix: str) -> Iterator[Path]:
    """A folder that MariaDB's own user may enter; below pytest's, a second run as root would close it to that user."""
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def program(name: str) -> str:
    """Return where a program is. Raises `NotInstalledError`."""
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin")
    if found is None:
        raise NotInstalledError(f"{name} is not installed")
    return found


def _user() -> list[str]:
    """Return the argument by which root's servers run as MariaDB's own user, whom rsync and the server insist on."""
    return ["--user=mysql"] if os.geteuid() == 0 else []
