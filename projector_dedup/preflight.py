"""Try an unknown database before its first claim: once for each engine and marker table.

Where a listener may choose another database for each transaction, the table is tried in each (docs/adr/0023).

A marker is claimed twice, ids that look alike are claimed, everything is rolled back, and it is looked whether anything
is left. What one connection cannot see, that a second claim waits for the first say, the contract suite sees.
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

# What held, by schema and name: in a transaction of the probe's own (True), or in somebody else's (False).
_Place = tuple[str | None, str]
_tried: WeakKeyDictionary[Engine, dict[_Place, bool]] = WeakKeyDictionary()


def try_out(engine: Engine, dialect: Dialect, tables: DedupTables) -> None:
    """Raise ``UnsupportedDatabaseError`` for the first thing that does not hold. Nothing stays in the table."""
    known, place = _tried.setdefault(engine, {}), _place(engine, tables.marker)
    if known.get(place):
        return
    with connected(engine) as connection:
        probe = _Probe(connection, dialect, tables)
        with probe.taken_back(connection.rollback, connection.commit):
            probe.begin()
            probe.run()
            probe.end()
    known[place] = True


def try_within(connection: Connection, dialect: Dialect, tables: DedupTables, *, moved: bool = False) -> None:
    """Do the same in a transaction that somebody else ends: up to a savepoint of its own.

    If the connection may have ``moved`` to another database, what is known by the table's name does not count.
    """
    known, place = _tried.setdefault(connection.engine, {}), _place(connection, tables.marker)
    if place in known and not moved:
        return
    probe = _Probe(connection, dialect, tables)
    with probe.taken_back(partial(connection.dialect.do_rollback_to_savepoint, connection, _SAVEPOINT), _nothing):
        probe.begin()
        connection.dialect.do_savepoint(connection, _SAVEPOINT)
        probe.run()
    known.setdefault(place, False)


def _place(bind: Engine | Connection, table: Table) -> _Place:
    schemas = bind.get_execution_options().get("schema_translate_map") or {}
    return schemas.get(table.schema, table.schema), table.name


def _nothing() -> None:
    """There is nothing to commit for the probe."""


class _Probe:
    """Under a handler's name of its own, so that probes of several workers do not meet."""

    def __init__(self, connection: Connection, dialect: Dialect, tables: DedupTables) -> None:
        self._connection, self._dialect, self._tables = connection, dialect, tables
        self._marker = tables.marker
        self._handler = f"projector_dedup probe {uuid4().hex}"
        self._statement = dialect.claim_statement(tables.marker, bounded=False)

    def begin(self) -> None:
        """As the claims do; the table has to be there."""
        schema = self._connection.schema_for_object(self._marker)
        if not inspect(self._connection).has_table(self._marker.name, schema=schema):
            raise MissingTableError(self._tables.missing(self._connection))
        self._dialect.begin(self._connection, self._marker, None)

    def run(self) -> None:
        """Claim, claim again, claim what looks alike."""
        self._must(self._claim("probe"), "a first marker is taken for a duplicate")
        self._must(
            not self._dialect.claim(self._connection, self._statement, self._marker, self._key("probe")),
            "it accepts one marker twice: the table has no unique index over (message_id, handler)",
        )
        merged = [each for each in LOOK_ALIKES if not self._claim(each)]
        self._must(not merged, f"it takes different ids for one, such as {merged[:1]}: compare them byte for byte")

    def end(self) -> None:
        """As a unit of work ends: a claim, which is asked for and rolled back, and then not there to be asked for."""
        self._connection.rollback()
        self._dialect.begin(self._connection, self._marker, None)
        self._must(self._claim("probe"), _STAYS)
        for ours in (True, False):
            told = self._dialect.is_marked(self._connection, self._marker, self._key("probe"))
            self._must(told is ours, "the transaction of a claim cannot be told from another by its savepoint")
            self._connection.rollback()

    @contextmanager
    def taken_back(self, undo: Callable[[], None], settle: Callable[[], None]) -> Iterator[None]:
        """Undo what was done in the block, and see that it is undone."""
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
