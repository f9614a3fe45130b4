"""Make a duplicate wait for PostgreSQL's synchronous standby too, and notice when the server ended such a wait.

COMMIT makes a marker visible on the primary when the standby has it, or when the wait for the standby is ended: by a
cancellation, a lost connection or a crash. So a marker that is found may be one that only the primary has. A COMMIT
waits for all that was committed before it, but only if its own transaction has written something (docs/adr/0024).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import ColumnElement, literal_column

WRITTEN_FOR_STANDBY: ColumnElement[Any] = literal_column(
    "CASE WHEN current_setting('synchronous_standby_names') <> '' "
    "AND current_setting('synchronous_commit') NOT IN ('off', 'local') "
    "THEN pg_logical_emit_message(true, 'projector_dedup', '') END"
)
"""Write a message to the log that changes nothing, so that COMMIT waits for the standby, if one is configured.

The settings are read each time, because a reload of the server's configuration changes both.
"""

_WAITED = "SyncRepWaitForLSN"  # the function of the server that ends the wait; its text may be in any language


@contextmanager
def confirming(
    add: Callable[[Callable[..., None]], object],
    remove: Callable[[Callable[..., None]], object],
    *,
    routine_of: Callable[[Any], str | None],
) -> Iterator[None]:
    """Raise ``TimeoutError`` if the COMMIT in the block did not wait for the standby, as the server warns.

    The server answers such a COMMIT as any other, and adds a warning. ``add`` and ``remove`` tell the driver who is to
    be called with warnings; ``routine_of`` returns the function of the server that a warning comes from.
    """
    ended: list[object] = []

    def hear(*arguments: Any) -> None:
        warning = arguments[-1]  # asyncpg gives the connection first
        if routine_of(warning) == _WAITED:
            ended.append(warning)

    add(hear)
    try:
        yield
    finally:
        remove(hear)
    if ended:
        raise TimeoutError("the server committed, and was told not to wait until its synchronous standby has that too")
