"""FastStream with NATS JetStream: a stream whose messages go to a dispatcher, and are acknowledged after the commit."""

from __future__ import annotations

from typing import Any, Unpack

from faststream.nats import JStream, NatsBroker, PullSub
from nats.js.api import AckPolicy, ConsumerConfig

from ...dispatcher import AsyncDispatcher
from ..incoming import Convert, json_event
from ..nats import Consumer, Pull, incoming_of
from ..settling import SettlingOptions, new_settling
from . import AS_IT_CAME, is_of_a_test, raise_errors

__all__ = ["subscribe"]

_FIRST_DELIVERY = "$JS.ACK.stream.durable.1.1.1.0.0"
"""The address of an answer in JetStream. It contains the numbers of the message and of its delivery."""


def subscribe(
    broker: NatsBroker,
    stream: str,
    subject: str,
    durable: str,
    dispatcher: AsyncDispatcher,
    convert: Convert = json_event,
    *,
    in_flight: int = 10,
    batch: int | None = None,
    ack_wait: float = 30.0,
    **options: Unpack[SettlingOptions],
) -> None:
    """Give the messages of a subject to a dispatcher, as long as the broker runs. Call it before the broker is started.

    The stream must be there. Messages are taken by the durable pull consumer ``durable``, which is made if it is
    missing, and settled as ``projector_dedup.brokers.nats.Consumer`` settles them: acknowledged after the commit,
    returned to the server with a delay, or kept in the stream of dead letters. A durable consumer that is there, and
    would lose messages or keep them for ever, is refused when the broker starts, by a ``RefusedError`` that ends the
    application before it fetches anything.

    ``convert`` makes the event of a message; FastStream fetches and decodes nothing. ``in_flight`` messages are
    delivered side by side. With ``batch`` it is up to so many messages, those that come within a second, in one
    transaction; each is settled by itself, and one that fails takes no other with it. The other arguments are those of
    ``Consumer``.
    """
    # Refuses now what it would refuse later. Delivers the messages of a test broker, which starts no consumer.
    settling = new_settling(subscribe, dispatcher, convert, options, asynchronous=True)
    subscriber = broker.subscriber(
        subject,
        stream=JStream(stream, declare=False),
        durable=durable,
        pull_sub=PullSub(batch=batch is not None),
        config=ConsumerConfig(ack_policy=AckPolicy.EXPLICIT, ack_wait=ack_wait, max_deliver=-1, max_ack_pending=-1),
        **AS_IT_CAME,
    )
    consumers: list[Consumer] = []
    start_without_fetching = subscriber.start

    async def start() -> None:
        consumer = Consumer(
            subscriber.connection,
            *(stream, durable, dispatcher, convert),
            subject=subject,
            ack_wait=ack_wait,
            **options,
        )
        await consumer.open()
        consumers[:] = [consumer]
        pull = Pull(subscriber.connection, stream, durable)
        await pull.open()
        # FastStream makes no subscription of its own then: nats-py takes some messages for answers of the server.
        subscriber.subscription = pull
        await start_without_fetching()
        for _ in range(in_flight if batch is None else 1):
            subscriber.add_task(fetch, (consumer, pull))

    async def fetch(consumer: Consumer, pull: Pull) -> None:
        while subscriber.running:
            messages = await consumer.fetch(pull, batch or 1)
            if messages:
                await subscriber.consume(messages if batch else messages[0])

    async def settle(message: Any) -> None:
        raw = message.raw_message
        messages = [raw] if batch is None else raw
        if is_of_a_test(messages[0]):
            for each in messages:
                each.reply = _FIRST_DELIVERY
            incoming = [incoming_of(each, stream) for each in messages]
            if batch is None:
                raise_errors([await settling.adeliver(incoming[0])])
            else:
                raise_errors(await settling.adeliver_batch(incoming))
            return
        (consumer,) = consumers
        await consumer.settle(messages)

    subscriber(settle)
    subscriber.start = start  # a broker has no hook between connecting and fetching
