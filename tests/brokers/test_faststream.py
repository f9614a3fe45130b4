"""FastStream's test brokers: what a test publishes is applied, and the error of a message fails the test."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from faststream.nats import NatsBroker, TestNatsBroker
from faststream.rabbit import RabbitBroker, TestRabbitBroker
from sqlalchemy import create_engine

import payments
from databases import Database
from payments import RULES
from projector_dedup import AsyncDispatcher, Defer
from projector_dedup.brokers.faststream import nats, rabbit
from projector_dedup.errors import InvalidMessageIdError

Publish = Callable[[str, str | None], Any]
"""Publishes a payment to an account, with an id."""


def _body(account: str) -> dict[str, Any]:
    return {"type": "payment", "account": account, "amount": 1}


def _rabbit(dispatcher: AsyncDispatcher) -> tuple[Any, Publish]:
    broker = RabbitBroker()
    rabbit.subscribe(broker, "payments", dispatcher)
    return TestRabbitBroker(broker), lambda account, known: broker.publish(_body(account), "payments", message_id=known)


def _nats(dispatcher: AsyncDispatcher, **options: Any) -> tuple[Any, Publish]:
    broker = NatsBroker()
    nats.subscribe(broker, "payments", "payments.>", "totals", dispatcher, **options)

    def publish(account: str, message_id: str | None) -> Any:
        headers = {} if message_id is None else {"Nats-Msg-Id": message_id}
        return broker.publish(_body(account), "payments.received", headers=headers)

    return TestNatsBroker(broker), publish


def _batches(dispatcher: AsyncDispatcher) -> tuple[Any, Publish]:
    return _nats(dispatcher, batch=5)


@pytest.mark.parametrize("brokered", [_rabbit, _nats, _batches], ids=["rabbit", "nats", "nats-batches"])
def test_a_test_broker_applies_a_message_once_and_raises_the_error_of_another(
    brokered: Callable[[AsyncDispatcher], tuple[Any, Publish]], postgresql: Database
) -> None:
    """It has no queue in which a message could wait or be kept, so the test gets the error of the handler itself."""
    engine = create_engine(postgresql.url())
    payments.dispatcher(engine)  # makes the tables
    RULES.update(b="poison", c="early")

    async def main() -> None:
        dispatcher, asynchronous = payments.async_dispatcher(postgresql.async_url)
        test_broker, publish = brokered(dispatcher)
        async with test_broker:
            for _ in range(2):
                await publish("a", "p1")
            for account, error in (("b", ValueError), ("c", Defer)):
                with pytest.raises(error, match="account"):
                    await publish(account, account)
            if brokered is not _rabbit:  # aio-pika makes one up
                with pytest.raises(InvalidMessageIdError, match="Nats-Msg-Id"):
                    await publish("a", None)
        await asynchronous.dispose()

    asyncio.run(main())
    RULES.clear()
    assert payments.applied(engine) == ({"a": 1}, 1)
    engine.dispose()
