"""A synchronous standby of PostgreSQL: a duplicate waits for it too, and a wait that was ended is heard of.

COMMIT makes a marker visible on the primary when the standby has it, or when the wait for the standby is ended: by a
cancellation, a lost connection or a crash. So a marker that is found may be one that only the primary has. A COMMIT
waits for all that was committed before it, but only if its own transaction has written something (docs/adr/0024).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import ColumnElement, literal_column

WRITTEN_FOR_STANDBY: ColumnElement[Any] = literal_column(
    "CASE WHEN current_setting('synchronous_standby_names') <> '' "
    "AND current_setting('synchronous_commit') NOT IN ('off', 'local') "
    "THEN pg_logical_emit_message(true, 'projector_dedup', '') END"
)
"""Writes what changes nothing, so that COMMIT waits; asks each time, because a reload changes both settings."""

_WAITED = "SyncRepWaitForLSN"  # the function of the server that ends the wait; its text may be in any language


@contextmanager
def confirming(driver: Any) -> Iterator[None]:
    """Run a COMMIT in the block; raises ``TimeoutError`` if the server says that it did not wait for the standby."""
    with _ended_waits(driver) as ended:
        yield
    if ended:
        raise TimeoutError("the server committed, and was told not to wait until its synchronous standby has that too")


@contextmanager
def _ended_waits(driver: Any) -> Iterator[list[object]]:
    """Collect, while the block runs, what the server says of waits for the standby that it has ended.

    It answers such a COMMIT as any other, and adds a warning. psycopg2 keeps only the text of warnings, so nothing is
    collected there.
    """
    ended: list[object] = []

    def hear_psycopg(warning: Any) -> None:
        if warning.source_function == _WAITED:
            ended.append(warning)

    def hear_asyncpg(_connection: Any, warning: Any) -> None:
        if warning.server_source_function == _WAITED:
            ended.append(warning)

    if hasattr(driver, "add_notice_handler"):
        driver.add_notice_handler(hear_psycopg)
        try:
            yield ended
        finally:
            driver.remove_notice_handler(hear_psycopg)
    elif hasattr(driver, "add_log_listener") and not driver.is_closed():
        driver.add_log_listener(hear_asyncpg)
        try:
            yield ended
        finally:
            driver.remove_log_listener(hear_asyncpg)
    else:
        yield ended
