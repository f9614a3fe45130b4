"""Try an unknown database before its first claim: once for each engine and marker table.

Where a listener may choose another database for each transaction, the table is tried in each (docs/adr/0023).

A marker is claimed twice, ids that look alike are claimed, everything is rolled back, and then nothing may be left.
Only the contract suite sees what needs two connections: that a second claim waits for the first, say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any
from uuid import uuid4
from weakref import WeakKeyDictionary

from sqlalchemy import Table, delete, inspect, select
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError

from .closing import connected
from .dialects import Dialect, Failure
from .errors import MissingTableError, UnsupportedDatabaseError
from .message import MAX_MESSAGE_ID_BYTES
from .tables import DedupTables, full_name

_LONG = "x" * (MAX_MESSAGE_ID_BYTES - 1)
LOOK_ALIKES = ("a", "A", "a ", "e", "\N{LATIN SMALL LETTER E WITH ACUTE}", "1", "01", _LONG + "1", _LONG + "2")

_SAVEPOINT = "projector_dedup_probe"
_STAYS = "what was rolled back stays: AUTOCOMMIT is on, or the table is in an engine without transactions"

# Tables that passed, by schema and name: True in a transaction of the preflight's own, False in somebody else's.
_Place = tuple[str | None, str]
_tried: WeakKeyDictionary[Engine, dict[_Place, bool]] = WeakKeyDictionary()


def try_out(engine: Engine, dialect: Dialect, tables: DedupTables) -> None:
    """Try the marker table on a connection of its own, unless it has passed there before; nothing stays in the table.

    Raises ``UnsupportedDatabaseError`` for the first promise that does not hold, ``MissingTableError`` for no table.
    """
    known, place = _tried.setdefault(engine, {}), _place(engine, tables.marker)
    if known.get(place):
        return
    with connected(engine) as connection:
        preflight = _Preflight(connection, dialect, tables)
        with preflight.taken_back(connection.rollback, connection.commit):
            preflight.begin()
            preflight.run()
            preflight.end()
    known[place] = True


def try_within(connection: Connection, dialect: Dialect, tables: DedupTables, *, moved: bool = False) -> None:
    """Try the marker table in a transaction that somebody else ends, and roll back to a savepoint.

    Nothing is done if the table has passed before, unless the connection may have ``moved`` to another database since.

    Raises ``UnsupportedDatabaseError`` for the first promise that does not hold, ``MissingTableError`` for no table.
    """
    known, place = _tried.setdefault(connection.engine, {}), _place(connection, tables.marker)
    if place in known and not moved:
        return
    preflight = _Preflight(connection, dialect, tables)
    with preflight.taken_back(partial(connection.dialect.do_rollback_to_savepoint, connection, _SAVEPOINT), _nothing):
        preflight.begin()
        connection.dialect.do_savepoint(connection, _SAVEPOINT)
        preflight.run()
    known.setdefault(place, False)


def _place(bind: Engine | Connection, table: Table) -> _Place:
    schemas = bind.get_execution_options().get("schema_translate_map") or {}
    return schemas.get(table.schema, table.schema), table.name


def _nothing() -> None:
    """Commit nothing: the transaction is not the preflight's own."""


class _Preflight:
    """One trial of a marker table, under a handler's name of its own, so that those of several workers do not meet."""

    def __init__(self, connection: Connection, dialect: Dialect, tables: DedupTables) -> None:
        self._connection, self._dialect, self._tables = connection, dialect, tables
        self._marker = tables.marker
        self._handler = f"projector_dedup probe {uuid4().hex}"
        self._statement = dialect.claim_statement(tables.marker, bounded=False)

    def begin(self) -> None:
        """Begin a transaction as a claim does. Raises ``MissingTableError`` if there is no table."""
        schema = self._connection.schema_for_object(self._marker)
        if not inspect(self._connection).has_table(self._marker.name, schema=schema):
            raise MissingTableError(self._tables.missing(self._connection))
        self._dialect.begin(self._connection, self._marker, None)

    def run(self) -> None:
        """Claim a marker, claim it again, and claim ids that look alike; raise if the answers are wrong."""
        self._must(self._claim("probe"), "a first marker is taken for a duplicate")
        self._must(
            not self._dialect.claim(self._connection, self._statement, self._marker, self._key("probe")),
            "it accepts one marker twice: the table has no unique index over (message_id, handler)",
        )
        merged = [each for each in LOOK_ALIKES if not self._claim(each)]
        self._must(not merged, f"it takes different ids for one, such as {merged[:1]}: compare them byte for byte")

    def end(self) -> None:
        """Roll back, claim, and see that ``is_marked`` tells the transaction of the claim from the one after it."""
        self._connection.rollback()
        self._dialect.begin(self._connection, self._marker, None)
        self._must(self._claim("probe"), _STAYS)
        for ours in (True, False):
            told = self._dialect.is_marked(self._connection, self._marker, self._key("probe"))
            self._must(told is ours, "the transaction of a claim cannot be told from another by its savepoint")
            self._connection.rollback()

    @contextmanager
    def taken_back(self, undo: Callable[[], None], settle: Callable[[], None]) -> Iterator[None]:
        """Run ``undo`` after the block, then raise if a marker is left; what is left is deleted, and ``settle`` called.

        A database error of the block is raised as ``UnsupportedDatabaseError`` if no retry would mend it, or as
        ``MissingTableError``; any other error as it is.
        """
        try:
            yield
        except BaseException as error:
            with suppress(DBAPIError):
                undo()
            with suppress(DBAPIError):
                self._delete_what_is_left(settle)
            if not isinstance(error, DBAPIError) or self._dialect.classify(error) is Failure.TRANSIENT:
                raise
            if self._dialect.classify(error) is Failure.NO_TABLE:
                raise MissingTableError(self._tables.missing(self._connection)) from error
            raise self._refused(f"what a claim needs ends in {type(error).__name__}, see the cause") from error
        undo()
        self._must(not self._delete_what_is_left(settle), _STAYS)

    def _delete_what_is_left(self, settle: Callable[[], None]) -> bool:
        ours = self._marker.c.handler == self._handler
        if self._connection.execute(select(self._marker.c.handler).where(ours)).first() is None:
            return False
        self._connection.execute(delete(self._marker).where(ours))
        settle()
        return True

    def _claim(self, message_id: str) -> bool:
        try:
            return self._dialect.claim(self._connection, self._statement, self._marker, self._key(message_id))
        except DBAPIError as error:
            if self._dialect.classify(error) is Failure.UNIQUE:
                return False
            raise

    def _key(self, message_id: str) -> dict[str, Any]:
        return {"message_id": message_id, "handler": self._handler, "occurred_at": None}

    def _must(self, holds: bool, otherwise: str) -> None:
        if not holds:
            raise self._refused(otherwise)

    def _refused(self, why: str) -> UnsupportedDatabaseError:
        spoken, table = self._connection.dialect, full_name(self._marker, self._connection)
        return UnsupportedDatabaseError(
            f"{spoken.name} with the driver {spoken.driver} was tried out on {table}, and would lose or double "
            f"messages: {why}. Nothing was applied; docs/bring-your-database.md says what is needed"
        )
