"""`idempotency dead` lists the dead letters of a consumer or a webhook, shows one, replays them, and drops one."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import wraps
from typing import Any

import click
from sqlalchemy.util import greenlet_spawn

from projector_dedup.brokers.dead_letters import DeadLetter, Decide, Fate, Sifted
from projector_dedup.brokers.running import Runs
from projector_dedup.http.webhook import Webhook
from projector_dedup.maintenance.state import moment_with_zone, moment_without_zone
from projector_dedup.message import printable

from .consumer_named import consumer_named
from .options import EXIT_CODES, WholeNumber, debug_option
from .output import (
    Failed,
    between_batches,
    confirmed,
    harmless,
    json_option,
    one_line,
    print_json,
    readable_json,
    require_terminal,
    say,
    table,
)
from .rows import readable

_INSTEAD = {
    "celery": "use RabbitMQ's own tools for its dead letters, and replay(app, queue) of projector_dedup.brokers.celery",
    "faststream": "name a consumer of projector_dedup.brokers.aio_pika or .nats for the same queue or stream, which "
    "has the same dead letters",
}

_values_option = click.option(
    "--values", is_flag=True, help="Also print the body and the headers, which may contain secrets."
)
_yes_option = click.option("--yes", is_flag=True, help="Do not ask for confirmation.")


def _sift(place: str, decide: Decide) -> Sifted:
    """Import the consumer at ``place``, and settle its dead letters as ``decide`` says."""

    async def sift() -> Sifted:
        consumer = await consumer_named(place, _INSTEAD, Runs, Webhook)
        is_webhook = isinstance(consumer, Webhook)
        if is_webhook:
            logging.getLogger("projector_dedup").addHandler(logging.NullHandler())  # its rows have the reasons
        try:
            sifted: Any = consumer.settle_dead_letters(decide)
            done: Sifted = await sifted if inspect.isawaitable(sifted) else sifted
        finally:
            if is_webhook and consumer.asynchronous:  # its connections belong to this event loop, which ends here
                await greenlet_spawn(consumer.dispatcher.markers_engine.dispose)
        return done

    return asyncio.run(sift())


def _letters_of(place: str, message: str) -> list[DeadLetter]:
    """Return the dead letters of a message, and settle none. Raises `Failed` if there is none, or of two messages."""
    found: list[DeadLetter] = []

    def look(letter: DeadLetter) -> Fate:
        if message in (letter.id, printable(letter.id)):
            found.append(letter)
        return "keep"

    _sift(place, look)
    if not found:
        raise Failed(
            f"there is no dead letter of message {printable(message)} in {place}: copy the id from `list`; another "
            "process may be reading it"
        )
    if len(ids := {each.id for each in found}) > 1:
        raise Failed(
            f"{printable(message)} stands for {len(ids)} different ids in {place}: give one of them as `list --json` "
            "has it, and write a character that cannot be printed in your shell's own way, as in $'a\\nb'"
        )
    return found


def _settle(place: str, decide: Decide) -> tuple[int, str]:
    """Settle dead letters as ``decide`` says. Return their number, and a sentence if not all could be read."""
    read = 0

    def counted(letter: DeadLetter) -> Fate:
        nonlocal read
        read += 1
        return decide(letter)

    done = _sift(place, counted)
    if done.there is None or read >= done.there:
        return done.settled, ""
    return done.settled, (
        f" {done.there - read:,} of about {done.there:,} were not read: they wait behind others, or another process "
        "reads or settles them. Run the command again."
    )


def _of_a_consumer(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give ``command`` the place of the consumer that was named before it, and print its errors in one line."""

    @wraps(command)
    def run(place: str, *, debug: bool, **rest: Any) -> Any:
        with one_line(debug=debug):
            return command(place, **rest)

    passed: Callable[..., Any] = click.pass_obj(run)
    return debug_option(passed)


@click.group(epilog=EXIT_CODES, short_help="List, show, replay and drop dead letters.")
@click.argument("consumer", metavar="CONSUMER")
@click.pass_context
def dead(context: click.Context, consumer: str) -> None:
    """List, show, replay and drop the dead letters of CONSUMER, which is MODULE:ATTRIBUTE.

    The attribute is a consumer of projector_dedup.brokers, a webhook with on_reject="park", or a function without
    arguments, also an async def, that returns one. Run the command in the folder of your application.

    \b
    Examples:
      idempotency dead payments:consumer list
      idempotency dead payments:consumer show payment-1 --values
      idempotency dead payments:consumer replay
    """
    context.obj = consumer


@dead.command("list", epilog=EXIT_CODES)
@_of_a_consumer
@click.option("--limit", type=WholeNumber(min=1), default=100, show_default=True, help="List at most this many.")
@_values_option
@json_option
def list_letters(place: str, limit: int, values: bool, as_json: bool) -> None:
    """List the dead letters, which stay where they are.

    The first column is the id of the message, or sha256: and 16 digits of the hash of its body if it has no id. Use it
    for `show` and `drop`.

    \b
    Examples:
      idempotency dead payments:consumer list
      idempotency dead payments:consumer list --json --values > dead.json
    """
    found: list[DeadLetter] = []
    complete = True

    def keep(letter: DeadLetter) -> Fate:
        nonlocal complete
        complete = len(found) < limit
        found.extend([letter] if complete else [])
        return "keep" if complete else "stop"

    there = _sift(place, keep).there
    hidden = complete and there is not None and there > len(found)
    if as_json:
        listed = [_as_object(each, values=values) for each in found]
        print_json({"consumer": place, "there": there, "complete": complete and not hidden, "dead_letters": listed})
        return
    if values:
        _print(found, values=True)
    elif found:
        table(
            ("id", "occurred (UTC)", "deliveries", "reason"),
            [
                (
                    printable(each.id),
                    "-" if each.occurred_at is None else moment_without_zone(each.occurred_at),
                    str(each.deliveries or "-"),
                    printable(each.reason or "-"),
                )
                for each in found
            ],
            right=("deliveries",),
        )
    count = f"{len(found):,}" if complete else f"more than {limit:,}" if there is None else f"{there:,}"
    more = f" of about {there:,}; the others wait behind these, or another process reads them" if hidden else ""
    say(f"{place}: {count} dead letters{more if complete else '; raise --limit to list more'}.")


@dead.command(epilog=EXIT_CODES)
@_of_a_consumer
@click.argument("message_id", metavar="ID")
@_values_option
@json_option
def show(place: str, message_id: str, values: bool, as_json: bool) -> None:
    """Show each dead letter of the message ID, with the whole reason.

    \b
    Example: idempotency dead payments:consumer show payment-1 --values
    """
    found = _letters_of(place, message_id)
    if as_json:
        print_json({"consumer": place, "dead_letters": [_as_object(each, values=values) for each in found]})
    else:
        _print(found, values=values)


@dead.command(epilog=EXIT_CODES)
@_of_a_consumer
@_yes_option
def replay(place: str, yes: bool) -> None:
    """Have the consumer deliver the present dead letters again.

    First correct the handler or the data. Replay while the markers are kept: a message that was applied before is then
    a duplicate. Consumers may run meanwhile. A message that is rejected again stays a dead letter. You may interrupt
    the command at any time and run it again.

    \b
    Example: idempotency dead payments:consumer replay --yes
    """
    if not yes:
        require_terminal()
        there = _sift(place, lambda _: "stop").there
        if not confirmed(f"Replay {'the' if there is None else f'{there:,}'} dead letters of {place}?"):
            raise Failed(f"nothing was replayed in {place}")
    with between_batches("Replayed") as after:
        asked = 0

        def counted(_letter: DeadLetter) -> Fate:
            nonlocal asked
            asked += 1
            after(1)
            return "replay"

        replayed, others = _settle(place, counted)
    say(f"Replayed {replayed:,} dead letters.{others}")
    if replayed < asked:  # a webhook delivers them here and now; a consumer puts them back into its queue
        raise Failed(f"{asked - replayed:,} were rejected again, and stay: `list` shows why")


@dead.command(epilog=EXIT_CODES)
@_of_a_consumer
@click.argument("message_id", metavar="ID")
@_yes_option
def drop(place: str, message_id: str, yes: bool) -> None:
    """Delete each dead letter of the message ID. Nobody can replay it afterwards.

    Kafka cannot remove one message, so the command refuses to drop one there.

    \b
    Example: idempotency dead payments:consumer drop payment-1
    """
    if not yes:
        require_terminal()
    found = _letters_of(place, message_id)
    if not yes:
        _print(found, values=False)
        if not confirmed(f"Drop the dead letters of message {message_id}? Nobody can replay them then"):
            raise Failed(f"nothing was dropped in {place}")
    dropped, others = _settle(place, lambda letter: "drop" if letter.id == found[0].id else "keep")
    say(f"Dropped {dropped:,} dead letters of message {message_id}.{others}")


def _print(letters: Sequence[DeadLetter], *, values: bool) -> None:
    for number, each in enumerate(letters):
        click.echo("\n" if number else "", nl=False)
        for name, value in _as_object(each, values=values).items():
            if value not in (None, ""):
                text = moment_with_zone(value) if isinstance(value, datetime) else value
                text = text if isinstance(text, str) else readable_json(text)
                click.echo(f"{name.replace('_', ' '):<11}  {harmless(text)}".replace("\n", "\n" + " " * 13))


def _as_object(letter: DeadLetter, *, values: bool) -> dict[str, Any]:
    """Return a dead letter for printing, without its body and its headers unless ``values``."""
    facts = {name: getattr(letter, name) for name in ("id", "occurred_at", "deliveries", "reason")}
    if values:
        headers = {
            str(name): readable(value) if isinstance(value, bytes) else str(value)
            for name, value in letter.headers.items()
        }
        facts |= {"body": readable(letter.body), "headers": headers}
    return facts
