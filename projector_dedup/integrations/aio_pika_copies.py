"""Copies of messages that came by aio-pika: published on the channel by which the message came, and confirmed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .rabbitmq import WITHOUT_ID, Headers, headers_of_copy, headers_of_replay, queue_after
from .settling import Settled

if TYPE_CHECKING:
    from aio_pika.abc import AbstractIncomingMessage
    from aiormq.abc import AbstractChannel
    from pamqp.commands import Basic

_AROUND = 20  # bytes of a frame around its properties: its own beginning and end, and the length of the body


async def copy(message: AbstractIncomingMessage, work: str, settled: Settled) -> None:
    """Copy a message into the queue beside ``work`` in which it waits, or stays; return when RabbitMQ has it there.

    The channel must confirm, and raise for what comes back. Raises ``ValueError`` for headers that leave no room in a
    frame, and what the channel raises.
    """
    channel: AbstractChannel = message.channel
    room = channel.connection.connection_tune.frame_max
    headers = headers_of_copy(_named(message), settled, lambda each: _size(_properties(message, each)) <= room)
    if _size(_properties(message, headers)) > room:
        raise ValueError(f"its headers leave no room in a frame of {room} bytes: raise frame_max")
    await _publish(message, queue_after(work, settled), headers)


async def copy_back(message: AbstractIncomingMessage, work: str) -> None:
    """Publish a dead letter in its work queue again; return when RabbitMQ has it there."""
    await _publish(message, work, headers_of_replay(_named(message)))


async def _publish(message: AbstractIncomingMessage, queue: str, headers: Headers) -> None:
    channel: AbstractChannel = message.channel
    properties = _properties(message, headers)
    await channel.basic_publish(message.body, routing_key=queue, properties=properties, mandatory=True)


def _named(message: AbstractIncomingMessage) -> Headers:
    """Return the headers, and in them whether the message has no id: aiormq gives each of its copies a random one."""
    return message.headers if message.message_id else {**message.headers, WITHOUT_ID: True}


def _properties(message: AbstractIncomingMessage, headers: Headers) -> Basic.Properties:
    """Return the properties of a copy: persistent, without an end, and published by us."""
    properties = message.properties
    properties.headers, properties.delivery_mode = dict(headers), 2
    properties.expiration, properties.user_id = None, None
    return properties


def _size(properties: Basic.Properties) -> int:
    return len(properties.marshal()) + _AROUND
