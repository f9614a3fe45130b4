"""Delete expired markers on PostgreSQL: the oldest batch, which the index on their age finds."""

from __future__ import annotations

from functools import cache
from typing import Any

from sqlalchemy import Delete, Select, Table, Text, bindparam, delete, func, literal_column, select
from sqlalchemy.sql import ColumnElement

from ..cleanup import is_expired


def _in_a_hurry() -> ColumnElement[bool]:
    """Return a condition that is always true, and is evaluated once, before anything is read.

    It sets for this transaction a short lock timeout, since a cleanup comes back to rows that others hold for longer;
    and a COMMIT that does not wait for the disk, since the next cleanup deletes what a crash restores.
    """
    settings = "concat(set_config('lock_timeout', '100ms', true), set_config('synchronous_commit', 'off', true))"
    return select(literal_column(settings, type_=Text())).scalar_subquery().is_not(None)


@cache
def picking(marker: Table, *, of_handler: bool) -> Delete:
    """Return a DELETE of the oldest expired markers; it skips rows that another cleaner has locked.

    It finds them by physical address, which takes no second index lookup.
    """
    oldest: Select[Any] = (
        select(literal_column("ctid"))
        .select_from(marker)
        .where(is_expired(marker, of_handler=of_handler))
        .order_by(marker.c.processed_at)
        .limit(bindparam("batch_size"))
        .with_for_update(skip_locked=True)
    )
    batch = func.any(func.array(oldest.scalar_subquery()))
    # An address is unique in one partition only: a row of another partition with this address may be young.
    return delete(marker).where(
        _in_a_hurry(), literal_column("ctid") == batch, is_expired(marker, of_handler=of_handler)
    )
