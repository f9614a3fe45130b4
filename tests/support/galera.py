"""A Galera cluster of one's own: MariaDB servers with ports and folders of their own, which are killed and come back.

It needs the programs of Debian's packages mariadb-server and galera-4, and rsync, by which a node gets its data.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pymysql
from sqlalchemy import URL

from projector_dedup.testing.postgres import _free_port

Settings = Mapping[str, object]

DATABASE = "readmodel"
PATIENCE = 120.0  # seconds until a node has its data and is ready

_PROVIDERS = (
    "/usr/lib/galera/libgalera_smm.so",  # Debian
    "/usr/lib64/galera-4/libgalera_smm.so",
    "/usr/lib64/galera/libgalera_smm.so",
)
_REMEDY = "on Debian: apt-get install mariadb-server galera-4 rsync"


class GaleraUnavailableError(Exception):
    """No cluster can be had on this machine; the text says what is missing."""


class GaleraNode:
    """One server of a cluster. Its data survive `kill()`; what it has missed, another node brings it."""

    def __init__(self, name: str, folder: Path, settings: Settings) -> None:
        self.name = name
        self.port, self._group_port, self._ist_port, self._sst_port = (_free_port() for _ in range(4))
        self._folder = folder
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> URL:
        """The URL of its database, for the usual driver."""
        return URL.create("mariadb+pymysql", "root", host="127.0.0.1", port=self.port, database=DATABASE)

    @property
    def address(self) -> str:
        """Where the other nodes find it."""
        return f"127.0.0.1:{self._group_port}"

    def install(self) -> None:
        """Make its empty data."""
        self._folder.mkdir(parents=True)
        if _user():
            shutil.chown(self._folder, "mysql")
        place, login = f"--datadir={self._folder / 'data'}", "--auth-root-authentication-method=normal"
        command = [_program("mariadb-install-db"), "--no-defaults", place, login, "--skip-test-db", *_user()]
        subprocess.run(command, check=True, capture_output=True)

    def start(self, members: str) -> None:
        """Start the server. It joins the cluster of `members`, or founds one if they are none; does not wait for it."""
        settings = {
            "port": self.port,
            "bind_address": "127.0.0.1",
            "datadir": self._folder / "data",
            "socket": self._folder / "socket",
            "pid_file": self._folder / "pid",
            "binlog_format": "ROW",
            "innodb_autoinc_lock_mode": 2,
            "innodb_buffer_pool_size": "64M",
            "innodb_log_file_size": "16M",
            "wsrep_on": "ON",
            "wsrep_provider": _provider(),
            "wsrep_provider_options": f"gmcast.listen_addr=tcp://{self.address};ist.recv_addr=127.0.0.1:{self._ist_port}",
            "wsrep_cluster_name": "projector_dedup",
            "wsrep_cluster_address": f"gcomm://{members}",
            "wsrep_node_name": self.name,
            "wsrep_node_address": self.address,
            "wsrep_sst_method": "rsync",
            "wsrep_sst_receive_address": f"127.0.0.1:{self._sst_port}",
            **self._settings,
        }
        arguments = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [_program("mariadbd"), "--no-defaults", *_user(), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for this process, which ends the servers
            )

    def wait(self) -> None:
        """Return when the node is a member that has all data and takes statements."""
        deadline = time.monotonic() + PATIENCE
        while self.status("wsrep_local_state_comment") != "Synced":
            if self._process is None or self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self.name} does not come:\n{self._log.read_text(errors='replace')[-4000:]}")
            time.sleep(0.1)

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
    def _log(self) -> Path:
        return self._folder / "log"


class GaleraCluster:
    """Servers each of which takes writes, and replicates them to the others."""

    def __init__(self, nodes: list[GaleraNode]) -> None:
        self.nodes = nodes

    def found(self) -> None:
        """Start one node after the other: the first founds the cluster, the others get their data from a member."""
        for node in self.nodes:
            node.install()
            node.start("" if node is self.nodes[0] else self._members)
            node.wait()
        self.nodes[0].execute(f"CREATE DATABASE {DATABASE}")

    def rejoin(self, node: GaleraNode) -> None:
        """Start a node that was killed, and return when it has what it missed."""
        node.start(self._members)
        node.wait()

    @property
    def _members(self) -> str:
        return ",".join(node.address for node in self.nodes)


@contextlib.contextmanager
def galera_cluster(*settings: Settings) -> Iterator[GaleraCluster]:
    """Run a cluster while the block runs, with a node for each of the `settings`.

    Raises `GaleraUnavailableError`. The folder is not below pytest's, which a second run as root would close to it.
    """
    _provider()
    for name in ("mariadbd", "mariadb-install-db", "rsync"):
        _program(name)
    with tempfile.TemporaryDirectory(prefix="galera-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)  # as root, the servers run as another user
        nodes = [
            GaleraNode(f"node-{number}", Path(folder, f"node-{number}"), each)
            for number, each in enumerate(settings, 1)
        ]
        try:
            cluster = GaleraCluster(nodes)
            cluster.found()
            yield cluster
        finally:
            for node in nodes:
                node.kill()


def _user() -> list[str]:
    """Return the argument by which root's servers run as MariaDB's own user: rsync would not write root's folders."""
    return ["--user=mysql"] if os.geteuid() == 0 else []


def _program(name: str) -> str:
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin")
    if found is None:
        raise GaleraUnavailableError(f"{name} is not installed ({_REMEDY})")
    return found


def _provider() -> str:
    found = next((path for path in _PROVIDERS if Path(path).exists()), None)
    if found is None:
        raise GaleraUnavailableError(f"Galera's library is not installed ({_REMEDY})")
    return found
