"""Delete expired markers on PostgreSQL: by the index while they are few, page by page if they are most of the table."""

from __future__ import annotations

from functools import cache
from typing import Any

from sqlalchemy import (
    BigInteger,
    Delete,
    Select,
    Table,
    Text,
    bindparam,
    column,
    delete,
    exists,
    func,
    literal_column,
    select,
    table,
)
from sqlalchemy.engine import Connection
from sqlalchemy.sql import ColumnElement

from ..cleanup import Expired, Route, any_expired, is_expired

_FEWEST_PAGES = 10  # in a batch: with fewer, its size would be far from the one that was asked for
_FEWEST_BATCHES = 5  # with fewer, the choice makes no difference
_MOSTLY = 0.5

_TUPLE_OVERHEAD, _PAGE_OVERHEAD = 8, 24  # bytes: line pointer and alignment; page header


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


@cache
def sweeping(marker: Table, *, of_handler: bool) -> Delete:
    """Return a DELETE of the expired markers from the address ``:begin`` to before ``:end``, in their physical order.

    Two cleaners lock the rows in the same order, so that they wait for each other and do not deadlock.
    """
    return delete(marker).where(_in_a_hurry(), *_in_pages(), is_expired(marker, of_handler=of_handler))


def _in_pages() -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    ctid: ColumnElement[Any] = literal_column("ctid")
    return ctid >= _address("begin"), ctid < _address("end")


def _address(name: str) -> ColumnElement[Any]:
    return bindparam(name, type_=Text()).op("::")(literal_column("tid"))


@cache
def survey(marker: Table) -> Select[Any]:
    """Return a SELECT of what ``sweep`` needs to know; it gives no row for an empty table.

    It gives the number of pages, how many markers the planner expects in a page, the bytes of a marker, the moments of
    the oldest and the newest marker, and whether the table is a partition.
    """
    rows = marker.alias("markers")
    some = select(func.pg_column_size(literal_column("markers")).label("bytes")).select_from(rows).limit(100)
    block = literal_column("current_setting('block_size')::bigint", type_=BigInteger())
    size = func.pg_relation_size(literal_column("tableoid"), type_=BigInteger()).op("/")(block)
    catalogue = table("pg_class", column("oid"), column("reltuples"), column("relpages"))
    inherits = table("pg_inherits", column("inhrelid"))
    planned = select(catalogue.c.reltuples / func.nullif(catalogue.c.relpages, 0))
    planned = planned.where(catalogue.c.oid == literal_column("tableoid"))
    ages = [function(marker.c.processed_at) for function in (func.min, func.max)]
    return (
        select(
            size.label("pages"),
            planned.scalar_subquery().label("planned"),
            exists().select_from(inherits).where(inherits.c.inhrelid == literal_column("tableoid")).label("is_a_part"),
            select(func.avg(some.subquery().c.bytes)).scalar_subquery().label("bytes"),
            *(
                select(age).select_from(marker).scalar_subquery().label(name)
                for age, name in zip(ages, ("oldest", "newest"), strict=True)
            ),
        )
        .select_from(marker)
        .limit(1)
    )


def sweep(connection: Connection, expired: Expired) -> Route | None:
    """Return a route page after page, if that is the faster one; else None.

    It reads each page once, but also those without expired markers. The index is read in its own order, where each
    entry costs a look into the table.
    """
    if (connection.dialect.server_version_info or (0,)) < (14,):  # no TID range scan
        return None
    found = connection.execute(survey(expired.marker)).first()
    if found is None or found.is_a_part:  # of a partitioned table, whose parts are of different sizes
        return None
    span = found.newest - found.oldest
    share = min(1.0, (expired.cutoff - found.oldest) / span) if span else 0.0
    if expired.handler is not None:
        share = 1.0  # its own share is not known, and the index does not find its markers faster
    if share < _MOSTLY:
        return None
    full = (8192 - _PAGE_OVERHEAD) / (float(found.bytes) + _TUPLE_OVERHEAD)
    # The planner's figure may be from a day when the table was nearly empty: at most twice the batch size is deleted.
    known = found.planned if (found.planned or 0) > 0 else full
    pages = int(expired.batch_size / max(known * share, full / 2))
    if pages < _FEWEST_PAGES or found.pages < _FEWEST_BATCHES * pages:
        return None

    step = range(0, found.pages, pages)
    return Route(
        sweeping(expired.marker, of_handler=expired.handler is not None),
        [{**expired.bounds, "begin": f"({first},0)", "end": f"({first + pages},0)"} for first in step],
        until_empty=False,
        look=any_expired(expired.marker, of_handler=expired.handler is not None),
        isolation="AUTOCOMMIT",
    )
