"""`idempotency effects` lists unfinished effects, shows one, records a person's decision, and sends due effects."""

from __future__ import annotations

import asyncio
import getpass
import shlex
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from typing import Any

import click
from click.core import ParameterSource

from projector_dedup.effects import AsyncEffects, Effects, EffectTables, Settled
from projector_dedup.effects.steps import State
from projector_dedup.maintenance.effects import (
    Decided,
    StoredEffect,
    count_overdue,
    find_effect,
    find_effects,
    mark_seen,
)
from projector_dedup.maintenance.effects import resolve as decide
from projector_dedup.maintenance.state import duration, moment_with_zone
from projector_dedup.message import printable

from .check import EFFECTS_EXAMPLE, from_application
from .options import EXIT_CODES, Deployment, WholeNumber, database_options, debug_option, overdue_option, span
from .output import Failed, json_option, one_line, print_json, say, table
from .rows import readable

_options = partial(database_options, kinds=[EffectTables])
_DECISIONS: dict[str, Decided] = {"done": "done", "rejected": "rejected", "not-done": "not done"}

_SETTLE = "`idempotency effects settle --app ...`"
_NEXT = {
    State.ARMED: (f"{_SETTLE} sends it. To cancel it:", ["--attempt {attempt} --rejected cancelled"]),
    State.UNKNOWN: (f"{_SETTLE} asks or sends again, if the policy permits it.", []),
    State.KEPT: (f"{_SETTLE} records it; an error above says why that failed, or that it was done twice.", []),
    State.DECIDED: (
        f"{_SETTLE} records it. If an error above prevents that, replace the decision:",
        ["--attempt {attempt} --done JSON --instead-of {last}"],
    ),
    State.STOPPED: (
        "search for the provider key at the provider. If it was done, give the value that the function returns; if the "
        "provider has nothing, it is sent again with this key:",
        ["--attempt {attempt} --done JSON", "--attempt {attempt} --not-done"],
    ),
    State.DOUBLE: (
        "at the provider, undo each deed that is not the recorded value (`show --values`). Then:",
        ["--seen"],
    ),
}
"""The text for the person on call, and the options of `resolve` that come next."""

_TWICE = (
    "it was done twice. At the provider, undo every deed but one, and give the value of that one:",
    ["--attempt {attempt} --done JSON"],
)
"""The text and the options for an effect that was done twice, and whose values cannot be stored."""


def _say_next(found: StoredEffect, tables: EffectTables, effect: str | None) -> None:
    """Print what comes next. ``effect`` is the name that the person gave to choose one of several effects."""
    if found.state not in _NEXT:
        return
    text, options = _TWICE if found.state is State.STOPPED and found.twice else _NEXT[found.state]
    say(f"Next: {text}")
    table = None if tables.marker.name == tables.default_name else tables.marker.name
    place = {"table": table, "schema": tables.marker.schema, "effect": effect, "scope": found.scope}
    chosen = "".join(f" --{name} {_typed(value, name)}" for name, value in place.items() if value is not None)
    if click.get_current_context().get_parameter_source("database_url") is ParameterSource.COMMANDLINE:
        chosen = f" --database-url URL{chosen}"  # which may contain a password
    key = f"{'-- ' if found.key.startswith('-') else ''}{_typed(found.key, 'key')}"
    last = found.decisions[-1]["outcome"].replace(" ", "-") if found.decisions else ""
    for each in options:  # not by `say`, which would break a line that is to be copied
        given = each.format(attempt=found.attempt, last=last)
        click.echo(f"  idempotency effects resolve{chosen} {given} --reason TEXT {key}")


def _typed(text: str, name: str) -> str:
    """Return the text as a shell takes it, or its name, which no shell takes, if a terminal could not show it."""
    return shlex.quote(text) if printable(text) == text else f"<{name}>"


def _one_of(command: Any) -> Any:
    for option in (
        click.option("--scope", help="The owner of the key, such as a tenant.  [default: no scope]"),
        click.option("--effect", metavar="NAME", help="The name of the effect, if several effects have the key."),
        click.argument("key"),
    ):
        command = option(command)
    return command


def _tables(deployment: Deployment) -> EffectTables:
    assert isinstance(deployment.tables, EffectTables)  # noqa: S101  # _options permits no other tables
    return deployment.tables


@click.group(epilog=EXIT_CODES, short_help="List, show, decide and send effects.")
def effects() -> None:
    """List, show, decide and send effects, which are calls to other systems.

    Run `settle` every minute from cron, and alert on the exit code of `list`. The other commands are for operators.

    \b
    Examples:
      idempotency effects list --unknown
      idempotency effects show order-7 --effect billing.charge
      idempotency effects settle --app myapp.shop:effects
    """


@effects.command("list", epilog=EXIT_CODES)
@_options
@click.option("--unknown", is_flag=True, help="List only effects that may or may not have been done.")
@click.option("--older-than", type=span, help="List only effects armed longer ago: 15m, 2h, 1d.  [default: all]")
@overdue_option
@click.option("--limit", type=WholeNumber(min=1), default=1000, show_default=True, help="List at most this many.")
@json_option
def list_effects(
    deployment: Deployment,
    unknown: bool,
    older_than: timedelta | None,
    overdue: timedelta,
    limit: int,
    as_json: bool,
) -> None:
    """List the effects that are not finished.

    Run it from monitoring: the exit code is 1 if an effect needs a person, or is overdue. Effects that need a person
    come first, then the oldest. An effect that was done twice is listed until a person has seen it.

    \b
    Examples:
      idempotency effects list
      idempotency effects list --unknown --older-than 15m --json
    """
    with deployment.opened() as engine:
        asked: dict[str, Any] = {"unknown": unknown, "older_than": older_than, "tables": _tables(deployment)}
        found = find_effects(engine, limit=limit + 1, **asked)
        late = count_overdue(engine, overdue, tables=_tables(deployment))
    more, found = len(found) > limit, found[:limit]
    if as_json:
        print_json({**deployment.place, "complete": not more, "effects": [_as_object(each) for each in found]})
    elif not found:
        asked_for = " matches the options" if unknown or older_than is not None else ""
        say(f"{deployment}: no unfinished effect{asked_for}.")
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
        say("There are more effects: raise --limit." if more else "")
    people = sum(each.state in (State.STOPPED, State.DOUBLE) for each in found)
    problems = []
    if people:
        problems.append(f"effects that need a person: {people} (run `idempotency effects show KEY` for each)")
    if late:
        since = duration(overdue)
        problems.append(f"effects armed or due for more than {since}: {late} (run {_SETTLE} from cron, read its log)")
    if problems:
        raise Failed("; ".join(problems))


@effects.command(epilog=EXIT_CODES)
@_options
@_one_of
@click.option("--values", is_flag=True, help="Also print the request and the value, which may contain secrets.")
@json_option
def show(deployment: Deployment, key: str, effect: str | None, scope: str | None, values: bool, as_json: bool) -> None:
    """Show the effect of KEY: its state, its attempts, the provider key, and what to do next.

    Run it before `resolve`, which needs the number of attempts.

    \b
    Examples:
      idempotency effects show order-7
      idempotency effects show order-7 --effect billing.charge --json
    """
    with deployment.opened() as engine:
        found = find_effect(engine, key, effect, scope, tables=_tables(deployment))
    if as_json:
        print_json({**deployment.place, **_as_object(found, values=values)})
        return
    for name, value in _as_object(found, values=values).items():
        if value not in (None, []) and value is not False:
            click.echo(f"{name.replace('_', ' '):<14}  {printable(_text(value))}")
    _say_next(found, _tables(deployment), effect)


@effects.command(epilog=EXIT_CODES)
@_options
@_one_of
@click.option("--attempt", type=WholeNumber(min=0), help="The number of attempts that `show` printed.")
@click.option("--done", metavar="JSON", help="The effect was done, with this value: '\"pi_77\"', or null.")
@click.option("--rejected", metavar="CODE", help="The provider rejected the effect, or you cancel it: any word.")
@click.option("--not-done", is_flag=True, help="The effect was not done, so `settle` sends it again.")
@click.option("--seen", is_flag=True, help="You have looked at an effect that was done twice, and have corrected it.")
@click.option(
    "--instead-of",
    type=click.Choice(["done", "rejected", "not-done"]),
    help="The decision that yours replaces, if another person has decided before.",
)
@click.option("--reason", required=True, help="How you know this. The row keeps the text.")
@click.option("--by", "who", help="The person who decides.  [default: the user of this machine]")
def resolve(
    deployment: Deployment,
    key: str,
    effect: str | None,
    scope: str | None,
    attempt: int | None,
    done: str | None,
    rejected: str | None,
    not_done: bool,
    seen: bool,
    instead_of: str | None,
    reason: str,
    who: str | None,
) -> None:
    """Decide whether the effect of KEY was done. The next `settle` records the decision.

    Use it for an effect that needs a person, after you checked the provider. The command writes nothing if a newer
    attempt exists, if an attempt is running, if the effect has an outcome, or if another person has decided before. To
    cancel an effect that was never sent, give --rejected cancelled.

    \b
    Examples:
      idempotency effects resolve o7 --attempt 2 --done '"pi_7"' --reason seen
      idempotency effects resolve o7 --attempt 2 --not-done --reason "not there"
      idempotency effects resolve o7 --attempt 0 --rejected cancelled --reason x
      idempotency effects resolve o7 --seen --reason "refunded pi_8"
    """
    if (done is not None) + (rejected is not None) + not_done + seen != 1:
        raise click.UsageError("give one of --done JSON, --rejected CODE, --not-done and --seen")
    if (attempt is None) != seen:
        raise click.UsageError("give --attempt with a decision, and not with --seen")
    who = who or getpass.getuser()
    place: dict[str, Any] = {"effect": effect, "scope": scope, "tables": _tables(deployment)}
    with deployment.opened() as engine:
        if attempt is None:
            found = mark_seen(engine, key, why=reason, who=who, **place)
            _say_decided(deployment, found, f"{found.state}, and seen by {printable(who)}.")
            return
        found = decide(
            engine,
            key,
            attempt=attempt,
            outcome="not done" if not_done else "rejected" if done is None else "done",
            value=done,
            code=rejected,
            why=reason,
            who=who,
            instead_of=_DECISIONS[instead_of] if instead_of else None,
            **place,
        )
    _say_decided(deployment, found, f"{found.state}. Next: {_SETTLE} records it.")


def _say_decided(deployment: Deployment, found: StoredEffect, text: str) -> None:
    say(f"{deployment}: {printable(found.effect)}, key {printable(found.key)}: {text}")


@effects.command(epilog=EXIT_CODES)
@click.option(
    "--app",
    required=True,
    metavar="MODULE:EFFECTS",
    help=f"The Effects or AsyncEffects of your application, or a function that returns one: {EFFECTS_EXAMPLE}.",
)
@click.option("--limit", type=WholeNumber(min=1), default=100, show_default=True, help="Handle at most this many.")
@json_option
@debug_option
def settle(app: str, limit: int, as_json: bool, debug: bool) -> None:
    """Send armed effects, and continue unknown effects by their policies.

    Run it every minute from cron. It uses the database of your application, and ignores effects that the application
    does not define. The exit code is 1 if an effect failed or its policy has ended; the log has the details.

    \b
    Examples:
      idempotency effects settle --app myapp.shop:effects
      idempotency effects settle --app myapp.shop:make_effects --limit 1000 --json
    """
    with one_line(debug=debug):
        found = from_application(app, (Effects, AsyncEffects), EFFECTS_EXAMPLE)
        settled: Settled = (
            asyncio.run(found.settle(limit=limit)) if isinstance(found, AsyncEffects) else found.settle(limit=limit)
        )
        if as_json:
            print_json(asdict(settled))
        else:
            say(f"{settled}.")
        if settled.failed or settled.stopped:
            raise Failed(
                f"{settled.failed} effects failed, and {settled.stopped} need a person; read the log, and run "
                "`idempotency effects list`"
            )


def _as_object(found: StoredEffect, *, values: bool = False) -> dict[str, Any]:
    """Return an effect for printing, without its request and its value unless ``values``."""
    facts = asdict(found)
    request, value = facts.pop("request"), facts.pop("value")
    return facts | ({"request": readable(request), "value": readable(value)} if values else {})


def _text(value: Any) -> str:
    if isinstance(value, list):
        return "; ".join(map(_text, value))
    if isinstance(value, dict):
        return ", ".join(f"{name} {each}" for name, each in value.items() if each is not None)
    if isinstance(value, timedelta):
        return duration(value)
    return moment_with_zone(value) if hasattr(value, "isoformat") else str(value)
