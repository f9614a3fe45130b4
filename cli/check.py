"""`idempotency check`: are the tables there, and right?"""

from __future__ import annotations

import click
from sqlalchemy import Engine

from projector_dedup.schema import check as findings_of

from .errors import Failed
from .options import EXIT_CODES, Deployment, Deployments, database_options


@click.command(epilog=EXIT_CODES)
@database_options
def check(deployments: Deployments) -> None:
    """Tell whether the tables are right, and what mends them if not.

    They are compared with what this version of projector-dedup needs. Nothing is changed. Advice alone (storage
    settings, say) leaves the exit code 0.

    \b
    Example:
      idempotency check --database-url sqlite:///read_model.db
    """
    deployments.each(_check)


def _check(deployment: Deployment, engine: Engine) -> None:
    findings = findings_of(engine, deployment.tables)
    for finding in findings:
        click.echo(f"{'problem' if finding.fatal else 'advice'}: {finding.problem}\n    {finding.remedy}")
    fatal = sum(finding.fatal for finding in findings)
    if fatal:
        raise Failed(f"{deployment} is not ready: {fatal} problem{'s' if fatal > 1 else ''}, see above")
    click.echo(f"{deployment}: {deployment.tables.marker.name} is ready.")
