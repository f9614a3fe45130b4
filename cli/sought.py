"""The rows that `show` and `forget` are about: the markers of a message, or the records of a command's key."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import click
from sqlalchemy import Engine

from projector_dedup import DedupTables
from projector_dedup.commands import CommandTables
from projector_dedup.commands.record import RecordKey
from projector_dedup.errors import RefusedError
from projector_dedup.maintenance.markers import Marker, find
from projector_dedup.maintenance.records import StoredRecord, find_records
from projector_dedup.maintenance.state import pruned_until
from projector_dedup.maintenance.times import duration, moment_with_zone, moment_without_zone
from projector_dedup.message import printable, valid_message_id

from .options import Deployment, Deployments
from .output import as_object, table


def _valid_scope(_context: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
    try:
        return None if value is None else RecordKey.of("x", value).scope
    except RefusedError as error:
        raise click.BadParameter(str(error)) from None


scope_option = click.option(
    "--scope", callback=_valid_scope, help="With --commands: whose key it is, a tenant say.  [default: nobody's]"
)


def handler_option(words: str) -> Callable[..., Any]:
    """Return the option that names a handler, or an operation, under either word."""
    return click.option("--handler", "--operation", help=words)


def sought(deployments: Deployments, given: str, scope: str | None, handler: str | None) -> Sought:
    """Return what the arguments of a command ask for. Raises `click.UsageError` if no row could be found by them."""
    if scope is not None and not deployments.of_commands:
        raise click.UsageError("--scope is that of a key: say --commands, too")
    try:
        if deployments.of_commands:
            key = RecordKey.of(given, scope)
            return SoughtRecords(key.stored, handler, given, scope)
        return Sought(valid_message_id(given), handler)
    except RefusedError as error:
        raise click.UsageError(str(error)) from None


@dataclass(frozen=True)
class Sought:
    """The markers of one message, or that of one handler; ``stored`` is the id as the table has it."""

    stored: str
    handler: str | None

    plural: ClassVar[str] = "markers"
    done: ClassVar[str] = "was applied by"
    again: ClassVar[str] = "a redelivery {} applied again"

    def __str__(self) -> str:
        return f"message {printable(self.stored)}"

    @property
    def title(self) -> str:
        """The text of what is sought, at the beginning of a line."""
        return capital(str(self))

    def find(self, engine: Engine, tables: DedupTables) -> Sequence[Marker]:
        """Return the rows that are there."""
        return [each for each in self.found(engine, tables) if self.handler in (None, each.handler)]

    def found(self, engine: Engine, tables: DedupTables) -> Sequence[Marker]:
        """Return the rows of every handler that are there."""
        return find(engine, self.stored, tables=tables)

    def show(self, found: Sequence[Marker]) -> None:
        """Print a table with a line for each row."""
        table(
            ("handler", "processed (UTC)", "age", "occurred (UTC)"),
            [
                (
                    printable(each.handler),
                    moment_without_zone(each.processed_at),
                    duration(each.age),
                    "-" if each.occurred_at is None else moment_without_zone(each.occurred_at),
                )
                for each in found
            ],
        )

    def as_object(self, found: Sequence[Marker], *, results: bool) -> dict[str, Any]:
        """Return the rows for JSON."""
        del results  # markers have none
        return {"message_id": self.stored, "markers": [as_object(each) for each in found]}

    def missing(self, deployment: Deployment, engine: Engine) -> str:
        """Return a text that says that no row is there, and why that may be; asks the state table."""
        of = "" if self.handler is None else f" and {deployment.tables.handler} {printable(self.handler)}"
        until = pruned_until(engine, tables=deployment.tables)
        pruned = f"its {deployment.tables.noun} was pruned"
        if until is not None:
            pruned += f", as all from before {moment_with_zone(until)} are"
        return f"no {deployment.tables.noun} of {self}{of} in {deployment}: {self._may_be(pruned)}"

    def _may_be(self, pruned: str) -> str:
        return (
            f"it was not applied, or {pruned}, or the id is written another way (case and white space count; "
            "cloudevents, kafka and hashed make ids of their own)"
        )


@dataclass(frozen=True)
class SoughtRecords(Sought):
    """The records of one key in one scope, or that of one operation."""

    key: str
    scope: str | None

    plural: ClassVar[str] = "records"
    done: ClassVar[str] = "was handled by"
    again: ClassVar[str] = "a command with this key {} handled again"

    def __str__(self) -> str:
        return f"key {printable(self.key)}" + ("" if self.scope is None else f" in scope {printable(self.scope)}")

    def found(self, engine: Engine, tables: DedupTables) -> Sequence[Marker]:
        """Return the records of every operation that are there."""
        assert isinstance(tables, CommandTables)  # noqa: S101  # --commands made them
        return find_records(engine, self.key, scope=self.scope, tables=tables)

    def show(self, found: Sequence[Marker]) -> None:
        """Print a table with a line for each record."""
        table(
            ("operation", "state", "recorded (UTC)", "bytes", "codec"),
            [
                (
                    printable(each.handler),
                    each.state,
                    moment_without_zone(each.processed_at),
                    "-" if each.result is None else f"{len(each.result):,}",
                    printable(each.codec or "-"),
                )
                for each in _records(found)
            ],
            right=("bytes",),
        )

    def as_object(self, found: Sequence[Marker], *, results: bool) -> dict[str, Any]:
        """Return the records for JSON, with their ``results`` if asked for."""
        records = [
            {
                "operation": each.handler,
                "state": each.state,
                "processed_at": each.processed_at,
                "age": each.age,
                "bytes": None if each.result is None else len(each.result),
                "codec": each.codec,
                **({"result": None if each.result is None else _readable(each.result)} if results else {}),
            }
            for each in _records(found)
        ]
        return {"key": self.key, "scope": self.scope, "records": records}

    def _may_be(self, pruned: str) -> str:
        return (
            f"no such command was handled, or {pruned}, or its scope is another (--scope), or the key is written "
            "another way (case and white space count)"
        )


def capital(text: str) -> str:
    """Return the text with its first letter in upper case."""
    return text[0].upper() + text[1:]


def print_results(found: Sequence[Marker]) -> None:
    """Print the stored result of each record: indented if it is JSON, else as text, else as hexadecimal digits."""
    for each in _records(found):
        click.echo(f"\nStored by {printable(each.handler)}:")
        if each.result is None:
            click.echo("nothing")
            continue
        value = _readable(each.result)
        text = value if isinstance(value, str) else json.dumps(value, indent=2, ensure_ascii=False)
        for line in text.splitlines() or [""]:
            click.echo(printable(line))


def _records(found: Sequence[Marker]) -> list[StoredRecord]:
    return [each for each in found if isinstance(each, StoredRecord)]


def _readable(data: bytes) -> Any:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return data.hex()
    try:
        return json.loads(text)
    except ValueError:
        return text
