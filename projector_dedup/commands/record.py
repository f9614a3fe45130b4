"""The record of a command: its tables, its key, and the statements that write and read its outcome."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from typing import Any, ClassVar
from uuid import UUID

from sqlalchemy import Column, MetaData, Row, Select, SmallInteger, Table, Update, bindparam, case, select, update

from ..dialects import Dialect, LastChange, LastStatement
from ..dialects.columns import exact_bytes, exact_text
from ..errors import InvalidMessageIdError, OvertakenError
from ..message import MAX_MESSAGE_ID_BYTES, printable, valid_message_id
from ..tables import DedupTables, key_tables
from .errors import InvalidKeyError, KeyReusedError, ResultUnreadableError, UnusableKeyError

DEFAULT_NAME = "processed_command"
MAX_CODEC_BYTES = 64
RESULT, REJECTED, DEFAULT = 1, 2, 3  #: outcomes: a result, a rejection, a result that ``default=`` makes each time


@dataclass(frozen=True, repr=False)
class CommandTables(DedupTables):
    """The record table and the state table of commands, as ``make_command_tables`` returns them.

    A record has the key columns of a marker: ``handler`` is the operation, ``message_id`` is the scope and the key.
    """

    maker: ClassVar[str] = "make_command_tables"
    default_name: ClassVar[str] = DEFAULT_NAME
    option: ClassVar[str] = " --commands"
    revisions: ClassVar[tuple[str, ...]] = ("projector_dedup_0002",)
    noun: ClassVar[str] = "record"
    handler: ClassVar[str] = "operation"
    subject: ClassVar[str] = "commands"
    keyed: ClassVar[bool] = True

    @staticmethod
    def make(metadata: MetaData, name: str, schema: str | None) -> CommandTables:
        """Return tables of this kind, added to ``metadata``."""
        return make_command_tables(metadata, name, schema)


def make_command_tables(metadata: MetaData, name: str = DEFAULT_NAME, schema: str | None = None) -> CommandTables:
    """Add the record table ``name`` and the state table ``<name>_state`` to your ``metadata``, and return both.

    ``schema`` is the database schema, or None for the default one. If you give a name or a schema, pass the result as
    ``tables=`` to ``Commands``. One database may have several pairs of tables, each with its own retention.

    Raises the errors of ``make_tables``.
    """
    tables = key_tables(metadata, name, schema)
    for column in (
        Column("fingerprint", exact_bytes(), nullable=True),  # NULL until the command has an outcome
        Column("outcome", SmallInteger(), nullable=True),
        Column("codec", exact_text(MAX_CODEC_BYTES), nullable=True),
        Column("result", exact_bytes(), nullable=True),
    ):
        tables.marker.append_column(column)
    return CommandTables(tables.marker, tables.state)


default_command_tables = make_command_tables(MetaData())


@dataclass(frozen=True)
class Record:
    """The outcome of one command, as it is stored. ``recorded_at`` is None for the first caller."""

    outcome: int
    codec: str
    data: bytes | None
    fingerprint: bytes | None
    recorded_at: datetime | None = None


@dataclass(frozen=True)
class RecordKey:
    """The key of a record: the caller's key and scope, and the text under which the record is stored."""

    key: str
    scope: str | None
    stored: str

    @classmethod
    def of(cls, key: object, scope: object) -> RecordKey:
        """Return the key of a caller in a scope. Raises ``InvalidKeyError`` if one is not text, or is too long."""
        text = str(key) if isinstance(key, UUID) else key
        within = str(scope) if isinstance(scope, UUID) else scope
        if not isinstance(text, str) or not text:
            raise InvalidKeyError(
                f"the key of a command must be the caller's text or UUID, not {_shown(key)}; with key=None the library "
                "records nothing, and a repeated command runs again"
            )
        if within is not None and (not isinstance(within, str) or not within):
            raise InvalidKeyError(
                f"the scope of a command must be a text or a UUID, such as the tenant, not {_shown(scope)}"
            )
        stored = f"{len(within or '')}:{within or ''}{text}"  # the length keeps scopes and keys apart
        try:
            return cls(text, within, valid_message_id(stored))
        except InvalidMessageIdError as error:
            raise UnusableKeyError(
                f"the library stores scope and key of a command as one text of at most {MAX_MESSAGE_ID_BYTES} bytes; "
                f"use shorter ones ({error})"
            ) from None

    @classmethod
    def read(cls, stored: str) -> RecordKey:
        """Return the key of a text that a row has."""
        length, _, text = stored.partition(":")
        size = int(length) if re.fullmatch("0|[1-9][0-9]{0,2}", length) else len(text)
        if size >= len(text):
            return cls(stored, None, stored)  # a row of somebody else
        return cls(text[size:], text[:size] or None, stored)

    def __str__(self) -> str:
        scope = "" if self.scope is None else f" in scope {printable(self.scope)[:80]}"
        return f"key {printable(self.key)[:80]}{scope}"


def _shown(value: object) -> str:
    return "an empty text" if value == "" else type(value).__name__


def recording(dialect: Dialect, tables: CommandTables, stored: str, names: Sequence[str], record: Record) -> LastChange:
    """Return the statement that writes the outcome into the claimed row of each of the operation's ``names``."""
    statement = _recording(dialect, tables.marker, len(names))
    return LastChange(statement, _values(stored, names, record), len(names))


def recording_other_names(tables: CommandTables, stored: str, names: Sequence[str], record: Record) -> LastStatement:
    """Return the statement that writes a known outcome into rows of the same command that have none."""
    return LastStatement(_update(tables.marker, len(names)), _values(stored, names, record))


def recalling(tables: CommandTables, stored: str, names: Sequence[str]) -> LastStatement:
    """Return the statement that reads the record of a command that was handled under one of ``names``."""
    return LastStatement(_recalling(tables.marker, len(names)), {"stored": stored, **_named(names)})


def recalled(row: Row[Any] | None, fingerprint: bytes | None, key: RecordKey, operation: str) -> Record:
    """Return the record that was read. ``fingerprint`` is that of the command; None compares nothing.

    Raises ``KeyReusedError`` if the record belongs to another command, ``ResultUnreadableError`` if it was committed
    without an outcome, and ``OvertakenError`` if it was deleted meanwhile: then run the unit of work again.
    """
    if row is None:
        raise OvertakenError("the record of the command was deleted, or is not visible yet; run the unit of work again")
    if row.outcome is None:
        raise ResultUnreadableError(
            f"the key {printable(key.key)[:80]} of {operation} was claimed and committed without an outcome, perhaps "
            "by begin_command() without record(); check whether the command was done, then delete the record with "
            "`idempotency forget`"
        )
    if fingerprint is not None and row.fingerprint is not None and bytes(row.fingerprint) != fingerprint:
        raise KeyReusedError(
            f"the key {printable(key.key)[:80]} of {operation} was used for another command before; nothing ran. Give "
            "each command its own key, and use a key again only with the same command"
        )
    data = None if row.result is None else bytes(row.result)
    moment: datetime = row.processed_at
    in_utc = moment.astimezone(UTC) if moment.tzinfo else moment.replace(tzinfo=UTC)  # drivers without zones give UTC
    return Record(row.outcome, row.codec, data, row.fingerprint, in_utc)


def _values(stored: str, names: Sequence[str], record: Record) -> dict[str, Any]:
    return {
        "stored": stored,
        "the_fingerprint": record.fingerprint,
        "the_outcome": record.outcome,
        "the_codec": record.codec,
        "the_result": record.data,
        **_named(names),
    }


def _named(names: Sequence[str]) -> dict[str, str]:
    return {f"name_{number}": name for number, name in enumerate(names)}


def _is_record(record: Table, names: int) -> Any:
    given = [bindparam(f"name_{number}", type_=record.c.handler.type) for number in range(names)]
    return (record.c.message_id == bindparam("stored", type_=record.c.message_id.type)) & record.c.handler.in_(given)


@cache
def _recording(dialect: Dialect, record: Table, names: int) -> Any:
    return dialect.changing(_update(record, names), names)


@cache
def _update(record: Table, names: int) -> Update:
    return (
        update(record)
        .where(_is_record(record, names), record.c.outcome.is_(None))  # never overwrite an outcome
        .values(
            fingerprint=bindparam("the_fingerprint", type_=record.c.fingerprint.type),
            outcome=bindparam("the_outcome", type_=record.c.outcome.type),
            codec=bindparam("the_codec", type_=record.c.codec.type),
            result=bindparam("the_result", type_=record.c.result.type),
        )
    )


@cache
def _recalling(record: Table, names: int) -> Select[Any]:
    columns = (record.c[name] for name in ("fingerprint", "outcome", "codec", "result", "processed_at"))
    found = select(*columns).where(_is_record(record, names))
    if names > 1:  # this claim may have inserted rows under some of the names; these have no outcome yet
        found = found.order_by(case((record.c.outcome.is_(None), 1), else_=0)).limit(1)
    return found
