"""`idempotency show`: tell which handlers applied a message, or what a command's key was answered, and when."""

from __future__ import annotations

import click
from sqlalchemy import Engine

from .errors import Failed
from .options import EXIT_CODES, Deployment, Deployments, database_options
from .output import document, json_option
from .sought import handler_option, print_results, scope_option, sought


@click.command(epilog=EXIT_CODES)
@database_options
@click.argument("message_id", metavar="ID")
@handler_option("Only the marker of this handler, or the record of this operation.  [default: every one]")
@scope_option
@click.option("--result", "results", is_flag=True, help="With --commands: print what is stored, as text.")
@json_option
def show(
    deployments: Deployments, message_id: str, handler: str | None, scope: str | None, results: bool, as_json: bool
) -> None:
    """Tell which handlers applied the message ID, and when.

    The id is what the handler's log lines call the message: case and white space count. With --commands, ID is the
    key of a command, and its records are told: result, rejected, or result not stored. Where several databases are
    given, it is looked for in each, and found in one is found.

    \b
    Examples:
      idempotency show payment-1 --database-url sqlite:///read_model.db
      idempotency show --json 0198f3c2-5d1e-7a55-b1f0-000000000001
      idempotency show req-abc --commands --scope tenant-7 --result
    """
    if results and not deployments.of_commands:
        raise click.UsageError("--result is that of a command: say --commands, too")
    wanted = sought(deployments, message_id, scope, handler)
    total = 0
    with document(wanted=as_json) as add:

        def look(deployment: Deployment, engine: Engine) -> None:
            nonlocal total
            found = wanted.find(engine, deployment.tables)
            total += len(found)
            if as_json:
                add(deployment, wanted.as_object(found, results=results))
            elif found:
                deployments.say(deployment, f"{wanted.title}:")
                wanted.show(found)
                if results:
                    print_results(found)
            elif deployments.several:
                deployments.say(deployment, f"no {deployment.tables.noun}")
            if not found and not deployments.several:
                raise Failed(wanted.missing(deployment, engine))

        deployments.each(look)
    if not total:
        raise Failed(f"no {deployments.kind.noun} of {wanted} in any of these databases")
