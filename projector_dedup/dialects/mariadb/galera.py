"""Recognise a node of a Galera cluster, and a log that is not flushed."""

from __future__ import annotations

from collections.abc import Iterator

from sqlalchemy.engine import Connection

from ..findings import Finding, advice, note

_FLUSHED = "innodb_flush_log_at_trx_commit"
_NOBODY = "00000000-0000-0000-0000-000000000000"


def findings(connection: Connection) -> Iterator[Finding]:
    """Yield advice about a log that is not flushed, and a note about a node of a Galera cluster."""
    # The settings of the server, which new sessions begin with: the command has changed some for its own session.
    found = _global(connection, "VARIABLES", f"'{_FLUSHED}', 'wsrep_node_name'")
    flushed = found.get(_FLUSHED)
    if flushed in ("0", "2"):
        yield advice(
            f"{_FLUSHED} = {flushed}: a crash of the machine loses messages that were acknowledged just before",
            f"SET GLOBAL {_FLUSHED} = 1, and write it into the server's configuration; in a cluster on every node",
        )
    status = _global(connection, "STATUS", "'wsrep_cluster_state_uuid', 'wsrep_cluster_size'")
    if status.get("wsrep_cluster_state_uuid") not in (None, "", _NOBODY):
        yield note(
            f"this server is {found['wsrep_node_name']} of a Galera cluster that has {status['wsrep_cluster_size']} "
            "nodes now",
            "migrate through one node; write a row that is hot through one node; configure all nodes alike "
            "(docs/clusters.md)",
        )


def _global(connection: Connection, kind: str, names: str) -> dict[str, str]:
    rows = connection.exec_driver_sql(f"SHOW GLOBAL {kind} WHERE variable_name IN ({names})")
    return {str(name): str(value) for name, value in rows}
