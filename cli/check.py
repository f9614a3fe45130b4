"""`idempotency check`: tell whether the tables exist, are right, and are looked after."""

from __future__ import annotations

import sys
from pathlib import Path

import click
from sqlalchemy import Engine

from projector_dedup.commands import CommandTables
from projector_dedup.dialects import Finding
from projector_dedup.maintenance.advice import advise
from projector_dedup.maintenance.alembic_config import check_alembic, check_installed_revisions
from projector_dedup.maintenance.check import check as findings_of
from projector_dedup.maintenance.records import advise_records
from projector_dedup.maintenance.stats import ages, handlers_of

from .app import EXAMPLE, identities_of
from .errors import Failed
from .next_step import after_check, commands_beside
from .options import EXIT_CODES, Deployment, Deployments, database_options
from .output import as_object, coloured, document, json_option
from .wrapping import fitted


@click.command(epilog=EXIT_CODES)
@database_options
@click.option(
    "--alembic-config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Does this alembic.ini lead to our revisions, if it names them? All revisions that it names are imported, as "
    "Alembic does.  [default: read alembic.ini, if it is there, and import nothing]",
)
@click.option(
    "--app",
    "apps",
    multiple=True,
    metavar="MODULE:DISPATCHER",
    help=f"A dispatcher of the application, or a function without arguments that returns one: {EXAMPLE}. Tells which "
    "handlers in the table it does not know. Give it for every dispatcher on these tables.",
)
@json_option
def check(deployments: Deployments, alembic_config: Path | None, apps: tuple[str, ...], as_json: bool) -> None:
    """Tell whether the tables are right and looked after.

    If not, it says what mends them. They are compared with what this version of projector-dedup needs; then storage
    settings, replication, pruning, the declared horizon and, with --app, the handlers are looked at; with --commands,
    the newest records. Nothing is changed. Advice and notes alone leave the exit code 0.

    \b
    Examples:
      idempotency check --database-url sqlite:///read_model.db
      idempotency check --app myapp.consumer:dispatcher
      idempotency check --commands
    """
    if apps and deployments.of_commands:
        raise click.UsageError("--app tells which handlers a dispatcher knows; it says nothing of --commands")
    identities = identities_of(apps, debug=deployments.debug)
    config = alembic_config or Path("alembic.ini")
    of_alembic = check_alembic(config, run=alembic_config is not None) if config.is_file() else []
    of_alembic += check_installed_revisions()

    with document(wanted=as_json) as add:

        def look(deployment: Deployment, engine: Engine) -> None:
            findings = [*findings_of(engine, deployment.tables), *of_alembic]
            fatal = sum(finding.fatal for finding in findings)
            tables, found = deployment.tables, None
            if not fatal:
                found = ages(engine, tables=tables)
                unknown = frozenset() if identities is None else handlers_of(engine, tables=tables) - identities
                findings += advise(found, unknown, tables=tables)
                if isinstance(tables, CommandTables):
                    findings += advise_records(engine, tables)
            if as_json:
                add(deployment, {"ready": not fatal, "findings": [as_object(finding) for finding in findings]})
            else:
                _print(findings, f"{deployment}: " if deployments.several else "")
                if not fatal:
                    click.echo(fitted(f"{deployment}: {tables.marker.name} is ready.", sys.stdout))
                deployments.say(deployment, after_check(findings, found, tables) + commands_beside(engine, tables))
            if fatal:
                raise Failed(f"{deployment} is not ready: {fatal} problem{'s' if fatal > 1 else ''}, see above")

        deployments.each(look)


def _kind(finding: Finding) -> tuple[str, str]:
    """Return the word for a finding, and its colour."""
    if finding.informs:
        return "note", "cyan"
    return ("problem", "red") if finding.fatal else ("advice", "yellow")


def _print(findings: list[Finding], prefix: str) -> None:
    for finding in findings:
        kind, colour = _kind(finding)
        told = fitted(f"{prefix}{kind}: {finding.problem}", sys.stdout, "  ")
        click.echo(told.replace(f"{kind}:", f"{coloured(kind, colour)}:", 1))
        click.echo(fitted(f"    {finding.remedy}", sys.stdout, "    "))
