"""`idempotency forget`: delete markers, or records of commands, so that what they stand for can be done again."""

from __future__ import annotations

import click
from sqlalchemy import Engine

from projector_dedup.commands import CommandTables
from projector_dedup.maintenance.markers import forget as delete_markers
from projector_dedup.maintenance.records import count_scope, forget_scope
from projector_dedup.message import printable

from .ask import confirmed, want_terminal
from .errors import Failed
from .interrupts import deferred
from .options import EXIT_CODES, Deployment, Deployments, database_options
from .output import table
from .progress import counting
from .sought import Sought, capital, handler_option, scope_option, sought

_COUNTED = 100_000  # records of a scope at which counting stops, before the question


@click.command(epilog=EXIT_CODES)
@database_options
@click.argument("message_id", metavar="[ID]", required=False)
@handler_option("Only the marker of this handler, or the record of this operation.  [default: every handler's]")
@scope_option
@click.option("--yes", is_flag=True, help="Do not ask.")
def forget(deployments: Deployments, message_id: str | None, handler: str | None, scope: str | None, yes: bool) -> None:
    """Delete the markers of the message ID.

    A redelivery is applied again then. What was applied stays applied: first take it out of the read model, or the
    message counts twice. The command shows what it is about and asks, unless --yes is given.

    With --commands, ID is the key of a command of the --operation, and its record is deleted: asked for again, the
    command is handled again. Without ID, all records of the --scope are deleted.

    \b
    Examples:
      idempotency forget payment-1 --database-url sqlite:///read_model.db
      idempotency forget payment-1 --handler account-totals.add_payment --yes
      idempotency forget req-abc --commands --operation shop.place --scope tenant-7
      idempotency forget --commands --scope tenant-7
    """
    if message_id is None:
        if not deployments.of_commands or scope is None:
            raise click.UsageError("give the ID that is to be forgotten; or --commands and --scope, for all of a scope")
        _forget_scope(deployments, scope, handler, yes=yes)
        return
    wanted = sought(deployments, message_id, scope, handler)
    if deployments.of_commands and handler is None:
        raise click.UsageError("say which --operation the key was given to: another one may have the same key")
    _forget_rows(deployments, wanted, yes=yes)


def _forget_rows(deployments: Deployments, wanted: Sought, *, yes: bool) -> None:
    if not yes:
        want_terminal()
    total = 0

    def act(deployment: Deployment, engine: Engine) -> None:
        nonlocal total
        tables = deployment.tables
        found = wanted.find(engine, tables)
        if not found:
            if not deployments.several:
                raise Failed(wanted.missing(deployment, engine))
            deployments.say(deployment, f"no {tables.noun}")
            return
        deployments.say(deployment, f"{wanted.title} {wanted.done}:")
        wanted.show(found)
        question = f"Delete these {wanted.plural}? {capital(wanted.again.format('will be'))}"
        if not yes and not confirmed(question):
            raise Failed(f"nothing was deleted in {deployment}")
        deleted = sum(delete_markers(engine, wanted.stored, handler=each.handler, tables=tables) for each in found)
        total += deleted
        names, rest = (
            ", ".join(printable(each.handler) for each in some) for some in (found, wanted.found(engine, tables))
        )
        said = f"Deleted {deployments.rows(deleted)}. {capital(wanted.again.format('is'))}, by {names}"
        but = f", unless that {tables.handler} is known by another of the names that are left: {rest}" if rest else ""
        deployments.say(deployment, f"{said}{but}.")

    deployments.each(act)
    if not total:
        raise Failed(f"no {deployments.kind.noun} of {wanted} in any of these databases")


def _forget_scope(deployments: Deployments, scope: str, operation: str | None, *, yes: bool) -> None:
    if not yes:
        want_terminal()
    of = f"scope {printable(scope)}" + ("" if operation is None else f", operation {printable(operation)}")
    total = 0

    def act(deployment: Deployment, engine: Engine) -> None:
        nonlocal total
        tables = deployment.tables
        assert isinstance(tables, CommandTables)  # noqa: S101  # --commands made them
        if not yes and not _agreed(deployments, deployment, engine, scope, operation, of):
            return
        with deferred() as interrupted, counting("Deleted") as progress:

            def on_batch(number: int) -> None:
                if progress is not None:
                    progress(number)
                interrupted()

            deleted = forget_scope(engine, scope, operation=operation, tables=tables, on_batch=on_batch)
        if not deleted and not deployments.several:
            raise Failed(f"no record of {of} in {deployment}")
        total += deleted
        deployments.say(deployment, f"Deleted {deployments.rows(deleted)} of {of}.")

    deployments.each(act)
    if not total:
        raise Failed(f"no record of {of} in any of these databases")


def _agreed(
    deployments: Deployments, deployment: Deployment, engine: Engine, scope: str, operation: str | None, of: str
) -> bool:
    """Show how many records would be deleted and return True if somebody agrees; False if there is none.

    Raises `Failed` if the answer is no.
    """
    tables = deployment.tables
    assert isinstance(tables, CommandTables)  # noqa: S101  # --commands made them
    counted = count_scope(engine, scope, operation=operation, tables=tables, up_to=_COUNTED)
    if not counted:
        if not deployments.several:
            raise Failed(f"no record of {of} in {deployment}")
        deployments.say(deployment, f"no record of {of}")
        return False
    at_least = "at least " if counted.total() >= _COUNTED else ""
    deployments.say(deployment, f"{capital(of)} has {at_least}{deployments.rows(counted.total())}:")
    rows = [(printable(name), f"{number:,}") for name, number in sorted(counted.items())]
    table((tables.handler, "records"), rows, right=("records",))
    if not confirmed("Delete these records? The commands will be handled again when they are asked for again"):
        raise Failed(f"nothing was deleted in {deployment}")
    return True
