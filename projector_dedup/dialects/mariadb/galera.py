"""Recognise a node of a Galera cluster, and tell the settings that had better be the same on each of its nodes."""

from __future__ import annotations

from collections.abc import Iterator

from sqlalchemy.engine import Connection

from ..findings import Finding, advice, note
from ..node import Node

_LEVELS = ("tx_isolation", "transaction_isolation")  # two names of one variable, by release
_COMPARED = (
    "innodb_snapshot_isolation",
    "wsrep_sync_wait",
    "sql_mode",
    "innodb_lock_wait_timeout",
    "innodb_rollback_on_timeout",
)
_FLUSHED = "innodb_flush_log_at_trx_commit"
_NOBODY = "00000000-0000-0000-0000-000000000000"


def findings(connection: Connection) -> Iterator[Finding]:
    """Yield advice about a log that is not flushed, and a note about a node of a Galera cluster."""
    flushed = _global(connection, "VARIABLES", _FLUSHED).get(_FLUSHED)
    if flushed in ("0", "2"):
        yield advice(
            f"{_FLUSHED} = {flushed}: a crash of the machine loses messages that were acknowledged just before",
            f"SET GLOBAL {_FLUSHED} = 1, and write it into the server's configuration; in a cluster on every node",
        )
    if (found := node(connection)) is not None:
        size = _global(connection, "STATUS", "wsrep_cluster_size")["wsrep_cluster_size"]
        yield note(
            f"this server is {found.name} of a Galera cluster that has {size} nodes now",
            "migrate through one node; write a row that is hot through one node; give the URLs of all nodes to this "
            "command, and it compares their settings (docs/clusters.md)",
        )


def node(connection: Connection) -> Node | None:
    """Return the node of a Galera cluster that this server is, or None: the implementation of ``Dialect.node``."""
    cluster = _global(connection, "STATUS", "wsrep_cluster_state_uuid").get("wsrep_cluster_state_uuid")
    if cluster in (None, "", _NOBODY):
        return None
    # Those of the server, which new sessions begin with: the command has changed some for its own session.
    found = _global(connection, "VARIABLES", "wsrep_node_name", *_LEVELS, *_COMPARED)
    settings = {name: found[name] for name in _COMPARED if name in found}
    settings["transaction_isolation"] = next(found[name] for name in _LEVELS if name in found)
    return Node(str(cluster), found["wsrep_node_name"], settings)


def _global(connection: Connection, kind: str, *names: str) -> dict[str, str]:
    listed = ", ".join(f"'{name}'" for name in names)
    rows = connection.exec_driver_sql(f"SHOW GLOBAL {kind} WHERE variable_name IN ({listed})")
    return {str(name): str(value) for name, value in rows}
