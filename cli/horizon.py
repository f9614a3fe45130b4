"""`idempotency horizon`: show or declare how late a message may come again; cleanup keeps markers as long."""

from __future__ import annotations

import math

import click
from sqlalchemy import Engine

from projector_dedup.maintenance.check import verify
from projector_dedup.maintenance.horizon import MAX_HOURS, declare_horizon, redelivery_horizon

from .ask import confirmed
from .errors import Failed
from .options import EXIT_CODES, Deployment, Deployments, database_options


@click.command(epilog=EXIT_CODES)
@database_options
@click.argument("hours", required=False, type=click.FloatRange(min=0, min_open=True, max=MAX_HOURS))
@click.option("--yes", is_flag=True, help="Lower it without asking.")
def horizon(deployments: Deployments, hours: float | None, yes: bool) -> None:
    """Show the redelivery horizon, or declare it.

    It is the longest time after which a message may come again: the broker's retention, the dead-letter queue and a
    replay by hand, added up. Once declared, `cleanup` refuses a shorter retention, from whichever machine it is run.
    To raise it is always safe; before it is lowered, this asks.

    \b
    Examples:
      idempotency horizon
      idempotency horizon 336
    """
    if hours is not None and math.isnan(hours):  # click finds NaN in every range
        raise click.BadParameter("it must be a number of hours", param_hint="HOURS")

    def act(deployment: Deployment, engine: Engine) -> None:
        verify(engine, deployment.tables)
        known = redelivery_horizon(engine, tables=deployment.tables)
        if hours is None:
            said = "No redelivery horizon is declared." if known is None else _said(known)
            deployments.say(deployment, said)
            return
        if known is not None and hours < known and not yes:
            question = f"{deployment}: messages may be redelivered for {known:g} hours. Forget them after {hours:g}?"
            if not confirmed(question):
                raise Failed(f"the horizon stays at {known:g} hours; --yes lowers it without asking")
        declare_horizon(engine, hours, tables=deployment.tables)
        deployments.say(deployment, _said(hours))

    deployments.each(act)


def _said(hours: float) -> str:
    return f"The redelivery horizon is {hours:g} hours."
