"""A Galera cluster of one's own: MariaDB servers with ports and folders of their own, which are killed and come back.

It needs the programs of Debian's packages mariadb-server and galera-4, and rsync, by which a node gets its data.
"""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from sqlalchemy import URL

from private_mariadb import NotInstalledError, PrivateMariaDB, folder_for_servers, program
from projector_dedup.testing.provider import free_port

Settings = Mapping[str, object]

DATABASE = "readmodel"

_PROVIDERS = (
    "/usr/lib/galera/libgalera_smm.so",  # Debian
    "/usr/lib64/galera-4/libgalera_smm.so",
    "/usr/lib64/galera/libgalera_smm.so",
)
_REMEDY = "on Debian: apt-get install mariadb-server galera-4 rsync"


class GaleraUnavailableError(Exception):
    """No cluster can be had on this machine; the text says what is missing."""


class GaleraNode(PrivateMariaDB):
    """One server of a cluster. What it has missed while it was not there, another node brings it."""

    def __init__(self, name: str, folder: Path, settings: Settings) -> None:
        super().__init__(folder)
        self.name = name
        self._group_port, self._ist_port, self._sst_port = (free_port() for _ in range(3))
        self._settings = settings

    @property
    def url(self) -> URL:
        """The URL of its database, for the usual driver."""
        return super().url.set(database=DATABASE)

    @property
    def address(self) -> str:
        """Where the other nodes find it."""
        return f"127.0.0.1:{self._group_port}"

    def join(self, members: str) -> None:
        """Start the server. It joins the cluster of `members`, or founds one if they are none; does not wait for it."""
        settings: dict[str, object] = {
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
        self.start(**settings)

    def is_ready(self) -> bool:
        """True if the node is a member that has all data and takes statements."""
        return self.status("wsrep_local_state_comment") == "Synced"


class GaleraCluster:
    """Servers each of which takes writes, and replicates them to the others."""

    def __init__(self, nodes: list[GaleraNode]) -> None:
        self.nodes = nodes

    def found(self) -> None:
        """Start one node after the other: the first founds the cluster, the others get their data from a member."""
        for node in self.nodes:
            node.install()
            node.join("" if node is self.nodes[0] else self._members)
            node.wait()
        self.nodes[0].execute(f"CREATE DATABASE {DATABASE}")

    def rejoin(self, node: GaleraNode) -> None:
        """Start a node that was killed, and return when it has what it missed."""
        node.join(self._members)
        node.wait()

    @property
    def _members(self) -> str:
        return ",".join(node.address for node in self.nodes)


@contextlib.contextmanager
def galera_cluster(*settings: Settings) -> Iterator[GaleraCluster]:
    """Run a cluster while the block runs, with a node for each of the `settings`.

    Raises `GaleraUnavailableError`.
    """
    try:
        for name in ("mariadbd", "mariadb-install-db", "rsync"):
            program(name)
    except NotInstalledError as missing:
        raise GaleraUnavailableError(f"{missing} ({_REMEDY})") from None
    _provider()
    with folder_for_servers("galera-") as folder:
        nodes = [
            GaleraNode(f"node-{number}", folder / f"node-{number}", each) for number, each in enumerate(settings, 1)
        ]
        try:
            cluster = GaleraCluster(nodes)
            cluster.found()
            yield cluster
        finally:
            for node in nodes:
                node.kill()


def _provider() -> str:
    found = next((path for path in _PROVIDERS if Path(path).exists()), None)
    if found is None:
        raise GaleraUnavailableError(f"Galera's library is not installed ({_REMEDY})")
    return found
