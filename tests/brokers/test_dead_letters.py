"""The dead letters of each consumer, by `idempotency dead`: listed, shown, replayed and dropped; nothing else moves."""

import hashlib
import json
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import nats
import pytest
from click.testing import CliRunner, Result
from projector_dedup.cli.main import main

import payments
from adapters import CLIENTS, KAFKA, Adapter, Nats, adapter
from consumer_rig import Sent
from databases import Database
from kafka_cluster import KafkaCluster, kafka_cluster
from payments import RULES, payment

OURS = ("pika", "aio-pika", "nats", "redis", "sqs", "sqs-fifo", "pubsub", KAFKA)
THEIRS = tuple(each for each in CLIENTS if each not in OURS)
GARBAGE = Sent(None, b"{")
HASH = f"sha256:{hashlib.sha256(GARBAGE.body).hexdigest()[:16]}"
REASON = r"ValueError: this account cannot be read\nreally"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaCluster]:
    """A cluster for all tests of this file; each has topics of its own."""
    with kafka_cluster(tmp_path_factory.mktemp("kafka")) as found:
        yield found


@pytest.fixture(params=OURS)
def consumer(request: pytest.FixtureRequest, postgresql: Database) -> Iterator[Adapter]:
    """A queue of the test's own, and a consumer of it in the module `shop`, by each client in turn."""
    cluster = request.getfixturevalue("cluster") if request.param == KAFKA else None
    with adapter(request.param, postgresql, cluster) as made, pytest.MonkeyPatch.context() as patch:
        shop = ModuleType("shop")
        shop.consumer = _maker(made)  # type: ignore[attr-defined]
        patch.setitem(sys.modules, "shop", shop)
        yield made


def _maker(made: Adapter) -> Any:
    def make() -> Any:
        if made.is_awaited:
            return made.make(payments.async_dispatcher(made.database.async_url)[0])
        return made.make(payments.dispatcher(made.engine))

    async def make_on_a_connection() -> Any:
        assert isinstance(made, Nats)
        connection = await nats.connect(made.queue.url)
        return made.make(payments.async_dispatcher(made.database.async_url)[0], connection=connection)

    return make_on_a_connection if isinstance(made, Nats) else make


def dead(*arguments: str, types: str | None = None) -> Result:
    """Run `idempotency dead` in this process."""
    return CliRunner().invoke(main, ["dead", "shop:consumer", *arguments], input=types)


def listed(*arguments: str) -> Any:
    """What `list` or another command prints as JSON."""
    found = dead(*arguments, "--json")
    assert (found.exit_code, found.stderr) == (0, "")
    return json.loads(found.stdout)


def poison(consumer: Adapter) -> None:
    """Have the consumer reject two messages, one of them published twice, and one without an id or JSON."""
    RULES["b"] = "poison"
    consumer.queue.publish([GARBAGE])
    consumer.pay((1, "b"), (2, "b"), (1, "b"), (3, "a"))
    consumer.consume_until(lambda: consumer.settled({"a": 1})() and len(consumer.queue.dead()) == 4)


def test_list_shows_dead_letters_and_moves_none(consumer: Adapter) -> None:
    """Their ids as in the log, and their reasons; of garbage a hash. Values only if they are asked for."""
    poison(consumer)
    before = sorted(consumer.queue.dead(), key=repr)
    for _ in range(2):
        found = listed("list")
        ids = [each["id"] for each in found["dead_letters"]]
        assert sorted(ids) == ["p1", "p1", "p2", HASH]
        assert {each["reason"] for each in found["dead_letters"] if each["id"] == "p1"} == {REASON}
        assert found["complete"]
        assert found["there"] in (4, None)
    assert sorted(consumer.queue.dead(), key=repr) == before
    assert consumer.queue.left() == 0
