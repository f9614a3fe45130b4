"""Tell which standby servers a primary of PostgreSQL has, and whether a COMMIT waits for one of them.

A COMMIT that has waited for a synchronous standby is still there after a failover to it. One that has not may be lost
by a failover, although its message was acknowledged (docs/clusters.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from sqlalchemy import Row, text
from sqlalchemy.engine import Connection

from ..findings import Finding, advice, note

_SYNCHRONOUS = ("sync", "quorum")

_SETTINGS = text(
    "SELECT current_setting('synchronous_standby_names') AS names, current_setting('synchronous_commit') AS waits, "
    "current_user AS role"
)

# A subscriber of logical replication (Debezium, say) is no server to fail over to. A role without pg_read_all_stats
# sees that somebody is sent the log, and NULL in place of who.
_STANDBYS = text(
    """
    SELECT application_name AS name, sync_state FROM pg_stat_replication
    WHERE pid NOT IN
        (SELECT active_pid FROM pg_replication_slots WHERE slot_type = 'logical' AND active_pid IS NOT NULL)
    ORDER BY name
    """
)


def replication(connection: Connection) -> Iterator[Finding]:
    """Yield findings about the standby servers of a primary: what a failover keeps, and what it loses."""
    settings = connection.execute(_SETTINGS).one()
    standbys = connection.execute(_STANDBYS).all()
    if settings.waits == "off":
        yield advice(
            f"synchronous_commit is off for {settings.role}: a crash loses messages that were acknowledged just before",
            "set it to on for the role that delivers: ALTER ROLE ... SET synchronous_commit = on",
        )
    if settings.names and settings.waits not in ("off", "local"):
        yield _waited_for(standbys, settings.role)
    elif standbys:
        reason = (
            "synchronous_standby_names is empty" if not settings.names else f"synchronous_commit = {settings.waits}"
        )
        yield advice(
            f"replication is asynchronous ({reason}): a failover loses messages that were acknowledged just before",
            "name the standby in synchronous_standby_names; until then, deliver the last minutes again from an archive "
            "after each failover (docs/clusters.md)",
        )
    else:
        yield note(
            "no standby streams from this server, as far as it says",
            "what is acknowledged survives a crash of the server, and not the loss of its disk (docs/clusters.md)",
        )


def _waited_for(standbys: Sequence[Row[Any]], role: str) -> Finding:
    synchronous = [each.name for each in standbys if each.sync_state in _SYNCHRONOUS]
    if synchronous:
        others = [each.name for each in standbys if each.sync_state not in _SYNCHRONOUS]
        never = f"; never fail over to {', '.join(others)}, which is asynchronous" if others else ""
        return note(
            f"each COMMIT waits for a synchronous standby: {', '.join(synchronous)}",
            f"what was acknowledged is there after a failover to the one that has received most{never}",
        )
    if any(each.sync_state is None for each in standbys):
        return note(
            f"each COMMIT waits for a synchronous standby, and {role} may not see which of {len(standbys)} it is",
            f"GRANT pg_read_all_stats TO {role} shows it; fail over to no other (docs/clusters.md)",
        )
    return advice(
        "synchronous_standby_names asks for a standby that does not stream: each COMMIT waits until it comes",
        "bring it back, or take it out of synchronous_standby_names; do not cancel what waits (docs/runbook.md)",
    )
