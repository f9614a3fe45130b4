"""FastStream with RabbitMQ: a queue whose messages go to a dispatcher, and are acknowledged after the commit."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Unpack

from faststream.rabbit import Channel, RabbitBroker, RabbitQueue

from ...dispatcher import AsyncDispatcher
from ..aio_pika import copy, unreadable
from ..incoming import Convert, json_event
from ..rabbitmq import SETTLING, incoming_of, prefetch_of, queues_beside
from ..settling import SettlingOptions, logger, new_settling
from . import AS_IT_CAME, is_of_a_test, raise_errors

if TYPE_CHECKING:
    from aio_pika.abc import AbstractIncomingMessage

__all__ = ["subscribe"]

_PAUSE = 1.0  # seconds before a message is given back that could not be copied


def subscribe(
    broker: RabbitBroker,
    queue: str | RabbitQueue,
    dispatcher: AsyncDispatcher,
    convert: Convert = json_event,
    *,
    prefetch: int = 10,
    **options: Unpack[SettlingOptions],
) -> None:
    """Deliver the messages of a queue to a dispatcher while the broker runs. Call it before you start the broker.

    The queues beside ``queue`` are those of pika's ``Consumer``, and the broker declares them when it starts. If
    ``queue`` is a name, it declares a durable queue. For a queue with other arguments, give FastStream's
    ``RabbitQueue``, with ``declare=False`` if the broker must not declare it.

    ``convert`` makes the event of a message; FastStream decodes nothing. ``prefetch`` messages are delivered at the
    same time. The other options are those of pika's ``Consumer``.
    """
    prefetch = prefetch_of(prefetch, 10)
    settling = new_settling(subscribe, dispatcher, convert, options, asynchronous=True, **SETTLING)
    work = RabbitQueue(queue, durable=True) if isinstance(queue, str) else queue
    beside: dict[str, Any] = queues_beside(work.name)
    for name, arguments in beside.items():  # without a handler, a queue is declared and not consumed
        broker.subscriber(RabbitQueue(name, durable=True, arguments=arguments), include_in_schema=False)
    confirming = Channel(prefetch_count=prefetch, publisher_confirms=True, on_return_raises=True)

    async def settle(message: Any) -> None:
        raw: AbstractIncomingMessage = message.raw_message
        settled = await settling.adeliver(incoming_of(raw.body, raw, work.name))
        if is_of_a_test(raw):
            raise_errors([settled])
            return
        try:
            if not settled.acknowledge:
                await copy(raw, work.name, settled)
                settling.kept(settled)
            await raw.ack()
        except Exception as error:  # noqa: BLE001  # FastStream would keep it neither settled nor delivered again
            logger.error(
                "a message from queue %s could not be settled, and is given back to it: %s",
                work.name,
                f"{type(error).__name__}: {error}"[:500],
            )
            await asyncio.sleep(_PAUSE)
            with contextlib.suppress(Exception):  # the connection is lost: RabbitMQ takes the message back by itself
                await raw.nack(requeue=True)

    subscriber = broker.subscriber(work, channel=confirming, **AS_IT_CAME)
    subscriber(settle)
    consume = subscriber.start

    async def start() -> None:
        connection = await broker.connect()
        connection.close_callbacks.add(lambda _, error: unreadable(error, work.name))
        await consume()

    subscriber.start = start  # type: ignore[method-assign]  # a broker has no hook between connecting and consuming
