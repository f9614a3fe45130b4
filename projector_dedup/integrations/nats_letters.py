"""Dead letters of NATS JetStream: a stream that keeps what a consumer has rejected, and its replay."""

from __future__ import annotations

import re
from collections.abc import Iterator

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, DiscardPolicy
from nats.js.errors import NotFoundError

from ..errors import RefusedError
from ..message import printable
from .incoming import MAX_TEXT_BYTES
from .nats_messages import UNREADABLE, Pull
from .settling import logger

__all__ = ["dead_stream", "id_beside", "keep", "open_dead_letters", "replay"]

REJECTED_FOR = "x-rejected-for"
SUBJECT = "x-subject"
MESSAGE_ID = "x-message-id"  # of a dead letter and its replay, whose Nats-Msg-Id the server would call a duplicate's
_IDS = (MESSAGE_ID, "Nats-Msg-Id")
_LEFT_OUT = (REJECTED_FOR, SUBJECT, "Nats-Msg-Id")  # headers of a dead letter that its replay is published without
_AROUND = 64  # bytes of a message's headers beside their names and values, and some to spare
_NAME = re.compile(r"(?!nats-)[!#$%&'*+\-.^_`|~0-9A-Za-z]+", re.IGNORECASE)
"""A name of a header that can be copied. nats-py publishes no other, and the server obeys those that begin with Nats-:
for ``Nats-Rollup`` it deletes what is in the stream, for ``Nats-Expected-...`` it refuses the message."""
_SUBJECT = re.compile(r"\S+")
_PATIENCE = 5.0  # seconds that a replay waits for the next dead letter
_TEXTS = 300  # characters of the names of headers that are logged

Headers = dict[str, str]


def dead_stream(stream: str, durable: str) -> str:
    """Return the name of the stream that keeps what the consumer ``durable`` of ``stream`` has rejected."""
    return f"{stream}-{durable}-dead"


async def open_dead_letters(streams: JetStreamContext, stream: str, durable: str) -> None:
    """Make the stream of dead letters, as safe as the stream that it stands beside.

    Raises ``RefusedError`` for one that is there and belongs to another consumer, or discards what it is full of.
    """
    dead, subject = dead_stream(stream, durable), _dead_subject(stream, durable)
    try:
        found = (await streams.stream_info(dead)).config
    except NotFoundError:
        beside = (await streams.stream_info(stream)).config
        await streams.add_stream(
            name=dead, subjects=[subject], storage=beside.storage, num_replicas=beside.num_replicas
        )
        return
    bounded = max(found.max_msgs or 0, found.max_bytes or 0, found.max_msgs_per_subject or 0) > 0
    if found.subjects != [subject] or (bounded and found.discard != DiscardPolicy.NEW):
        raise RefusedError(
            f"the stream {dead} cannot keep dead letters: its subjects are {found.subjects}, or it has a limit of size "
            f"and discards the oldest; let it have the subject {subject} alone, and no limit or discard=new"
        )


async def keep(connection: Client, message: Msg, stream: str, durable: str, reason: str) -> bool:
    """Publish a dead letter, and return True when the server has stored it; what is published twice is stored once.

    The letter is without the headers that cannot be published again, and without those that make it too large for the
    server; the log names them. Returns False, and logs that, if the letter is too large without any header but its own.
    """
    stamp = message.metadata.timestamp.isoformat()  # numbers begin again in a stream that was made anew
    number = message.metadata.sequence.stream
    headers = message.headers or {}
    named = {SUBJECT: message.subject, "Nats-Msg-Id": f"{stream}:{number}:{stamp}"}
    if (found := id_beside(headers)) is not None:
        is_kept = found == found.strip() and len(found.encode()) <= MAX_TEXT_BYTES  # nats-py cuts blanks off
        named[MESSAGE_ID] = found if is_kept else UNREADABLE  # to be rejected again
    for kept in _shorter_and_shorter(headers, named, reason):
        size = len(message.data) + sum(len(name) + len(value.encode()) + 4 for name, value in kept.items())
        if size + _AROUND <= connection.max_payload:
            await connection.jetstream().publish(
                _dead_subject(stream, durable), message.data, stream=dead_stream(stream, durable), headers=kept
            )
            changed = [name for name in headers if name not in _IDS and kept.get(name) != headers[name]]
            differs = [name for name, value in headers.items() if UNREADABLE in value or value != value.strip()]
            changed += [name for name in differs if name not in changed]
            if changed:
                logger.warning(
                    "the dead letter of message %d of stream %s has these headers not, or not as they came: %s",
                    *(number, printable(stream), printable(", ".join(changed)[:_TEXTS])),
                )
            return True
    logger.error(
        "message %d of stream %s is too large for a dead letter, and comes again: give the server a larger max_payload",
        *(number, stream),
    )
    return False


def _shorter_and_shorter(headers: Headers, named: Headers, reason: str) -> Iterator[Headers]:
    copied = {name: value for name, value in headers.items() if _NAME.fullmatch(name)}
    yield {**copied, **named, REJECTED_FOR: reason.encode("ascii", "backslashreplace").decode()}
    yield {**copied, **named}
    yield named


async def replay(connection: Client, stream: str, durable: str) -> int:
    """Publish the dead letters of a consumer again, to the subject that each came from; return their number.

    Call it after the handler or the data was mended. Every consumer of that subject gets the messages: those that had
    applied them find duplicates. Each dead letter is deleted after the stream has confirmed its copy. A message in the
    stream of dead letters that has no subject to which nats-py can publish stays there, and the log says so.
    """
    streams, dead = connection.jetstream(), dead_stream(stream, durable)
    state = (await streams.stream_info(dead)).state  # what is rejected anew while this runs stays
    everything = ConsumerConfig(ack_policy=AckPolicy.EXPLICIT, max_ack_pending=-1, inactive_threshold=60.0)
    letters = Pull(connection, dead, (await streams.add_consumer(dead, everything)).name)
    await letters.open()
    count = 0
    try:
        for _ in range(state.messages):
            found = await letters.fetch(1, _PATIENCE)
            if not found or found[0].metadata.sequence.stream > state.last_seq:
                break  # another replay was quicker
            (letter,) = found
            number, headers = letter.metadata.sequence.stream, letter.headers or {}
            if not _SUBJECT.fullmatch(headers.get(SUBJECT, "")):
                await letter.ack()
                logger.error(
                    "message %d of stream %s stays there, because nats-py cannot publish to its header %s",
                    *(number, printable(dead), SUBJECT),
                )
                continue
            kept = {name: value for name, value in headers.items() if name not in _LEFT_OUT and _NAME.fullmatch(name)}
            await streams.publish(headers[SUBJECT], letter.data, headers=kept or None, stream=stream)
            await letter.ack_sync()
            await streams.delete_msg(dead, number)
            count += 1
        return count
    finally:
        await letters.unsubscribe()


def id_beside(headers: Headers) -> str | None:
    """Return the id that a message has in its headers; None if it has none."""
    return headers.get(MESSAGE_ID, headers.get("Nats-Msg-Id"))


def _dead_subject(stream: str, durable: str) -> str:
    return f"dead.{stream}.{durable}"
