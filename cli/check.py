"""`idempotency check`: are the tables there, and right?"""

from __future__ import annotations

from pathlib import Path

import click
from sqlalchemy import Engine

from projector_dedup.alembic_config import check_alembic
from projector_dedup.schema import Finding
from projector_dedup.schema import check as findings_of

from .errors import Failed
from .options import EXIT_CODES, Deployment, Deployments, database_options


@click.command(epilog=EXIT_CODES)
@database_options
@click.option(
    "--alembic-config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Whether this alembic.ini leads to our revisions, if it names them.  [default: alembic.ini, if it is there]",
)
def check(deployments: Deployments, alembic_config: Path | None) -> None:
    """Tell whether the tables are right, and what mends them if not.

    They are compared with what this version of projector-dedup needs. Nothing is changed. Advice alone (storage
    settings, say) leaves the exit code 0.

    \b
    Example:
      idempotency check --database-url sqlite:///read_model.db
    """
    config = alembic_config or Path("alembic.ini")
    of_alembic = check_alembic(config) if config.is_file() else []
    deployments.each(lambda deployment, engine: _check(deployment, engine, of_alembic))


def _check(deployment: Deployment, engine: Engine, of_alembic: list[Finding]) -> None:
    findings = [*findings_of(engine, deployment.tables), *of_alembic]
    for finding in findings:
        click.echo(f"{'problem' if finding.fatal else 'advice'}: {finding.problem}\n    {finding.remedy}")
    fatal = sum(finding.fatal for finding in findings)
    if fatal:
        raise Failed(f"{deployment} is not ready: {fatal} problem{'s' if fatal > 1 else ''}, see above")
    click.echo(f"{deployment}: {deployment.tables.marker.name} is ready.")
