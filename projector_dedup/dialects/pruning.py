"""How expired markers are found and deleted in batches where nothing better is known: by the index on their age."""

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

# SQLite compares text, and its clock has whole seconds: with a fraction, the markers of that second would be older.
_WHOLE_SECONDS = "%(year)04d-%(month)02d-%(day)02d %(hour)02d:%(minute)02d:%(second)02d"
_CUTOFF = moment().with_variant(sqlite.DATETIME(storage_format=_WHOLE_SECONDS), "sqlite")  # type: ignore[no-untyped-call]  # SQLAlchemy's


@dataclass(frozen=True)
class Expired:
    """Which markers are to go: those that were processed before ``cutoff``, of all handlers or of one."""

    marker: Table
    cutoff: datetime
    handler: str | None
    batch_size: int

    @property
    def bounds(self) -> dict[str, Any]:
        """The parameters of ``is_expired``."""
        return {"cutoff": self.cutoff} | ({} if self.handler is None else {"handler": self.handler})


@dataclass(frozen=True)
class Route:
    """One way through the expired markers: a statement, what it is run with, and how to see what it left behind."""

    statement: Executable
    batches: Iterable[Mapping[str, Any]]
    until_empty: bool  #: the batches are endless: the first that deletes nothing is the last
    look: Executable  #: gives a row if an expired marker is left; it takes ``Expired.bounds``
    isolation: str | None = None  #: of its transactions; AUTOCOMMIT makes one of each statement, without more ado


def is_expired(marker: Any, *, of_handler: bool) -> ColumnElement[bool]:
    """The condition for ``Expired.bounds`` on the marker table, or an alias of it."""
    old: ColumnElement[bool] = marker.c.processed_at < bindparam("cutoff", type_=_CUTOFF)
    return and_(old, marker.c.handler == bindparam("handler")) if of_handler else old


@cache
def any_expired(marker: Table, *, of_handler: bool) -> Select[Any]:
    """A row if there is an expired marker, also one that somebody else is about to delete."""
    return select(literal_column("1")).select_from(marker).where(is_expired(marker, of_handler=of_handler)).limit(1)


def by_index(statement: Executable, expired: Expired) -> Route:
    """The oldest batch, and again, until there is none."""
    return Route(
        statement,
        itertools.repeat({**expired.bounds, "batch_size": expired.batch_size}),
        until_empty=True,
        look=any_expired(expired.marker, of_handler=expired.handler is not None),
    )
