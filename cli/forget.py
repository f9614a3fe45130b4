"""`idempotency forget`: delete the markers of one message, so that it can be applied again."""

from __future__ import annotations

import click
from sqlalchemy import Engine

from projector_dedup.maintenance.markers import find
from projector_dedup.maintenance.markers import forget as delete_markers
from projector_dedup.message import printable

from .ask import confirmed, want_terminal
from .errors import Failed
from .options import EXIT_CODES, Deployment, Deployments, database_options
from .output import markers
from .show import message_argument, not_there, print_markers


@click.command(epilog=EXIT_CODES)
@database_options
@message_argument
@click.option("--handler", help="Only the marker of this handler.  [default: of every handler]")
@click.option("--yes", is_flag=True, help="Do not ask.")
def forget(deployments: Deployments, message_id: str, handler: str | None, yes: bool) -> None:
    """Delete the markers of the message MESSAGE_ID.

    A redelivery is applied again then. What was applied stays applied: first take it out of the read model, or the
    message counts twice. The command shows what it is about and asks, unless --yes is given.

    \b
    Examples:
      idempotency forget payment-1 --database-url sqlite:///read_model.db
      idempotency forget payment-1 --handler account-totals.add_payment --yes
    """
    if not yes:
        want_terminal()
    total = 0

    def act(deployment: Deployment, engine: Engine) -> None:
        nonlocal total
        found = find(engine, message_id, tables=deployment.tables)
        found = [each for each in found if handler in (None, each.handler)]
        if not found:
            if not deployments.several:
                raise Failed(not_there(message_id, deployment, engine, handler))
            deployments.say(deployment, "no marker")
            return
        deployments.say(deployment, f"Message {printable(message_id)} was applied by:")
        print_markers(found)
        if not yes and not confirmed("Delete these markers? A redelivery will be applied again"):
            raise Failed(f"nothing was deleted in {deployment}")
        deleted = sum(
            delete_markers(engine, message_id, handler=each.handler, tables=deployment.tables) for each in found
        )
        total += deleted
        names, rest = (
            ", ".join(printable(each.handler) for each in some)
            for some in (found, find(engine, message_id, tables=deployment.tables))
        )
        said = f"Deleted {markers(deleted)}. A redelivery is applied again, by {names}"
        but = f", unless that handler is known by another of the names that are left: {rest}" if rest else ""
        deployments.say(deployment, f"{said}{but}.")

    deployments.each(act)
    if not total:
        raise Failed(f"no marker of message {printable(message_id)} in any of these databases")
