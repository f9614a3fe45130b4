"""`idempotency forget`: delete the markers of one message, so that it can be applied again."""

from __future__ import annotations

import sys

import click
from sqlalchemy import Engine

from projector_dedup.inventory import find
from projector_dedup.inventory import forget as delete_markers
from projector_dedup.message import printable

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
    if not yes and not sys.stdin.isatty():
        raise click.UsageError("there is no terminal to ask on: say --yes")
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
        if not yes and not click.confirm("Delete these markers? A redelivery will be applied again", default=False):
            raise Failed(f"nothing was deleted in {deployment}")
        deleted = sum(
            delete_markers(engine, message_id, handler=each.handler, tables=deployment.tables) for each in found
        )
        total += deleted
        names = ", ".join(printable(each.handler) for each in found)
        deployments.say(deployment, f"Deleted {markers(deleted)}. A redelivery is applied again, by {names}.")

    deployments.each(act)
    if not total:
        raise Failed(f"no marker of message {printable(message_id)} in any of these databases")
