"""`idempotency effects`: list the effects that are not finished, show one, decide one, and drive those that are due."""

from __future__ import annotations

import asyncio
import getpass
import re
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from typing import Any

import click

from projector_dedup.effects import AsyncEffects, Effects, EffectTables, Settled
from projector_dedup.effects.steps import State
from projector_dedup.maintenance.effects import StoredEffect, find_effect, find_effects
from projector_dedup.maintenance.effects import resolve as decide
from projector_dedup.maintenance.state import duration, moment_with_zone
from projector_dedup.message import printable

from .check import from_application
from .options import EXIT_CODES, Deployment, database_options, debug_option
from .output import Failed, json_option, one_line, print_json, say, table
from .rows import readable

_options = partial(database_options, kinds=[EffectTables])
_EXAMPLE = "myapp.shop:effects"
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}

_NEXT = {
    State.ARMED: "`idempotency effects settle --app ...` sends it",
    State.UNKNOWN: "`idempotency effects settle --app ...` finds out, if the policy permits it",
    State.KEPT: "`idempotency effects settle --app ...` records it; the error says why that failed",
    State.DECIDED: "`idempotency effects settle --app ...` records it",
    State.STOPPED: "look at the provider, under the provider key; then `idempotency effects resolve`",
}


class _Span(click.ParamType[timedelta]):
    """A span of time such as 90s, 15m, 2h or 1d."""

    name = "SPAN"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the span as a ``timedelta``."""
        found = re.fullmatch(r"(\d{1,6})([smhd])", str(value))
        if found is None:
            self.fail("write a number and s, m, h or d: 15m", param, ctx)
        return timedelta(**{_UNITS[found[2]]: int(found[1])})


def _one_of(command: Any) -> Any:
    for option in (
        click.option("--scope", help="Whose key it is, a tenant say.  [default: nobody's]"),
        click.option("--effect", metavar="NAME", help="The name of the effect, if several effects have the key."),
        click.argument("key"),
    ):
        command = option(command)
    return command


def _tables(deployment: Deployment) -> EffectTables:
    assert isinstance(deployment.tables, EffectTables)  # noqa: S101  # by the options of this file
    return deployment.tables


@click.group(epilog=EXIT_CODES)
def effects() -> None:
    """List, show, decide and drive effects: what happens outside the database.

    \b
    Examples:
      idempotency effects list --unknown
      idempotency effects show order-7 --effect billing.charge
      idempotency effects settle --app myapp.shop:effects
    """


@effects.command("list", epilog=EXIT_CODES)
@_options
@click.option("--unknown", is_flag=True, help="Only those of which nobody knows whether they were done.")
@click.option("--older-than", type=_Span(), default="0s", help="Only those that were armed so long ago: 15m, 2h, 1d.")
@click.option("--limit", type=click.IntRange(min=1), default=1000, show_default=True, help="List so many at most.")
@json_option
def list_effects(deployment: Deployment, unknown: bool, older_than: timedelta, limit: int, as_json: bool) -> None:
    """List the effects that are not finished.

    Those that need a person come first, then the oldest. The exit code is 1 if one needs a person: alert on it.

    \b
    Examples:
      idempotency effects list
      idempotency effects list --unknown --older-than 15m --json
    """
    with deployment.opened() as engine:
        asked: dict[str, Any] = {"unknown": unknown, "older_than": older_than, "tables": _tables(deployment)}
        found = find_effects(engine, limit=limit + 1, **asked)
    more, found = len(found) > limit, found[:limit]
    if as_json:
        print_json({**deployment.place, "complete": not more, "effects": [_as_object(each) for each in found]})
    elif not found:
        say(f"{deployment}: no such effect.")
    else:
        table(
            ("effect", "key", "scope", "state", "attempts", "age"),
            [
                (
                    printable(each.effect),
                    printable(each.key),
                    printable(each.scope or "-"),
                    each.state,
                    str(each.attempt),
                    duration(each.age),
                )
                for each in found
            ],
            right=("attempts",),
        )
        say("There are more: raise --limit." if more else "")
    people = sum(each.state == State.STOPPED for each in found)
    if people:
        raise Failed(f"effects that need a person: {people}; `idempotency effects show KEY` says more")


@effects.command(epilog=EXIT_CODES)
@_options
@_one_of
@click.option("--values", is_flag=True, help="Print the request and the value, too. They may hold what is secret.")
@json_option
def show(deployment: Deployment, key: str, effect: str | None, scope: str | None, values: bool, as_json: bool) -> None:
    """Show the effect of KEY: its state, its attempts, the provider key, and what to do next.

    \b
    Examples:
      idempotency effects show order-7
      idempotency effects show order-7 --effect billing.charge --scope tenant-7 --json
    """
    with deployment.opened() as engine:
        found = find_effect(engine, key, effect, scope, tables=_tables(deployment))
    if as_json:
        print_json({**deployment.place, **_as_object(found, values=values)})
        return
    for name, value in _as_object(found, values=values).items():
        if value is not None:
            click.echo(f"{name.replace('_', ' '):<14}  {printable(_text(value))}")
    if found.state in _NEXT:
        say(f"Next: {_NEXT[found.state]}.")


@effects.command(epilog=EXIT_CODES)
@_options
@_one_of
@click.option(
    "--attempt", type=click.IntRange(min=0), required=True, help="The number of attempts that `show` has told you."
)
@click.option("--done", metavar="JSON", help="It was done, with this value: '\"pi_77\"', or null.")
@click.option("--rejected", metavar="CODE", help="It was refused, or is not to be done.")
@click.option("--not-done", is_flag=True, help="It was not done: it is sent again.")
@click.option("--reason", required=True, help="How you know. It stays in the row.")
@click.option("--by", "who", help="Who decides.  [default: the user of this machine]")
def resolve(
    deployment: Deployment,
    key: str,
    effect: str | None,
    scope: str | None,
    attempt: int,
    done: str | None,
    rejected: str | None,
    not_done: bool,
    reason: str,
    who: str | None,
) -> None:
    """Say whether the effect of KEY was done. The next `settle` records it.

    Nothing is written if another attempt was made since you looked, if one is running, or if the effect has its
    outcome. With --attempt 0 --rejected cancelled an effect that was never sent is cancelled.

    \b
    Examples:
      idempotency effects resolve order-7 --attempt 2 --done '"pi_77"' --reason "the provider shows pi_77"
      idempotency effects resolve order-7 --attempt 2 --not-done --reason "the provider has nothing"
      idempotency effects resolve order-7 --attempt 0 --rejected cancelled --reason "the customer has cancelled"
    """
    if (done is not None) + (rejected is not None) + not_done != 1:
        raise click.UsageError("say one of --done JSON, --rejected CODE and --not-done")
    with deployment.opened() as engine:
        found = decide(
            engine,
            key,
            attempt=attempt,
            outcome="not done" if not_done else "rejected" if done is None else "done",
            value=done,
            code=rejected,
            why=reason,
            who=who or getpass.getuser(),
            effect=effect,
            scope=scope,
            tables=_tables(deployment),
        )
    say(f"{printable(found.effect)}, key {printable(found.key)}: {found.state}. Next: {_NEXT[State.DECIDED]}.")


@effects.command(epilog=EXIT_CODES)
@click.option(
    "--app",
    required=True,
    metavar="MODULE:EFFECTS",
    help=f"The Effects or AsyncEffects of the application, or a function that returns one: {_EXAMPLE}.",
)
@click.option("--limit", type=click.IntRange(min=1), default=100, show_default=True, help="Look at so many at most.")
@json_option
@debug_option
def settle(app: str, limit: int, as_json: bool, debug: bool) -> None:
    """Drive the effects that are due, each by its policy. Meant for cron.

    The database is that of the application. The exit code is 1 if something failed, or if a policy has ended: the log
    says more. Effects whose names the application does not know are left to others.

    \b
    Examples:
      idempotency effects settle --app myapp.shop:effects
      idempotency effects settle --app myapp.shop:make_effects --limit 1000 --json
    """
    with one_line(debug=debug):
        found = from_application(app, (Effects, AsyncEffects), _EXAMPLE)
        settled: Settled = (
            asyncio.run(found.settle(limit=limit)) if isinstance(found, AsyncEffects) else found.settle(limit=limit)
        )
        if as_json:
            print_json(asdict(settled))
        else:
            say(f"{settled}.")
        if settled.failed or settled.stopped:
            raise Failed(
                f"{settled.failed} effects failed, and {settled.stopped} need a person: look at the log, and at "
                "`idempotency effects list`"
            )


def _as_object(found: StoredEffect, *, values: bool = False) -> dict[str, Any]:
    """Return an effect for printing: without its request and its value, unless they were asked for."""
    facts = asdict(found)
    request, value = facts.pop("request"), facts.pop("value")
    return facts | ({"request": readable(request), "value": readable(value)} if values else {})


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {each}" for name, each in value.items() if each is not None)
    if isinstance(value, timedelta):
        return duration(value)
    return moment_with_zone(value) if hasattr(value, "isoformat") else str(value)
