"""Describe a cleanup: which markers are expired, and a route through them. Each dialect has the DELETE."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from typing import Any

from sqlalchemy import ColumnElement, Select, Table, and_, bindparam, literal_column, select
from sqlalchemy.dialects import sqlite
from sqlalchemy.sql import Executable

from .columns import moment

# SQLite compares text, and its clock has whole seconds: all markers of a second would be older than a cutoff within it.
_WHOLE_SECONDS = "%(year)04d-%(month)02d-%(day)02d %(hour)02d:%(minute)02d:%(second)02d"
_CUTOFF = moment().with_variant(sqlite.DATETIME(storage_format=_WHOLE_SECONDS), "sqlite")  # type: ignore[no-untyped-call]  # SQLAlchemy's


@dataclass(frozen=True)
class Expired:
    """Says which markers to delete: those that were processed before ``cutoff``, of all handlers or of one."""

    marker: Table
    cutoff: datetime
    handler: str | None
    batch_size: int

    @property
    def bounds(self) -> dict[str, Any]:
        """Return the parameters of the condition ``is_expired``."""
        return {"cutoff": self.cutoff} | ({} if self.handler is None else {"handler": self.handler})


@dataclass(frozen=True)
class Route:
    """Describes one way to delete the expired markers: a statement, its parameters, and a query for what it left."""

    statement: Executable
    batches: Iterable[Mapping[str, Any]]
    until_empty: bool  #: the batches are endless: the first that deletes nothing is the last
    look: Executable  #: gives a row if an expired marker is left; it takes ``Expired.bounds``
    isolation: str | None = None  #: the level; with AUTOCOMMIT each statement is a transaction


def is_expired(marker: Any, *, of_handler: bool) -> ColumnElement[bool]:
    """Return the condition that a row of ``marker``, the table or an alias, is expired by ``Expired.bounds``."""
    old: ColumnElement[bool] = marker.c.processed_at < bindparam("cutoff", type_=_CUTOFF)
    return and_(old, marker.c.handler == bindparam("handler")) if of_handler else old


@cache
def any_expired(marker: Table, *, of_handler: bool) -> Select[Any]:
    """Return a SELECT that gives a row if an expired marker is there, even if another cleaner is about to delete it."""
    return select(literal_column("1")).select_from(marker).where(is_expired(marker, of_handler=of_handler)).limit(1)


def by_index(statement: Executable, expired: Expired) -> Route:
    """Return the route by the index: ``statement`` deletes the oldest batch, again and again until nothing is found."""
    return Route(
        statement,
        itertools.repeat({**expired.bounds, "batch_size": expired.batch_size}),
        until_empty=True,
        look=any_expired(expired.marker, of_handler=expired.handler is not None),
    )
