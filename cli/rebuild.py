"""`idempotency rebuild` fills a new generation of a projector, and lists the messages that it lacks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from sqlalchemy.util import greenlet_spawn

from projector_dedup import AsyncDispatcher, Dispatcher
from projector_dedup.errors import BatchFailed
from projector_dedup.maintenance.state import moment_with_zone
from projector_dedup.message import printable
from projector_dedup.outcome import Delivery
from projector_dedup.rebuild.lacking import Lacking, alacking, lacking
from projector_dedup.rebuild.rebuild import Rebuilt, aend_rebuild, arebuild, end_rebuild
from projector_dedup.rebuild.rebuild import rebuild as fill

from .check import from_application, imported
from .options import EXIT_CODES, Number, WholeNumber, debug_option
from .output import Failed, harmless, json_option, noted, one_line, print_json, reason, say

T = TypeVar("T")

_DISPATCHER, _SOURCE = "myapp.consumer:dispatcher", "myapp.archive:payments"
_SHOWN = 20  # ids of lacking messages

_on_stderr = Console(stderr=True, highlight=False, soft_wrap=True)


@click.command(epilog=EXIT_CODES, short_help="Rebuild a read model from old messages.")
@click.option(
    "--app",
    required=True,
    metavar="MODULE:DISPATCHER",
    help=f"The dispatcher of your application, or a function that returns one: {_DISPATCHER}.",
)
@click.option("--projector", required=True, metavar="NAME", help="The name of the projector to fill, or to verify.")
@click.option(
    "--source",
    metavar="MODULE:SOURCE",
    help=f"The old messages in their original order: an iterable, or a function that returns one: {_SOURCE}.",
)
@click.option("--verify", is_flag=True, help="Read no messages; list those that the new generation lacks.")
@click.option(
    "--beside", metavar="NAME", help="With --verify: the old generation.  [default: the one of building(...)]"
)
@click.option(
    "--settle",
    type=Number(min=0, max=3600),
    default=10.0,
    show_default=True,
    help="With --verify: how many seconds to wait for messages that are being delivered.",
)
@click.option(
    "--source-vouches",
    is_flag=True,
    help="With --verify: confirm that the source had all messages from before the oldest marker, which the command "
    "cannot compare.",
)
@click.option(
    "--batch-size", type=WholeNumber(min=1), default=200, show_default=True, help="How many messages in a batch."
)
@click.option("--limit", type=WholeNumber(min=1), help="Stop after this many messages.")
@click.option(
    "--until",
    metavar="MOMENT",
    type=click.DateTime(["%Y-%m-%d", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%d %H:%M:%S"]),
    help="Stop before the first message that occurred at or after this time in UTC: 2026-11-25, or "
    "2026-11-25T12:00:00.",
)
@click.option("--keep-going", is_flag=True, help="If a message fails, print its id and continue.")
@json_option
@debug_option
def rebuild(
    app: str,
    projector: str,
    source: str | None,
    verify: bool,
    beside: str | None,
    settle: float,
    source_vouches: bool,
    batch_size: int,
    limit: int | None,
    until: datetime | None,
    keep_going: bool,
    as_json: bool,
    debug: bool,
) -> None:
    """Fill a new generation of a projector from old messages, while deliveries continue.

    Use it to rebuild a read model. First register the new generation in your application with
    building(NewProjector(), beside="old-name"), and deploy. Then run this command with --source. You may interrupt it
    at any time and start it again: it skips the messages that were applied. Then remove building(...), deploy, and run
    this command with --verify: exit code 0 means that no message is lacking, and that you can switch the reads. Until
    then, cleanup keeps the markers of both generations.

    \b
    Examples:
      idempotency rebuild --app shop:app --projector totals-2 --source shop:events
      idempotency rebuild --app shop:app --projector totals-2 --verify
    """
    if (source is not None) == verify:
        raise click.UsageError("give either --source MODULE:SOURCE or --verify")
    with one_line(debug=debug):
        dispatcher = from_application(app, (Dispatcher, AsyncDispatcher), _DISPATCHER)
        if verify:
            found = _called(dispatcher, lacking, alacking, projector, beside=beside, settle=settle)
            _tell(found, projector, as_json=as_json, source_vouches=source_vouches)
            _called(dispatcher, end_rebuild, aend_rebuild, projector)
        else:
            arguments = {
                "batch_size": batch_size,
                "limit": limit,
                "until": None if until is None else until.replace(tzinfo=UTC),
            }
            _fill(dispatcher, projector, str(source), as_json=as_json, keep_going=keep_going, **arguments)


def _called(
    dispatcher: Any, function: Callable[..., T], awaits: Callable[..., Awaitable[T]], *given: Any, **named: Any
) -> T:
    """Call ``function`` for a ``Dispatcher``, or ``awaits`` for an ``AsyncDispatcher``."""
    if isinstance(dispatcher, Dispatcher):
        return function(dispatcher, *given, **named)

    async def run() -> T:
        try:
            return await awaits(dispatcher, *given, **named)
        finally:  # its connections belong to this event loop, which ends here
            await greenlet_spawn(dispatcher.markers_engine.dispose)

    return asyncio.run(run())


def _fill(dispatcher: Any, projector: str, place: str, *, as_json: bool, keep_going: bool, **arguments: Any) -> None:
    source, began = imported(place, "--source", _SOURCE), time.monotonic()

    def name(delivery: Delivery) -> None:
        _on_stderr.print(harmless(f"failed: message {delivery.message_id}: {_why(delivery)}"), markup=False)

    with noted() as interrupted, _progress(source, arguments["limit"]) as progress:
        arguments |= {"on_batch": progress, "stop": interrupted, "failed": name if keep_going else None}
        try:
            done: Rebuilt = _called(dispatcher, fill, arebuild, projector, source, **arguments)
        except BatchFailed as error:
            first = next(each for each in error.deliveries if each.error is not None)
            raise Failed(
                f"message {printable(str(first.message_id))} was not applied: {_why(first)}. Correct the cause, and "
                "run this command again. With --keep-going it prints the ids of such messages and continues"
            ) from error
    seconds = time.monotonic() - began
    if as_json:
        print_json({"projector": projector, **asdict(done), "seconds": round(seconds, 3)})
    else:
        rate = done.read / seconds if seconds else 0
        say(
            f"Read {done.read:,} messages, {rate:,.0f} a second: {done.applied:,} applied, {done.duplicates:,} applied "
            f"before, {done.skipped:,} not handled by {printable(projector)}, {done.failed:,} failed."
        )
        if done.complete and not done.failed:
            say("Next: remove building(...) everywhere, deploy, and run this command with --verify.")
    if interrupted():
        raise Failed("interrupted; run this command again")
    if done.failed:
        raise Failed(f"{done.failed:,} messages failed, see above; correct the handler, and run this command again")
    if not done.read:
        raise Failed("the source returned no message; check --source")
    if done.skipped == done.read:
        raise Failed(f"{printable(projector)} handles none of these messages; check their types")


def _why(delivery: Delivery) -> str:
    return "unknown" if delivery.error is None else f"{type(delivery.error).__name__}: {reason(delivery.error)}"


@contextmanager
def _progress(source: Any, limit: int | None) -> Iterator[Callable[[int], None]]:
    """Yield a function that advances a progress bar on stderr, if stderr is a terminal."""
    ends = [limit, len(source) if hasattr(source, "__len__") else None]
    total = min((each for each in ends if each is not None), default=None)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:,.0f}/s"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=_on_stderr, transient=True, disable=not _on_stderr.is_terminal) as bar:
        task, began = bar.add_task("Rebuilding", total=total, rate=0.0), time.monotonic()
        so_far = 0

        def add(more: int) -> None:
            nonlocal so_far
            so_far += more
            bar.update(task, advance=more, rate=so_far / max(time.monotonic() - began, 0.001))

        yield add


def _tell(found: Lacking, projector: str, *, as_json: bool, source_vouches: bool) -> None:
    """Print the result of a comparison. Raises `Failed` unless you can switch the reads."""
    unknown = (found.known_since is not None or not found.old) and not source_vouches
    unread = found.known_since is not None and found.source_read is False
    ready = not (found.number or found.building or unknown or unread)
    if as_json:
        print_json({"projector": projector, "ready": ready, **asdict(found)})
    else:
        say(
            f"{printable(projector)} has {found.old - found.number:,} of {found.old:,} messages of the old generation, "
            f"{found.number:,} lacking. It has {found.new_only:,} messages without a marker of the old generation."
        )
        for message_id in found.ids[:_SHOWN]:
            click.echo(f"  lacking: {printable(message_id)}")
        if found.number > _SHOWN:
            say(f"  and {found.number - _SHOWN:,} more")
    if found.number and found.number == found.old and found.new_only:
        raise Failed(
            "the new generation has none of the ids of the old one; check that the source returns the ids of the live "
            "messages. If it does not, begin again with an empty table and another name"
        )
    if found.number:
        raise Failed(
            f"{found.number:,} {'message is' if found.number == 1 else 'messages are'} lacking; correct the "
            "failures, and run the rebuild with a source that has the missing ones"
        )
    if found.building:
        raise Failed(
            "no message is lacking, but the projector is still building: remove building(...) around "
            f"{printable(projector)}, so that its failures fail the delivery; deploy, and run this command again"
        )
    if unread:
        raise Failed(
            "no run of the rebuild has read the source to its end without a failure, so the source does not prove that "
            "messages with deleted markers were applied; run the rebuild again"
        )
    if unknown and not found.old:
        raise Failed(
            "the old generation has no marker, so the command could not compare anything; check its name and the "
            "table. If the source had all messages, add --source-vouches"
        )
    if unknown and found.known_since is not None:
        raise Failed(
            f"no message since {moment_with_zone(found.known_since)} is lacking; the markers of earlier messages were "
            "deleted, so the command cannot compare these. If the source had all messages, add --source-vouches"
        )
    if not as_json:
        say("Next: switch the reads. Both generations receive all messages, so you can switch back.")
