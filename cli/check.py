"""`idempotency check` reports whether the tables exist and are correct, whether cleanup keeps up, and what to do."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from pkgutil import resolve_name
from typing import Any

import click
from sqlalchemy import Engine, inspect

from projector_dedup import AsyncDispatcher, Dispatcher
from projector_dedup.commands import CommandTables
from projector_dedup.effects import AsyncEffects, Effects, EffectTables
from projector_dedup.http.parked import ParkedTables
from projector_dedup.maintenance.check import advise, advise_rebuilds, check_handlers, check_installed_revisions
from projector_dedup.maintenance.check import check as findings_of
from projector_dedup.maintenance.effects import advise_effects
from projector_dedup.maintenance.findings import Finding
from projector_dedup.maintenance.schema import KINDS
from projector_dedup.maintenance.stats import Ages, ages
from projector_dedup.tables import DedupTables

from .options import EXIT_CODES, Deployment, of_all_kinds, overdue_option
from .output import Failed, coloured, fitted, json_option, print_json, reason, say

_EXAMPLE = "myapp.consumer:dispatcher"
EFFECTS_EXAMPLE = "myapp.shop:effects"


@click.command(epilog=EXIT_CODES)
@of_all_kinds
@click.option(
    "--app",
    "apps",
    multiple=True,
    metavar="MODULE:DISPATCHER",
    help=f"A dispatcher of your application, or a function without arguments that returns one: {_EXAMPLE}. A handler "
    "that has markers, but is in no dispatcher, is then a problem. Repeat it for every dispatcher with these tables. "
    f"With --effects: an Effects, such as {EFFECTS_EXAMPLE}, whose names are compared.",
)
@overdue_option
@click.option(
    "--fail-on",
    type=click.Choice(["problem", "advice"]),
    default="problem",
    show_default=True,
    help="Exit with 1 for problems only, or also for advice, such as old markers that cleanup should have deleted.",
)
@json_option
def check(deployment: Deployment, apps: tuple[str, ...], overdue: timedelta, fail_on: str, as_json: bool) -> None:
    """Check the tables, and print what to do about each problem.

    Run it after each deployment, and from monitoring. It compares the tables with those that this version of
    projector-dedup needs. Then it checks storage settings, replication, cleanup, the declared horizon and, with --app,
    the handlers. It changes nothing. The exit code is 1 if there is a problem, and with --fail-on advice also if there
    is only advice, so that you can alert on it.

    \b
    Examples:
      idempotency check --database-url sqlite:///read_model.db
      idempotency check --app myapp.consumer:dispatcher
      idempotency check --fail-on advice
      idempotency check --commands
      idempotency check --effects
    """
    tables, found = deployment.tables, None
    if apps and isinstance(tables, (CommandTables, ParkedTables)):
        raise click.UsageError(f"--app checks handlers and effects, so it cannot be used with{tables.option}")
    takes_effects = isinstance(tables, EffectTables)
    kinds = (Effects, AsyncEffects) if takes_effects else (Dispatcher, AsyncDispatcher)
    example = EFFECTS_EXAMPLE if takes_effects else _EXAMPLE
    identities = frozenset[str]().union(*(from_application(app, kinds, example).identities for app in apps))
    with deployment.opened() as engine:
        findings = findings_of(engine, tables) + check_installed_revisions()
        if not any(finding.fatal for finding in findings):
            found = ages(engine, tables=tables)
            findings += advise(found, tables=tables)
            if isinstance(tables, EffectTables):
                findings += advise_effects(engine, overdue=overdue, known=identities if apps else None, tables=tables)
            elif not tables.keyed:
                findings += advise_rebuilds(engine, tables=tables)
                findings += check_handlers(engine, identities, tables=tables) if apps else []
        fatal = sum(finding.fatal for finding in findings)
        if as_json:
            answer = {"ready": not fatal, "findings": [asdict(finding) for finding in findings]}
            print_json({**deployment.place, **answer})
        else:
            _print(findings)
            if not fatal:
                text = fitted(f"{deployment}: {tables.marker.name} is ready.", sys.stdout)
                click.echo(text.removesuffix("ready.") + coloured("ready", "green") + ".")
            say(after_check(findings, found, tables) + others_beside(engine, tables))
    if fatal:
        raise Failed(f"{deployment} is not ready: solve the {fatal} problem{'s' if fatal > 1 else ''} above")
    if findings and fail_on == "advice":
        raise Failed(f"{deployment} is ready, but follow the advice above")


def _print(findings: list[Finding]) -> None:
    for finding in findings:
        kind, colour = ("problem", "red") if finding.fatal else ("advice", "yellow")
        text = fitted(f"{kind}: {finding.problem}", sys.stdout, "  ")
        click.echo(coloured(kind, colour) + text.removeprefix(kind))
        say(f"    {finding.remedy}", "    ")


# What to do next --------------------------------------------------------------------------------------------------


def after_check(findings: Sequence[Finding], found: Ages | None, tables: DedupTables) -> str:
    """Return what to do after a check. ``found`` is None if the tables could not be read."""
    if found is None or any(finding.fatal for finding in findings):
        return "Next: solve each problem above, then run this command again."
    if findings:
        return "Next: follow the advice above; deliveries may continue meanwhile."
    return _for_cleanup(found, tables) or "Next: nothing. Run this after each deployment, and alert on exit code 1."


def others_beside(engine: Engine, tables: DedupTables) -> str:
    """Return how to see the tables of other kinds, if the database has them too."""
    if tables.keyed:
        return ""
    inspector = inspect(engine)
    there = [kind for kind in KINDS if kind.keyed and inspector.has_table(kind.default_name, tables.marker.schema)]
    return "".join(
        f" The tables of {kind.subject} are here too: run this command with{kind.option} for them." for kind in there
    )


def _for_cleanup(found: Ages, tables: DedupTables) -> str | None:
    state, cleanup = found.state, f"`idempotency cleanup{tables.option}`"
    if state.horizon_hours is None and not isinstance(tables, ParkedTables):
        return (
            f"Next: declare how late a message may come again with `idempotency horizon{tables.option} HOURS`, so that "
            "cleanup keeps every marker that is still needed."
        )
    if state.cleaned_at is None:
        return f"Next: put {cleanup} into cron (docs/operations.md: cron)."
    return f"Next: run {cleanup} to delete expired {tables.noun}s." if found.has_expired else None


# --app ------------------------------------------------------------------------------------------------------------


def from_application(place: str, kinds: tuple[type[Any], ...], example: str) -> Any:
    """Import ``place`` and return its object of one of these ``kinds``, or the result of its function.

    Adds the current folder to ``sys.path``. Raises `Failed` if the import fails, or the object is of another kind.
    """
    found = imported(place, "--app", example)
    if callable(found) and not isinstance(found, kinds):
        with importing(place, "--app", example):
            found = found()
    if not isinstance(found, kinds):
        first, second = (each.__name__ for each in kinds)
        raise Failed(
            f"--app {place} is of type {type(found).__name__}; give {'an' if first[0] in 'AE' else 'a'} {first}, an "
            f"{second}, or a function without arguments that returns one"
        )
    return found


def imported(place: str, option: str, example: str) -> Any:
    """Import the object that ``place`` names. Adds the current folder to ``sys.path``. Raises `Failed`."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # like `python -m`, but unlike the script of an installed command
    with importing(place, option, example):
        return resolve_name(place)


@contextmanager
def importing(place: str, option: str, example: str) -> Iterator[None]:
    """Turn an error of the user's module or function in the block into `Failed`."""
    try:
        yield
    except Exception as error:  # the user's module may raise any error
        raise Failed(
            f"{option} {place} cannot be imported: {type(error).__name__}: {reason(error)}; write it like {example}, "
            "and run the command in the folder of your application with its own Python (--debug shows the traceback)"
        ) from error
