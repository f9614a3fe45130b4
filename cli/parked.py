"""`idempotency parked` lists the parked requests of a webhook, replays them, and drops one."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TypeVar

import click
from sqlalchemy.util import greenlet_spawn

from projector_dedup.http.parked import ParkedRequest, Parking
from projector_dedup.http.webhook import Webhook
from projector_dedup.maintenance.state import moment_without_zone
from projector_dedup.message import printable

from .check import imported, importing
from .consumer_named import Misnamed
from .dead import of_a_place, print_each, values_option, yes_option
from .options import EXIT_CODES, WholeNumber
from .output import Failed, between_batches, confirmed, json_option, print_json, say, table
from .rows import readable

T = TypeVar("T")

_EXAMPLE = "webhooks:from_stripe"


def _run(place: str, work: Callable[[Webhook, Parking], T]) -> T:
    """Import the webhook at ``place``, and return what ``work`` returns for it and its parked requests."""
    logging.getLogger("projector_dedup").addHandler(logging.NullHandler())  # the table has the reasons

    async def run() -> T:
        try:
            webhook = await _webhook_named(place)
        except Failed as error:
            raise Misnamed(error.message) from error
        if webhook.parking is None:
            raise Misnamed(f'{place} parks nothing; give it on_reject="park"')
        if not webhook.asynchronous:
            return work(webhook, webhook.parking)
        try:
            return await greenlet_spawn(work, webhook, webhook.parking)
        finally:  # its connections belong to this event loop, which ends here
            await greenlet_spawn(webhook.parking.engine.dispose)

    return asyncio.run(run())


async def _webhook_named(place: str) -> Webhook:
    found = imported(place, "WEBHOOK", _EXAMPLE)
    found = getattr(found, "webhook", found)
    if inspect.isroutine(found):
        with importing(place, "WEBHOOK", _EXAMPLE):
            found = found()
            found = await found if inspect.isawaitable(found) else found
        found = getattr(found, "webhook", found)
    if not isinstance(found, Webhook):
        raise Failed(
            f"{place} is of type {type(found).__name__}; name a Webhook, what webhook_endpoint() returned, or a "
            f"function without arguments that returns one, as in {_EXAMPLE}"
        )
    return found


def _one(parking: Parking, place: str, message: str) -> ParkedRequest:
    found = parking.requests(key=message)
    if not found:
        raise Failed(f"there is no parked request {printable(message)} in {place}: copy the id from `list`")
    return found[0]


@click.group(epilog=EXIT_CODES, short_help="List, replay and drop parked webhooks.")
@click.argument("webhook", metavar="WEBHOOK")
@click.pass_context
def parked(context: click.Context, webhook: str) -> None:
    """List, replay and drop the parked requests of WEBHOOK, which is MODULE:ATTRIBUTE.

    The attribute is what webhook_endpoint() returned, a Webhook, or a function without arguments that returns one. Run
    the command in the folder of your application.

    \b
    Examples:
      idempotency parked webhooks:from_stripe list
      idempotency parked webhooks:from_stripe replay
    """
    context.obj = webhook


@parked.command("list", epilog=EXIT_CODES)
@of_a_place
@click.option("--limit", type=WholeNumber(min=1), default=100, show_default=True, help="List at most this many.")
@values_option
@json_option
def list_requests(place: str, limit: int, values: bool, as_json: bool) -> None:
    """List the parked requests, oldest first.

    \b
    Example: idempotency parked webhooks:from_stripe list
    """
    found, there = _run(place, lambda _, parking: (parking.requests(limit), parking.count()))
    listed = [_as_object(each, values=values) for each in found]
    if as_json:
        print_json({"webhook": place, "there": there, "complete": len(found) == there, "parked": listed})
        return
    if values:
        print_each(listed)
    elif found:
        rows = [(printable(each.id), moment_without_zone(each.parked_at), printable(each.reason)) for each in found]
        table(("id", "parked (UTC)", "reason"), rows)
    say(f"{place}: {there:,} parked requests{'' if len(found) == there else '; raise --limit to list more'}.")


@parked.command(epilog=EXIT_CODES)
@of_a_place
@click.argument("ids", metavar="[ID]...", nargs=-1)
@yes_option
def replay(place: str, ids: tuple[str, ...], yes: bool) -> None:
    """Deliver the parked requests again: all of them, or those with these IDs.

    First correct the handler or the data. Replay while the markers are kept: an event that was applied meanwhile is
    then a duplicate. A request that is rejected again stays parked, and the exit code is 1. You may interrupt the
    command at any time and run it again.

    \b
    Example: idempotency parked webhooks:from_stripe replay --yes
    """

    def work(webhook: Webhook, parking: Parking) -> tuple[int, int]:
        chosen = [_one(parking, place, each).id for each in ids] or parking.ids()
        if not yes and not confirmed(f"Replay {len(chosen):,} parked requests of {place}?"):
            raise Failed(f"nothing was replayed in {place}")
        done = left = 0
        with between_batches("Replayed") as after:
            for each in chosen:
                for request in parking.requests(key=each):  # none if another person was faster
                    acknowledged = webhook.replay(request).acknowledge
                    done, left = done + acknowledged, left + (not acknowledged)
                after(1)
        return done, left

    done, left = _run(place, work)
    say(f"Replayed {done:,} parked requests.")
    if left:
        raise Failed(f"{left:,} parked requests failed again, and stay parked: `list` has the reasons")


@parked.command(epilog=EXIT_CODES)
@of_a_place
@click.argument("message_id", metavar="ID")
@yes_option
def drop(place: str, message_id: str, yes: bool) -> None:
    """Delete the parked request ID. Nobody can replay it afterwards.

    \b
    Example: idempotency parked webhooks:from_stripe drop evt_1
    """

    def work(_webhook: Webhook, parking: Parking) -> None:
        print_each([_as_object(_one(parking, place, message_id), values=False)])
        if not yes and not confirmed(f"Drop the parked request {message_id}? Nobody can replay it then"):
            raise Failed(f"nothing was dropped in {place}")
        parking.drop(message_id)

    _run(place, work)
    say(f"Dropped the parked request {message_id}.")


def _as_object(request: ParkedRequest, *, values: bool) -> dict[str, Any]:
    """Return a parked request for printing, without its body and its headers unless ``values``."""
    facts = asdict(request) | {"body": readable(request.body)}
    return facts if values else {name: facts[name] for name in ("id", "parked_at", "reason")}
