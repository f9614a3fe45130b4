"""`idempotency show`, `forget` and `rename`: the markers of a message or a handler, or the records of commands."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import click
from sqlalchemy import Engine

from projector_dedup import DedupTables
from projector_dedup.commands import CommandTables
from projector_dedup.commands.record import RecordKey
from projector_dedup.effects import EffectTables
from projector_dedup.errors import RefusedError
from projector_dedup.maintenance.effects import StoredEffect, effects_of
from projector_dedup.maintenance.rows import (
    MAX_BATCH_SIZE,
    Marker,
    Renamed,
    StoredRecord,
    find,
    find_records,
    forget_scope,
)
from projector_dedup.maintenance.rows import forget as delete_markers
from projector_dedup.maintenance.rows import rename as rename_markers
from projector_dedup.maintenance.state import duration, moment_with_zone, moment_without_zone, pruned_until
from projector_dedup.message import printable, valid_message_id

from .options import EXIT_CODES, Deployment, database_options
from .output import (
    Failed,
    between_batches,
    capital,
    confirmed,
    json_option,
    print_json,
    say,
    table,
    want_terminal,
)


def _valid_scope(_context: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
    try:
        return None if value is None else RecordKey.of("x", value).scope
    except RefusedError as error:
        raise click.BadParameter(str(error)) from None


_scope_option = click.option(
    "--scope",
    callback=_valid_scope,
    help="With --commands or --effects: whose key it is, a tenant say.  [default: nobody's]",
)


def _handler_option(words: str) -> Callable[..., Any]:
    return click.option("--handler", "--operation", "--effect", help=words)


def _asked_for(tables: DedupTables) -> str:
    return "effect was armed" if isinstance(tables, EffectTables) else "command was handled"


@dataclass(frozen=True)
class _Wanted:
    """The rows that a command is about: the markers of one message, or the records of one key in one scope."""

    deployment: Deployment
    given: str
    scope: str | None
    handler: str | None
    stored: str  #: the id as the table has it

    def __str__(self) -> str:
        if not self.deployment.tables.keyed:
            return f"message {printable(self.given)}"
        return f"key {printable(self.given)}" + ("" if self.scope is None else f" in scope {printable(self.scope)}")

    def found(self, engine: Engine) -> Sequence[Marker | StoredEffect]:
        """Return the rows of every handler."""
        tables = self.deployment.tables
        if isinstance(tables, EffectTables):
            return effects_of(engine, self.given, self.scope, tables=tables)
        if isinstance(tables, CommandTables):
            return find_records(engine, self.given, scope=self.scope, tables=tables)
        return find(engine, self.given, tables=tables)

    def chosen(self, engine: Engine) -> Sequence[Marker | StoredEffect]:
        """Return the rows of the handler that was asked for, or of every one.

        Raises `Failed` if there is none; its text says why that may be.
        """
        found = [each for each in self.found(engine) if self.handler in (None, each.handler)]
        if found:
            return found
        tables = self.deployment.tables
        of = "" if self.handler is None else f" and {tables.handler} {printable(self.handler)}"
        until = pruned_until(engine, tables=tables)
        pruned = f"its {tables.noun} was pruned"
        pruned += "" if until is None else f", as all from before {moment_with_zone(until)} are"
        written = "is written another way (case and white space count"
        why = (
            f"no such {_asked_for(tables)}, or {pruned}, or its scope is another (--scope), or the key {written})"
            if tables.keyed
            else f"it was not applied, or {pruned}, or the id {written}; cloudevents, kafka and hashed make ids of "
            "their own)"
        )
        raise Failed(f"no {tables.noun} of {self}{of} in {self.deployment}: {why}")


def _wanted(deployment: Deployment, given: str, scope: str | None, handler: str | None) -> _Wanted:
    """Return what the arguments of a command ask for. Raises `click.UsageError` if no row could be found by them."""
    keyed = deployment.tables.keyed
    if scope is not None and not keyed:
        raise click.UsageError("--scope is that of a key: say --commands, too, or --effects")
    try:
        stored = RecordKey.of(given, scope).stored if keyed else valid_message_id(given)
    except RefusedError as error:
        raise click.UsageError(str(error)) from None
    return _Wanted(deployment, given, scope, handler, stored)


@click.command(epilog=EXIT_CODES)
@database_options
@click.argument("message_id", metavar="ID")
@_handler_option("Only the marker of this handler, or the record of this operation.  [default: every one]")
@_scope_option
@click.option("--result", "results", is_flag=True, help="With --commands: print what is stored, as text.")
@json_option
def show(
    deployment: Deployment, message_id: str, handler: str | None, scope: str | None, results: bool, as_json: bool
) -> None:
    """Tell which handlers applied the message ID, and when.

    The id is what the handler's log lines call the message: case and white space count. With --commands, ID is the
    key of a command, and its records are told: result, rejected, or result not stored.

    \b
    Examples:
      idempotency show payment-1 --database-url sqlite:///read_model.db
      idempotency show --json 0198f3c2-5d1e-7a55-b1f0-000000000001
      idempotency show req-abc --commands --scope tenant-7 --result
    """
    if isinstance(deployment.tables, EffectTables):
        raise click.UsageError("an effect is shown by `idempotency effects show KEY`")
    if results and not deployment.tables.keyed:
        raise click.UsageError("--result is that of a command: say --commands, too")
    wanted = _wanted(deployment, message_id, scope, handler)
    with deployment.opened() as engine:
        found = [each for each in wanted.chosen(engine) if isinstance(each, Marker)]
    if as_json:
        print_json({**deployment.place, **_as_object(wanted, found, results=results)})
        return
    say(f"{capital(str(wanted))}:")
    _print(found)
    if results:
        for each in found:
            _print_result(each)


def _print(found: Sequence[Marker | StoredEffect]) -> None:
    """Print a table with a line for each row."""
    effects = [each for each in found if isinstance(each, StoredEffect)]
    if effects:
        table(
            ("effect", "state", "armed (UTC)"),
            [(printable(each.effect), each.state, moment_without_zone(each.armed_at)) for each in effects],
        )
        return
    records = [each for each in found if isinstance(each, StoredRecord)]
    if not records:
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
                if isinstance(each, Marker)
            ],
        )
        return
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
            for each in records
        ],
        right=("bytes",),
    )


def _as_object(wanted: _Wanted, found: Sequence[Marker], *, results: bool) -> dict[str, Any]:
    if not wanted.deployment.tables.keyed:
        return {"message_id": wanted.stored, "markers": [asdict(each) for each in found]}
    records = [
        {
            "operation": each.handler,
            "state": each.state,
            "processed_at": each.processed_at,
            "age": each.age,
            "bytes": None if each.result is None else len(each.result),
            "codec": each.codec,
            **({"result": readable(each.result)} if results else {}),
        }
        for each in found
        if isinstance(each, StoredRecord)
    ]
    return {"key": wanted.given, "scope": wanted.scope, "records": records}


def _print_result(found: Marker) -> None:
    """Print the stored result of a record: indented if it is JSON, else as text, else as hexadecimal digits."""
    assert isinstance(found, StoredRecord)  # noqa: S101  # --commands found it
    click.echo(f"\nStored by {printable(found.handler)}:")
    if found.result is None:
        click.echo("nothing")
        return
    value = readable(found.result)
    text = value if isinstance(value, str) else json.dumps(value, indent=2, ensure_ascii=False)
    for line in text.splitlines() or [""]:
        click.echo(printable(line))


def readable(data: bytes | None) -> Any:
    """Return stored bytes for printing: what JSON says, else the text, else hexadecimal digits."""
    if data is None:
        return None
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return data.hex()
    try:
        return json.loads(text)
    except ValueError:
        return text


@click.command(epilog=EXIT_CODES)
@database_options
@click.argument("message_id", metavar="[ID]", required=False)
@_handler_option("Only the marker of this handler, or the record of this operation.  [default: every handler's]")
@_scope_option
@click.option("--yes", is_flag=True, help="Do not ask.")
def forget(deployment: Deployment, message_id: str | None, handler: str | None, scope: str | None, yes: bool) -> None:
    """Delete the markers of the message ID.

    A redelivery is applied again then. What was applied stays applied: first take it out of the read model, or the
    message counts twice. The command shows what it is about and asks, unless --yes is given.

    With --commands, ID is the key of a command of the --operation, and its record is deleted: asked for again, the
    command is handled again. Without ID, all records of the --scope are deleted. With --effects the same is done to
    effects, which are sent again when they are armed again; one that is not finished is refused.

    \b
    Examples:
      idempotency forget payment-1 --database-url sqlite:///read_model.db
      idempotency forget payment-1 --handler account-totals.add_payment --yes
      idempotency forget req-abc --commands --operation shop.place --scope tenant-7
      idempotency forget --commands --scope tenant-7
    """
    wanted = None if message_id is None else _wanted(deployment, message_id, scope, handler)
    keyed = deployment.tables.keyed
    if wanted is None and (not keyed or scope is None):
        raise click.UsageError("give the ID that is to be forgotten; or --commands and --scope, for all of a scope")
    if wanted is not None and keyed and handler is None:
        raise click.UsageError("say which --operation the key was given to: another one may have the same key")
    if not yes:
        want_terminal()
    with deployment.opened() as engine:
        if wanted is not None:
            _forget_rows(wanted, engine, yes=yes)
        else:
            _forget_scope(deployment, engine, str(scope), handler, yes=yes)


def _forget_rows(wanted: _Wanted, engine: Engine, *, yes: bool) -> None:
    deployment, tables = wanted.deployment, wanted.deployment.tables
    done, again = "was applied by", "a redelivery {} applied again"
    if isinstance(tables, EffectTables):
        done, again = "was armed for", "an effect with this key {} sent again when it is armed again"
    elif tables.keyed:
        done, again = "was handled by", "a command with this key {} handled again"
    found = wanted.chosen(engine)
    say(f"{capital(str(wanted))} {done}:")
    _print(found)
    if not yes and not confirmed(f"Delete these {tables.noun}s? {capital(again.format('will be'))}"):
        raise Failed(f"nothing was deleted in {deployment}")
    deleted = sum(delete_markers(engine, wanted.stored, handler=each.handler, tables=tables) for each in found)
    names, rest = (", ".join(printable(each.handler) for each in some) for some in (found, wanted.found(engine)))
    but = f", unless that {tables.handler} is known by another of the names that are left: {rest}" if rest else ""
    say(f"Deleted {deployment.rows(deleted)}. {capital(again.format('is'))}, by {names}{but}.")


def _forget_scope(deployment: Deployment, engine: Engine, scope: str, operation: str | None, *, yes: bool) -> None:
    tables = deployment.tables
    of = f"scope {printable(scope)}" + ("" if operation is None else f", operation {printable(operation)}")
    question = f"Delete all {tables.noun}s of {of}? Their commands will be handled again when they are asked for again"
    if isinstance(tables, EffectTables):
        question = f"Delete all finished effects of {of}? They will be sent again when they are armed again"
    if not yes and not confirmed(question):
        raise Failed(f"nothing was deleted in {deployment}")
    with between_batches("Deleted") as after:
        deleted = forget_scope(engine, scope, operation=operation, tables=tables, on_batch=after)
    if not deleted:
        raise Failed(f"no {tables.noun} of {of} in {deployment}")
    say(f"Deleted {deployment.rows(deleted)} of {of}.")


@click.command(epilog=EXIT_CODES)
@database_options
@click.argument("old")
@click.argument("new")
@click.option(
    "--remove-old",
    is_flag=True,
    help="Delete the markers of OLD as well, as soon as they are copied. Only when no code of the old name will run "
    "again, a deploy that is rolled back included; else let cleanup delete them in its time.",
)
@click.option(
    "--batch-size",
    type=click.IntRange(1, MAX_BATCH_SIZE),
    default=1000,
    show_default=True,
    help="Markers copied in one transaction. Smaller batches hold locks for a shorter time.",
)
@click.option("--dry-run", is_flag=True, help="Count; write nothing.")
@click.option("--yes", is_flag=True, help="Do not ask before --remove-old.")
def rename(
    deployment: Deployment, old: str, new: str, remove_old: bool, batch_size: int, dry_run: bool, yes: bool
) -> None:
    """Copy the markers of the handler OLD to the name NEW, so that `formerly` can go from the code.

    Run it when every process knows the new name. Deliveries and cleanup may go on meanwhile. Every batch commits by
    itself, so a run may be interrupted at any time and run again.

    \b
    Examples:
      idempotency rename billing.projections.Totals.add account-totals.add --dry-run
      idempotency rename billing.projections.Totals.add account-totals.add
    """
    tables, so_far = deployment.tables, 0
    question = f"Will no code of the name {old} run again? Its {tables.noun}s will be deleted"
    if remove_old and not dry_run and not yes and not confirmed(question):
        raise Failed("nothing was renamed")
    with deployment.opened() as engine, between_batches("Copied") as after:

        def progress(renamed: Renamed) -> None:
            nonlocal so_far
            more, so_far = renamed.copied - so_far, renamed.copied
            after(more)

        done = rename_markers(
            engine,
            old,
            new,
            tables=tables,
            batch_size=batch_size,
            remove_old=remove_old,
            dry_run=dry_run,
            on_batch=progress,
        )
    if done == Renamed():
        say(f"Nothing is left under {old}.")
        return
    would = ("Would have copied", "Would have removed") if dry_run else ("Copied", "Removed")
    line = f"{would[0]} {deployment.rows(done.copied)} of {old} to {new}; {done.already:,} had one already."
    say(f"{line} {would[1]} {deployment.rows(done.removed)} of {old}." if done.removed else line)
