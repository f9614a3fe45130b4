"""`idempotency show`, `forget` and `rename` print, delete and copy markers, records of commands, and effects."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import click
from sqlalchemy import Engine

from projector_dedup.bodies import SHOWN
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
)
from projector_dedup.maintenance.rows import forget as delete_markers
from projector_dedup.maintenance.rows import rename as rename_markers
from projector_dedup.maintenance.state import duration, moment_with_zone, moment_without_zone, pruned_until
from projector_dedup.message import printable, stored_id
from projector_dedup.tables import DedupTables

from .options import EXIT_CODES, Deployment, WholeNumber, database_options
from .output import (
    Failed,
    between_batches,
    capital,
    confirmed,
    harmless,
    json_option,
    print_json,
    readable_json,
    require_terminal,
    say,
    table,
)


def _valid_scope(_context: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
    try:
        return None if value is None else RecordKey.of("x", value).scope
    except RefusedError as error:
        raise click.BadParameter(str(error)) from None


_scope_option = click.option(
    "--scope",
    callback=_valid_scope,
    help="With --commands or --effects: the owner of the key, such as a tenant.  [default: no scope]",
)


_source_option = click.option(
    "--source", help="The source that the consumer of the message declares (source=).  [default: no source]"
)


def _handler_option(words: str) -> Callable[..., Any]:
    return click.option("--handler", "--operation", "--effect", help=words)


def _asked_for(tables: DedupTables) -> str:
    return "effect was armed" if isinstance(tables, EffectTables) else "command was handled"


@dataclass(frozen=True)
class _Wanted:
    """The rows that the user asked for: the markers of one message, or the records of one key in one scope."""

    deployment: Deployment
    given: str
    source: str | None
    scope: str | None
    handler: str | None
    stored: str  #: the id as it is stored

    def __str__(self) -> str:
        if not self.deployment.tables.keyed:
            message = f"message {printable(self.given)}"
            return message if self.source is None else f"{message} of source {printable(self.source)}"
        return f"key {printable(self.given)}" + ("" if self.scope is None else f" in scope {printable(self.scope)}")

    def found(self, engine: Engine) -> Sequence[Marker | StoredEffect]:
        """Return the rows of all handlers."""
        tables = self.deployment.tables
        if isinstance(tables, EffectTables):
            return effects_of(engine, self.given, self.scope, tables=tables)
        if isinstance(tables, CommandTables):
            return find_records(engine, self.given, scope=self.scope, tables=tables)
        return find(engine, self.stored, tables=tables)

    def chosen(self, engine: Engine) -> Sequence[Marker | StoredEffect]:
        """Return the rows of the given handler, or of all handlers.

        Raises `Failed`, with the possible reasons, if there is none.
        """
        found = [each for each in self.found(engine) if self.handler in (None, each.handler)]
        if found:
            return found
        tables = self.deployment.tables
        of = "" if self.handler is None else f" and {tables.handler} {printable(self.handler)}"
        until = pruned_until(engine, tables=tables)
        pruned = f"cleanup has deleted its {tables.noun}"
        pruned += "" if until is None else f" (it may have deleted those from before {moment_with_zone(until)})"
        written = "is spelled differently (case and white space count"
        why = (
            f"no such {_asked_for(tables)}, or {pruned}, or it has another scope (--scope), or the key {written})"
            if tables.keyed
            else f"it was not applied, or {pruned}, or it has another source (--source), or the id {written}; "
            "cloudevents, kafka and hashed build their own ids)"
        )
        raise Failed(f"there is no {tables.noun} of {self}{of} in {self.deployment}: {why}")


def _wanted(deployment: Deployment, given: str, source: str | None, scope: str | None, handler: str | None) -> _Wanted:
    """Return the rows that the arguments ask for. Raises `click.UsageError` for arguments that fit no row."""
    keyed = deployment.tables.keyed
    if scope is not None and not keyed:
        raise click.UsageError("--scope is only for the keys of commands and effects; add --commands or --effects")
    if source is not None and keyed:
        raise click.UsageError("--source is only for messages; the owner of a key is its --scope")
    try:
        stored = RecordKey.of(given, scope).stored if keyed else stored_id(given, source)
    except RefusedError as error:
        raise click.UsageError(str(error)) from None
    return _Wanted(deployment, given, source, scope, handler, stored)


@click.command(epilog=EXIT_CODES)
@database_options
@click.argument("message_id", metavar="ID")
@_handler_option("Only the marker of this handler, or the record of this operation.  [default: all]")
@_source_option
@_scope_option
@click.option("--result", "results", is_flag=True, help="With --commands: print the stored result as text.")
@json_option
def show(
    deployment: Deployment,
    message_id: str,
    handler: str | None,
    source: str | None,
    scope: str | None,
    results: bool,
    as_json: bool,
) -> None:
    """Print which handlers applied the message ID, and when.

    Use it to find out whether a message was applied. The log lines of the library contain the id; case and white space
    count. If its consumer declares a source, give that too: --source. With --commands, ID is the key of a command, and
    the output is the state of its records: result, rejected, or result not stored.

    \b
    Examples:
      idempotency show payment-1 --database-url sqlite:///read_model.db
      idempotency show --json 0198f3c2-5d1e-7a55-b1f0-000000000001
      idempotency show 7 --source payments
      idempotency show req-abc --commands --scope tenant-7 --result
    """
    if isinstance(deployment.tables, EffectTables):
        raise click.UsageError("to print an effect, run `idempotency effects show KEY`")
    if results and not deployment.tables.keyed:
        raise click.UsageError("--result is only for commands; add --commands")
    wanted = _wanted(deployment, message_id, source, scope, handler)
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
            ("handler", "processed (UTC)", "age", "occurred (UTC)", "digest"),
            [
                (
                    printable(each.handler),
                    moment_without_zone(each.processed_at),
                    duration(each.age),
                    "-" if each.occurred_at is None else moment_without_zone(each.occurred_at),
                    "-" if each.digest is None else each.digest[:SHOWN],
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
    assert isinstance(found, StoredRecord)  # noqa: S101  # --result needs --commands
    click.echo(f"\nStored by {printable(found.handler)}:")
    if found.result is None:
        click.echo("nothing")
        return
    value = readable(found.result)
    click.echo(harmless(value) if isinstance(value, str) else readable_json(value))


def readable(data: bytes | None) -> Any:
    """Return stored bytes for printing: the JSON value, else the text, else hexadecimal digits."""
    if data is None:
        return None
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return data.hex()
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # the second: it is nested too deeply
        return text


@click.command(epilog=EXIT_CODES, short_help="Delete the markers of a message.")
@database_options
@click.argument("message_id", metavar="ID")
@_handler_option("Only the marker of this handler, or the record of this operation.  [default: all handlers]")
@_source_option
@_scope_option
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
def forget(
    deployment: Deployment,
    message_id: str,
    handler: str | None,
    source: str | None,
    scope: str | None,
    yes: bool,
) -> None:
    """Delete the markers of the message ID, so that a redelivery is applied again.

    Use it to apply a message again. The read model keeps what the message has changed, so first undo that, or the
    message counts twice. The command prints the markers and asks for confirmation, unless you give --yes.

    With --commands, ID is the key of a command of the --operation. The command deletes its record, so that the next
    call with this key runs the command again. With --effects, it deletes a finished effect in the same way, so that the
    next `arm` sends it again. It refuses an unfinished effect.

    \b
    Examples:
      idempotency forget payment-1 --database-url sqlite:///read_model.db
      idempotency forget payment-1 --handler account-totals.add_payment --yes
      idempotency forget req-abc --commands --operation shop.place --scope t7
    """
    wanted, tables = _wanted(deployment, message_id, source, scope, handler), deployment.tables
    if tables.keyed and handler is None:
        raise click.UsageError("give the --operation of the key, because another operation may have the same key")
    if not yes:
        require_terminal()
    done, again = "was applied by", "a redelivery {} applied again"
    if isinstance(tables, EffectTables):
        done, again = "was armed for", "an effect with this key {} sent again when it is armed again"
    elif tables.keyed:
        done, again = "was handled by", "a command with this key {} handled again"
    with deployment.opened() as engine:
        found = wanted.chosen(engine)
        say(f"{capital(str(wanted))} {done}:")
        _print(found)
        if not yes and not confirmed(f"Delete these {tables.noun}s? {capital(again.format('will be'))}"):
            raise Failed(f"nothing was deleted in {deployment}")
        deleted = sum(delete_markers(engine, wanted.stored, handler=each.handler, tables=tables) for each in found)
        names, rest = (", ".join(printable(each.handler) for each in some) for some in (found, wanted.found(engine)))
        but = f", unless one of these remaining names is a name of that {tables.handler} too: {rest}" if rest else ""
        say(f"Deleted {deployment.rows(deleted)}. {capital(again.format('is'))}, by {names}{but}.")


@click.command(epilog=EXIT_CODES, short_help="Copy the markers of a handler to its new name.")
@database_options
@click.argument("old")
@click.argument("new")
@click.option(
    "--remove-old",
    is_flag=True,
    help="Also delete the markers of OLD after they are copied. Use it only if no code with the old name will run "
    "again, not even after you roll back a deployment. Otherwise cleanup deletes them later.",
)
@click.option(
    "--batch-size",
    type=WholeNumber(1, MAX_BATCH_SIZE),
    default=1000,
    show_default=True,
    help="How many markers to copy in one transaction. Smaller batches hold locks for a shorter time.",
)
@click.option("--dry-run", is_flag=True, help="Only count the markers. Write nothing.")
@click.option("--yes", is_flag=True, help="With --remove-old: do not ask for confirmation.")
def rename(
    deployment: Deployment, old: str, new: str, remove_old: bool, batch_size: int, dry_run: bool, yes: bool
) -> None:
    """Copy the markers of the handler OLD to the name NEW, so that you can remove `formerly` from the code.

    Run it after you renamed a handler, when every process runs code with the new name. Deliveries and cleanup may
    continue meanwhile. Each batch commits separately, so you may interrupt a run at any time and run it again.

    \b
    Examples:
      idempotency rename billing.totals.Totals.add account-totals.add --dry-run
      idempotency rename billing.totals.Totals.add account-totals.add
    """
    tables, so_far = deployment.tables, 0
    question = f"Delete the {tables.noun}s of {old} after they are copied? No code with this name must run again"
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
        say(f"There is no {tables.noun} of {old}.")
        return
    would = ("Would have copied", "Would have removed") if dry_run else ("Copied", "Removed")
    line = f"{would[0]} {deployment.rows(done.copied)} of {old} to {new}; {done.already:,} were there already."
    say(f"{line} {would[1]} {deployment.rows(done.removed)} of {old}." if done.removed else line)
