"""`idempotency show`: tell which handlers applied a message, and when."""

from __future__ import annotations

import click
from sqlalchemy import Engine

from projector_dedup.errors import InvalidMessageIdError
from projector_dedup.maintenance.markers import Marker, find
from projector_dedup.maintenance.state import pruned_until
from projector_dedup.maintenance.times import duration, moment_with_zone, moment_without_zone
from projector_dedup.message import printable, valid_message_id

from .errors import Failed
from .options import EXIT_CODES, Deployment, Deployments, database_options
from .output import as_object, document, json_option, table


def _valid(_context: click.Context, _parameter: click.Parameter, value: str) -> str:
    try:
        return valid_message_id(value)
    except InvalidMessageIdError as error:
        raise click.BadParameter(str(error)) from None


message_argument = click.argument("message_id", callback=_valid)


@click.command(epilog=EXIT_CODES)
@database_options
@message_argument
@json_option
def show(deployments: Deployments, message_id: str, as_json: bool) -> None:
    """Tell which handlers applied the message MESSAGE_ID, and when.

    The id is what the handler's log lines call the message: case and white space count. Where several databases are
    given, it is looked for in each, and found in one is found.

    \b
    Examples:
      idempotency show payment-1 --database-url sqlite:///read_model.db
      idempotency show --json 0198f3c2-5d1e-7a55-b1f0-000000000001
    """
    total = 0
    with document(wanted=as_json) as add:

        def look(deployment: Deployment, engine: Engine) -> None:
            nonlocal total
            found = find(engine, message_id, tables=deployment.tables)
            total += len(found)
            if as_json:
                add(deployment, {"message_id": message_id, "markers": [as_object(each) for each in found]})
            elif found:
                deployments.say(deployment, f"Message {printable(message_id)}:")
                print_markers(found)
            elif deployments.several:
                deployments.say(deployment, "no marker")
            if not found and not deployments.several:
                raise Failed(not_there(message_id, deployment, engine))

        deployments.each(look)
    if not total:
        raise Failed(f"no marker of message {printable(message_id)} in any of these databases")


def print_markers(found: list[Marker]) -> None:
    """Print a table with a line for each marker."""
    rows = [
        (
            printable(each.handler),
            moment_without_zone(each.processed_at),
            duration(each.age),
            "-" if each.occurred_at is None else moment_without_zone(each.occurred_at),
        )
        for each in found
    ]
    table(("handler", "processed (UTC)", "age", "occurred (UTC)"), rows)


def not_there(message_id: str, deployment: Deployment, engine: Engine, handler: str | None = None) -> str:
    """Return a text that says that the message has no marker there, and why that may be; asks the state table."""
    of = "" if handler is None else f" and handler {printable(handler)}"
    until = pruned_until(engine, tables=deployment.tables)
    pruned = "its marker was pruned" + ("" if until is None else f", as all from before {moment_with_zone(until)} are")
    return (
        f"no marker of message {printable(message_id)}{of} in {deployment}: it was not applied, or {pruned}, or the id "
        "is written another way (case and white space count; cloudevents, kafka and hashed make ids of their own)"
    )
