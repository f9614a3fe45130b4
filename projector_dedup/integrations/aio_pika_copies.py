"""Copies of messages that came by aio-pika: published on the channel by which the message came, and confirmed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from aiormq.exceptions import InvalidFrameError

from ..message import printable
from .rabbitmq import UNREADABLE, WITHOUT_ID, Headers, Size, headers_of_copy, headers_of_replay, queue_after
from .settling import Settled, logger

if TYPE_CHECKING:
    from aio_pika.abc import AbstractIncomingMessage
    from aiormq.abc import AbstractChannel
    from pamqp.commands import Basic

_AROUND = 20  # bytes of a frame around its properties: its own beginning and end, and the length of the body


async def copy(message: AbstractIncomingMessage, work: str, settled: Settled) -> None:
    """Copy a message into the queue beside ``work`` in which it waits, or stays; return when RabbitMQ has it there.

    The channel must confirm, and raise for what comes back. Raises what the channel raises.
    """
    headers = headers_of_copy(_encodable(message), settled, _size_of(message), _frame_max(message), work)
    await _publish(message, queue_after(work, settled), headers)


async def copy_back(message: AbstractIncomingMessage, work: str) -> None:
    """Publish a dead letter in its work queue again; return when RabbitMQ has it there."""
    headers = headers_of_replay(_encodable(message), _size_of(message), _frame_max(message), work)
    await _publish(message, work, headers)


def unreadable(error: object, work: str) -> str:
    """Return and log what to do about a message that closed the connection, since aiormq cannot decode its properties.

    Return an empty text if another ``error`` closed the connection.
    """
    if not isinstance(error, (InvalidFrameError, RecursionError)):
        return ""
    what_to_do = UNREADABLE.format(queue=printable(work))
    logger.error(what_to_do)
    return what_to_do


async def _publish(message: AbstractIncomingMessage, queue: str, headers: Headers) -> None:
    channel: AbstractChannel = message.channel
    properties = _properties(message, headers)
    await channel.basic_publish(message.body, routing_key=queue, properties=properties, mandatory=True)


def _encodable(message: AbstractIncomingMessage) -> Headers:
    """Return the headers of a copy that aiormq can encode, and in them whether the message has no id.

    aiormq decodes a text that is not UTF-8 to ``bytes``, and encodes bytes as ``bytearray`` alone. It gives each copy
    without an id a random one.
    """
    headers = {name: bytearray(value) if isinstance(value, bytes) else value for name, value in message.headers.items()}
    return headers if message.message_id else {**headers, WITHOUT_ID: True}


def _properties(message: AbstractIncomingMessage, headers: Headers) -> Basic.Properties:
    """Return the properties of a copy: persistent, without an end, and published by us."""
    properties = message.properties
    properties.headers, properties.delivery_mode = dict(headers), 2
    properties.expiration, properties.user_id = None, None
    return properties


def _size_of(message: AbstractIncomingMessage) -> Size:
    """Return the function that measures a copy with given headers."""
    return lambda headers: _deeper(lambda: len(_properties(message, headers).marshal()) + _AROUND)


def _deeper(measure: Callable[[], int], frames: int = 30) -> int:
    """Measure deeper in the stack than ``_publish`` encodes: what is nested too deeply for that fails here."""
    return _deeper(measure, frames - 1) if frames else measure()


def _frame_max(message: AbstractIncomingMessage) -> int:
    channel: AbstractChannel = message.channel
    return channel.connection.connection_tune.frame_max
