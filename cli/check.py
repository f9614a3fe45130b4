"""`idempotency check`: tell whether the tables exist, are right, and are looked after; and what to do next."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import click
from sqlalchemy import Engine, inspect

from projector_dedup import AsyncDispatcher, DedupTables, Dispatcher
from projector_dedup.effects import EffectTables
from projector_dedup.maintenance.check import advise, check_alembic, check_installed_revisions
from projector_dedup.maintenance.check import check as findings_of
from projector_dedup.maintenance.databases import Finding
from projector_dedup.maintenance.effects import advise_effects
from projector_dedup.maintenance.running import KINDS
from projector_dedup.maintenance.stats import Ages, Stats, ages, stats

from .options import EXIT_CODES, Deployment, database_options
from .output import Failed, coloured, fitted, json_option, print_json, reason, say

_EXAMPLE = "myapp.consumer:dispatcher"


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
    help=f"A dispatcher of the application, or a function without arguments that returns one: {_EXAMPLE}. Tells which "
    "handlers in the table it does not know. Give it for every dispatcher on these tables.",
)
@json_option
def check(deployment: Deployment, alembic_config: Path | None, apps: tuple[str, ...], as_json: bool) -> None:
    """Tell whether the tables are right and looked after.

    If not, it says what mends them. They are compared with what this version of projector-dedup needs; then storage
    settings, replication, pruning, the declared horizon and, with --app, the handlers are looked at. Nothing is
    changed. Advice alone leaves the exit code 0.

    \b
    Examples:
      idempotency check --database-url sqlite:///read_model.db
      idempotency check --app myapp.consumer:dispatcher
      idempotency check --commands
      idempotency check --effects
    """
    if apps and deployment.tables.keyed:
        option = deployment.tables.option.strip()
        raise click.UsageError(f"--app tells which handlers a dispatcher knows; it says nothing of {option}")
    identities = _identities_of(apps)
    config = alembic_config or Path("alembic.ini")
    tables, found = deployment.tables, None
    with deployment.opened() as engine:
        findings = findings_of(engine, tables)
        findings += check_alembic(config, run=alembic_config is not None) if config.is_file() else []
        findings += check_installed_revisions()
        fatal = sum(finding.fatal for finding in findings)
        if not fatal:
            found = stats(engine, tables=tables) if apps else ages(engine, tables=tables)
            unknown = {each.handler for each in found.handlers} - identities if isinstance(found, Stats) else set()
            findings += advise(found, unknown, tables=tables)
            findings += advise_effects(engine, tables=tables) if isinstance(tables, EffectTables) else []
        if as_json:
            answer = {"ready": not fatal, "findings": [asdict(finding) for finding in findings]}
            print_json({**deployment.place, **answer})
        else:
            _print(findings)
            if not fatal:
                say(f"{deployment}: {tables.marker.name} is {coloured('ready', 'green')}.")
            say(after_check(findings, found, tables) + others_beside(engine, tables))
    if fatal:
        raise Failed(f"{deployment} is not ready: {fatal} problem{'s' if fatal > 1 else ''}, see above")


def _print(findings: list[Finding]) -> None:
    for finding in findings:
        kind, colour = ("problem", "red") if finding.fatal else ("advice", "yellow")
        told = fitted(f"{kind}: {finding.problem}", sys.stdout, "  ")
        click.echo(coloured(kind, colour) + told.removeprefix(kind))
        say(f"    {finding.remedy}", "    ")


# What to do next --------------------------------------------------------------------------------------------------


def after_check(findings: Sequence[Finding], found: Ages | None, tables: DedupTables) -> str:
    """Return what to do after a check; ``found`` is None where the tables are not right."""
    if found is None:
        return "Next: solve what is called a problem above, then run this again."
    if findings:
        return "Next: follow the advice above; deliveries may go on meanwhile."
    return _for_cleanup(found, tables) or "Next: nothing. Run this after each deploy, and alert on exit code 1."


def after_stats(found: Ages, tables: DedupTables) -> str:
    """Return what to do after a look at the statistics."""
    command = f"`idempotency check{tables.option}`"
    return _for_cleanup(found, tables) or f"Next: nothing. {command} tells when there is something to do."


def others_beside(engine: Engine, tables: DedupTables) -> str:
    """Return how to look at the tables of commands and of effects, if they are beside those of projectors."""
    if tables.keyed:
        return ""
    inspector = inspect(engine)
    there = [kind for kind in KINDS if kind.keyed and inspector.has_table(kind.default_name, tables.marker.schema)]
    return "".join(
        f" The tables of {kind.subject} are here too: with{kind.option} this looks at those." for kind in there
    )


def _for_cleanup(found: Ages, tables: DedupTables) -> str | None:
    state, cleanup = found.state, f"`idempotency cleanup{tables.option}`"
    if state.horizon_hours is None:
        return (
            f"Next: declare how late a message may come again, by `idempotency horizon{tables.option} HOURS`: cleanup "
            "then keeps what it must."
        )
    if state.cleaned_at is None:
        return f"Next: put {cleanup} into cron (docs/runbook.md: prune from cron)."
    return f"Next: {cleanup} deletes what has expired." if found.has_expired else None


# --app ------------------------------------------------------------------------------------------------------------


def _identities_of(places: tuple[str, ...]) -> frozenset[str]:
    """Import the dispatchers and return the identities of all their handlers."""
    kinds = (Dispatcher, AsyncDispatcher)
    return frozenset().union(*(from_application(place, kinds, _EXAMPLE).identities for place in places))


def from_application(place: str, kinds: tuple[type[Any], ...], example: str) -> Any:
    """Import the object of one of these ``kinds`` that ``place`` names, or that the function there returns.

    Puts the current folder on ``sys.path``. Raises `Failed` for a place that cannot be imported, or is no such object.
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does, and the script of an installed command does not
    try:
        found: Any = resolve_name(place)
        if callable(found) and not isinstance(found, kinds):
            found = found()
    except Exception as error:  # whatever the user's module does
        raise Failed(
            f"--app {place} cannot be had: {type(error).__name__}: {reason(error)}; write it like {example}, and run "
            "the command where the application is imported from, with its own Python (--debug shows where it failed)"
        ) from error
    if not isinstance(found, kinds):
        first, second = (each.__name__ for each in kinds)
        raise Failed(
            f"--app {place} is of type {type(found).__name__}; name {'an' if first[0] in 'AE' else 'a'} {first}, an "
            f"{second}, or a function without arguments that returns one"
        )
    return found
