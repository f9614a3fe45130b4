"""Dead letters of NATS JetStream: a stream that keeps what a consumer has rejected, and its replay."""

from __future__ import annotations

from collections.abc import Iterator

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import TimeoutError as NothingCame
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, DiscardPolicy
from nats.js.errors import NotFoundError

from ..errors import RefusedError
from .settling import logger

__all__ = ["dead_stream", "id_beside", "keep", "open_dead_letters", "replay"]

REJECTED_FOR = "x-rejected-for"
SUBJECT = "x-subject"
MESSAGE_ID = "x-message-id"  # of a dead letter and its replay, whose Nats-Msg-Id the server would call a duplicate's
_LEFT_OUT = (REJECTED_FOR, SUBJECT, "Nats-Msg-Id")  # headers of a dead letter that its replay is published without
_AROUND = 64  # bytes of a message's headers beside their names and values, and some to spare

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

    Returns False, and logs that, if the server takes no message so large, not even without its own headers.
    """
    stamp = message.metadata.timestamp.isoformat()  # numbers begin again in a stream that was made anew
    ours = {
        SUBJECT: message.subject,
        "Nats-Msg-Id": f"{stream}:{message.metadata.sequence.stream}:{stamp}",
    }
    for headers in _shorter_and_shorter(message.headers or {}, ours, reason):
        size = len(message.data) + sum(len(name) + len(value.encode()) + 4 for name, value in headers.items())
        if size + _AROUND <= connection.max_payload:
            await connection.jetstream().publish(
                _dead_subject(stream, durable), message.data, stream=dead_stream(stream, durable), headers=headers
            )
            return True
    logger.error(
        "message %d of stream %s is too large for a dead letter, and comes again: give the server a larger max_payload",
        *(message.metadata.sequence.stream, stream),
    )
    return False


def _shorter_and_shorter(headers: Headers, ours: Headers, reason: str) -> Iterator[Headers]:
    found = id_beside(headers)
    named = {**ours, **({MESSAGE_ID: found} if found is not None else {})}
    yield {**headers, **named, REJECTED_FOR: reason.encode("ascii", "backslashreplace").decode()}
    yield {**headers, **named}
    yield named


async def replay(connection: Client, stream: str, durable: str) -> int:
    """Publish the dead letters of a consumer again, to the subject that each came from; return their number.

    Call it after the handler or the data was mended. Every consumer of that subject gets the messages: those that had
    applied them find duplicates. Each dead letter is deleted after the stream has confirmed its copy.
    """
    streams, dead = connection.jetstream(), dead_stream(stream, durable)
    state = (await streams.stream_info(dead)).state  # what is rejected anew while this runs stays
    everything = ConsumerConfig(ack_policy=AckPolicy.EXPLICIT, max_ack_pending=-1, inactive_threshold=60.0)
    letters = await streams.pull_subscribe(_dead_subject(stream, durable), stream=dead, config=everything)
    try:
        for count in range(state.messages):
            try:
                (letter,) = await letters.fetch(1)
            except NothingCame:
                return count  # another replay was quicker
            if letter.metadata.sequence.stream > state.last_seq:
                return count
            headers = letter.headers or {}
            kept = {name: value for name, value in headers.items() if name not in _LEFT_OUT}
            await streams.publish(headers[SUBJECT], letter.data, headers=kept or None, stream=stream)
            await letter.ack_sync()
            await streams.delete_msg(dead, letter.metadata.sequence.stream)
        return state.messages
    finally:
        await letters.unsubscribe()


def id_beside(headers: Headers) -> str | None:
    """Return the id that a message has in its headers; None if it has none."""
    return headers.get(MESSAGE_ID, headers.get("Nats-Msg-Id"))


def _dead_subject(stream: str, durable: str) -> str:
    return f"dead.{stream}.{durable}"
