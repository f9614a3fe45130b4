"""A group of MySQL servers (group replication, one primary) of one's own, whose primary is switched, frozen or killed.

The servers are those of `make servers`: they come from Debian unstable, by debootstrap, which needs root.
"""

import contextlib
import dataclasses
import os
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pymysql
from sqlalchemy import URL, event

from databases import mariadb_connection, reached_by, until
from projector_dedup.testing.provider import free_port
from servers import SERVERS, Debian, fetched

DATABASE = "readmodel"
PATIENCE = 120.0  # seconds until the group has a primary that takes writes


class MySQLGroup:
    """Servers one of which takes writes, and replicates them to the others. A server is named by its URL."""

    def __init__(self, folder: Path, nodes: list[URL]) -> None:
        self.nodes = nodes
        self._folder = folder

    def found(self) -> None:
        """Start the group with the first server, let the others join, and create the database."""
        for node in self.nodes:
            execute(node, f"SET GLOBAL group_replication_bootstrap_group = {node is self.nodes[0]:d}")
            execute(node, "START GROUP_REPLICATION USER = 'root', PASSWORD = ''")
            execute(node, "SET GLOBAL group_replication_bootstrap_group = 0")
        self._wait_for_members()
        execute(self.primary, f"CREATE DATABASE {DATABASE}")

    @property
    def primary(self) -> URL:
        """The server that takes writes, by what the first member that answers says; the first one if none says it."""
        for node in self.nodes:
            with contextlib.suppress(pymysql.err.OperationalError):
                roles = {int(port): role for port, _, role in self._online(node)}
                return next((each for each in self.nodes if roles.get(each.port or 0) == "PRIMARY"), self.nodes[0])
        return self.nodes[0]

    def _online(self, node: URL) -> list[tuple[Any, ...]]:
        """Return port, id and role of the members that are there, as a member sees it."""
        members = "SELECT member_port, member_id, member_role FROM performance_schema.replication_group_members"
        return execute(node, f"{members} WHERE member_state = 'ONLINE'")

    def url(self, driver: str, node: URL | None = None) -> URL:
        """Return the URL of the database on a server, by default on the primary of this moment, with a driver."""
        return reached_by((node or self.primary).set(database=DATABASE), f"mysql+{driver}")

    def follow(self, engine: Any) -> None:
        """Let each new connection of an engine lead to the primary of that moment, as a proxy would."""

        def to_primary(_dialect: object, _record: object, _arguments: object, parameters: dict[str, Any]) -> None:
            parameters["port"] = self.primary.port

        event.listen(getattr(engine, "sync_engine", engine), "do_connect", to_primary)

    def switch(self) -> None:
        """Make another member the primary; returns when it is."""
        before = self.primary
        chosen = next(member for _, member, role in self._online(before) if role == "SECONDARY")
        execute(before, f"SELECT group_replication_set_as_primary('{chosen}')")

    def freeze(self) -> None:
        """Stop the primary by SIGSTOP until the others have expelled it. Returns when it is a member again."""
        before, process = self.primary, self._process(self.primary)
        os.kill(process, signal.SIGSTOP)
        try:
            self._without(before)
        finally:
            os.kill(process, signal.SIGCONT)
        self.nodes.append(before)
        self._wait_for_members()

    def kill(self) -> None:
        """Kill the primary by SIGKILL; returns when another one takes writes."""
        before = self.primary
        os.kill(self._process(before), signal.SIGKILL)
        self._without(before)

    def _process(self, node: URL) -> int:
        ((pid_file,),) = execute(node, "SELECT @@pid_file")
        return int(Path(f"{self._folder}{pid_file}").read_text())

    def _without(self, gone: URL) -> None:
        self.nodes.remove(gone)
        self._wait_for_members()
        until(lambda: execute(self.primary, "SELECT @@super_read_only") == [(0,)], PATIENCE)

    def _wait_for_members(self) -> None:
        until(lambda: all(len(self._online(node)) == len(self.nodes) for node in self.nodes), PATIENCE)


def execute(node: URL, sql: str) -> list[tuple[Any, ...]]:
    """Run one statement on a server, on a connection of its own."""
    with contextlib.closing(mariadb_connection(node)) as connection, connection.cursor() as cursor:
        cursor.execute(sql)
        return list(cursor.fetchall())


@contextlib.contextmanager
def mysql_group(number: int, **settings: object) -> Iterator[MySQLGroup]:
    """Run a group of so many servers with these settings while the block runs. Raises `NotSetUpError`."""
    server, folder, name = SERVERS["mysql"], fetched("mysql"), uuid.uuid4()
    assert isinstance(server, Debian)
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(number)]
    with contextlib.ExitStack() as stack:
        nodes = []
        for server_id, address in enumerate(addresses, 1):
            every = {
                "server_id": server_id,
                "report_host": "127.0.0.1",
                "gtid_mode": "ON",
                "enforce_gtid_consistency": "ON",
                "plugin_load_add": "group_replication.so",
                "group_replication_group_name": name,
                "group_replication_start_on_boot": "OFF",
                "group_replication_local_address": address,
                "group_replication_group_seeds": ",".join(addresses),
                **settings,
            }
            options = tuple(f"--loose-{key.replace('_', '-')}={value}" for key, value in every.items())
            started = dataclasses.replace(server, start=(*server.start, *options))
            nodes.append(stack.enter_context(started.running(folder)))
        group = MySQLGroup(folder, nodes)
        group.found()
        yield group
