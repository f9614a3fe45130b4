"""Parked requests: a table for verified webhooks that cannot succeed, until a person replays or drops them."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

from sqlalchemy import Column, ColumnElement, MetaData, Text, delete, select, update
from sqlalchemy.engine import Connection

from ..closing import connected
from ..dialects import dialect_of
from ..dialects.columns import exact_bytes
from ..dispatcher import AsyncDispatcher, Dispatcher
from ..errors import RefusedError
from ..markers import library_errors
from ..message import valid_handler
from ..opening import prepared
from ..tables import DedupTables, key_tables

__all__ = ["ParkedTables", "default_parked_tables", "make_parked_tables"]

DEFAULT_NAME = "parked_webhook"
MAX_BODY, MAX_HEADERS = (1 << 24) - 1, (1 << 16) - 1  # bytes
SECRET = ("auth", "cookie", "hmac", "key", "password", "secret", "sig", "token")
"""A header whose name contains one of these texts is not stored: it may be a password, or permit a replay."""


@dataclass(frozen=True, repr=False)
class ParkedTables(DedupTables):
    """The table of parked requests and its state table, as ``make_parked_tables`` returns them.

    A row has the key columns of a marker: ``handler`` is the name of the provider, with the webhook's source.
    ``message_id`` is the provider's id of the event. ``processed_at`` is the time at which the request was parked.
    """

    maker: ClassVar[str] = "make_parked_tables"
    default_name: ClassVar[str] = DEFAULT_NAME
    option: ClassVar[str] = " --parked"
    revisions: ClassVar[tuple[str, ...]] = ("projector_dedup_0005",)
    noun: ClassVar[str] = "parked request"
    handler: ClassVar[str] = "provider"
    subject: ClassVar[str] = "webhooks"
    keyed: ClassVar[bool] = True

    @staticmethod
    def make(metadata: MetaData, name: str, schema: str | None) -> ParkedTables:
        """Return tables of this kind, added to ``metadata``."""
        return make_parked_tables(metadata, name, schema)


def make_parked_tables(metadata: MetaData, name: str = DEFAULT_NAME, schema: str | None = None) -> ParkedTables:
    """Add the table of parked requests ``name`` and the state table ``<name>_state`` to ``metadata``, and return both.

    ``schema`` is the database schema, or None for the default one. If you give a name or a schema, pass the result as
    ``parked=`` to the webhook.

    Raises the errors of ``make_tables``.
    """
    tables = key_tables(metadata, name, schema)
    for column in (
        Column("reason", Text(), nullable=False),
        Column("headers", Text(), nullable=False),  # a JSON object
        Column("body", exact_bytes(), nullable=False),
    ):
        tables.marker.append_column(column)
    return ParkedTables(tables.marker, tables.state)


default_parked_tables = make_parked_tables(MetaData())


class Parking:
    """The parked requests of one webhook. Each method has its own transaction, on the engine of the markers.

    With an ``AsyncDispatcher``, call the methods in ``greenlet_spawn``. They raise ``MissingTableError`` or the
    database's error.
    """

    def __init__(self, dispatcher: Dispatcher | AsyncDispatcher, tables: ParkedTables, handler: str) -> None:
        self._dispatcher, self._tables = dispatcher, tables
        self._table, self._handler = tables.marker, valid_handler(handler)
        self._ours = self._table.c.handler == self._handler

    def park(self, key: str, body: bytes, headers: Mapping[str, str], reason: str) -> None:
        """Store a request. If one with this key is parked already, keep that one. Refuse one that is too large."""
        kept = json.dumps(headers)
        if len(body) > MAX_BODY or len(kept) > MAX_HEADERS:  # MariaDB would cut them, if it is not in strict mode
            raise RefusedError(f"a parked request has at most {MAX_BODY} bytes of body and {MAX_HEADERS} of headers")
        values: dict[str, object] = {"message_id": key, "handler": self._handler, "reason": _plain(reason)}
        values |= {"headers": kept, "body": body}
        with self._transaction() as connection:
            dialect_of(connection).insert_new(connection, self._table, values)

    def ids(self) -> list[str]:
        """Return the ids of all parked requests, oldest first."""
        oldest = self._table.c.processed_at, self._table.c.message_id
        with self._transaction() as connection:
            return list(connection.scalars(select(self._table.c.message_id).where(self._ours).order_by(*oldest)))

    def find(self, key: str) -> tuple[bytes, dict[str, str], str] | None:
        """Return body, headers and reason of a parked request, or None if it is gone."""
        with self._transaction() as connection:
            row = connection.execute(select(self._table).where(self._is(key))).one_or_none()
        return None if row is None else (bytes(row.body), json.loads(row.headers), row.reason)

    def explain(self, key: str, reason: str) -> None:
        """Store the error of another delivery."""
        with self._transaction() as connection:
            connection.execute(update(self._table).where(self._is(key)).values(reason=_plain(reason)))

    def drop(self, key: str) -> None:
        """Delete a parked request."""
        with self._transaction() as connection:
            connection.execute(delete(self._table).where(self._is(key)))

    def _is(self, key: str) -> ColumnElement[bool]:
        return self._ours & (self._table.c.message_id == key)

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        engine = self._dispatcher.markers_engine
        dialect = prepared(engine)
        with connected(engine) as connection, library_errors(connection, dialect, self._tables):
            yield connection
            connection.commit()


def without_secrets(headers: Mapping[str, str], needed: Collection[str]) -> dict[str, str]:
    """Return the headers without those that may be secrets. The ``needed`` ones, in lower case, stay."""
    return {
        name: value for name, value in headers.items() if name in needed or not any(each in name for each in SECRET)
    }


def _plain(reason: str) -> str:
    """Return a text that a database with any character set can store."""
    return reason.encode("ascii", "backslashreplace").decode()
