"""Describe a cleanup: which markers are expired, and whether any is left. Each dialect has the DELETE."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from functools import cache
from typing import Any

from sqlalchemy import ColumnElement, Select, Table, and_, bindparam, literal_column, select
from sqlalchemy.dialects import sqlite

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
        """Return the parameters of the condition ``is_expired``; a DELETE takes ``batch_size`` too."""
        return {"cutoff": self.cutoff} | ({} if self.handler is None else {"handler": self.handler})


def is_expired(marker: Any, *, of_handler: bool) -> ColumnElement[bool]:
    """Return the condition that a row of ``marker``, the table or an alias, is expired by ``Expired.bounds``."""
    old: ColumnElement[bool] = marker.c.processed_at < bindparam("cutoff", type_=_CUTOFF)
    return and_(old, marker.c.handler == bindparam("handler")) if of_handler else old


@cache
def any_expired(marker: Table, *, of_handler: bool) -> Select[Any]:
    """Return a SELECT that gives a row if an expired marker is there, even if another cleaner is about to delete it."""
    return select(literal_column("1")).select_from(marker).where(is_expired(marker, of_handler=of_handler)).limit(1)
