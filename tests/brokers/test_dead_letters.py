"""The dead letters of each consumer, by `idempotency dead`: listed, shown, replayed and dropped; nothing else moves."""

import asyncio
import contextlib
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import nats
import pika
import pytest
from click.testing import CliRunner, Result
from projector_dedup.cli.main import main

import payments
from adapters import CLIENTS, KAFKA, Adapter, Nats, adapter
from command import on_a_terminal
from consumer_rig import Sent
from databases import Database
from kafka_cluster import KafkaCluster
from payments import RULES, payment
from projector_dedup import Message
from projector_dedup.brokers.dead_letters import DeadLetter, Fate
from projector_dedup.brokers.incoming import Incoming, json_event
from projector_dedup.brokers.rabbitmq import dead_letters
from projector_dedup.errors import RefusedError
from rabbitmq_rig import RabbitMQ
from redis_rig import RedisStream

pytestmark = pytest.mark.filterwarnings(
    "ignore:unclosed:ResourceWarning",
    "ignore:loop is closed:ResourceWarning",
    "ignore:\\s*The 'queue' task attribute:DeprecationWarning",
)  # of nats-py, whose connection ends with the process of the command, and of Celery

OURS = ("pika", "aio-pika", "nats", "redis", "sqs", "sqs-fifo", "pubsub", KAFKA)
THEIRS = tuple(each for each in CLIENTS if each not in OURS)
GARBAGE = Sent(None, b"{")
HASH = f"sha256:{hashlib.sha256(GARBAGE.body).hexdigest()[:16]}"
REASON = r"ValueError: this account cannot be read\nreally"


@pytest.fixture(params=OURS)
def consumer(request: pytest.FixtureRequest, postgresql: Database) -> Iterator[Adapter]:
    """A queue of the test's own, and a consumer of it in the module `shop`, by each client in turn."""
    cluster = request.getfixturevalue("cluster") if request.param == KAFKA else None
    with adapter(request.param, postgresql, cluster) as made:

        async def make() -> Any:
            if isinstance(made, Nats):
                return made.make(_dispatcher(made), connection=await nats.connect(made.queue.url))
            return made.make(_dispatcher(made))

        with shop(make):
            yield made


def of(*clients: str) -> pytest.MarkDecorator:
    """Try these clients only: the broker does not matter."""
    return pytest.mark.parametrize("consumer", clients, indirect=True)


@contextlib.contextmanager
def shop(consumer: object) -> Iterator[None]:
    """A module `shop` with a consumer."""
    with pytest.MonkeyPatch.context() as patch:
        made: Any = ModuleType("shop")
        made.consumer = consumer
        patch.setitem(sys.modules, "shop", made)
        yield


def _dispatcher(made: Adapter) -> Any:
    if made.is_awaited:
        return payments.async_dispatcher(made.database.async_url)[0]
    return payments.dispatcher(made.engine)


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


def test_a_person_lists_shows_drops_and_replays_dead_letters(consumer: Adapter) -> None:
    """`list` and `show` leave everything in its place, `drop` deletes those of one id, `replay` applies the rest."""
    poison(consumer)
    before = sorted(consumer.queue.dead(), key=repr)
    found = listed("list")
    assert sorted(each["id"] for each in found["dead_letters"]) == ["p1", "p1", "p2", HASH]
    assert {each["reason"] for each in found["dead_letters"] if each["id"] == "p1"} == {REASON}
    assert (found["complete"], found["there"]) == (True, None if consumer.client in ("pubsub", KAFKA) else 4)
    assert {*found["dead_letters"][0]} == {"id", "occurred_at", "deliveries", "reason"}
    (shown,) = listed("show", HASH, "--values")["dead_letters"]
    assert (shown["body"], shown["reason"].partition(":")[0]) == ("{", "InvalidMessageError")
    assert "headers" in shown
    assert sorted(consumer.queue.dead(), key=repr) == before
    dropped, rest = dead("drop", "p1", "--yes"), [GARBAGE, Sent("p2", payment(2, "b"))]
    if consumer.client == KAFKA:
        assert (dropped.exit_code, "Kafka cannot remove one message" in dropped.stderr) == (1, True)
        rest = before
    else:
        assert (dropped.output, dropped.exit_code) == ("Dropped 2 dead letters of message p1.\n", 0)
    assert sorted(consumer.queue.dead(), key=repr) == sorted(rest, key=repr)
    RULES.clear()
    assert dead("replay", "--yes").output == f"Replayed {len(rest)} dead letters.\n"
    balances = {"a": 1, "b": 2 if consumer.client == KAFKA else 1}
    consumer.consume_until(lambda: consumer.settled(balances)() and consumer.queue.dead() == [GARBAGE])


@of("pika", "redis")
def test_a_list_has_a_limit_and_no_values(consumer: Adapter) -> None:
    """It says how many there are, and prints bodies and headers only if it is told to."""
    poison(consumer)
    found = dead("list", "--limit", "3")
    assert found.stdout.splitlines()[0].split() == ["id", "occurred", "(UTC)", "deliveries", "reason"]
    assert f"p1 - {'1' if consumer.client == 'pika' else '-'} {REASON}" in " ".join(found.stdout.split())
    assert found.stdout.splitlines()[4:] == ["shop:consumer: 4 dead letters; raise --limit to list more."]
    assert "amount" not in found.stdout
    assert len(re.findall(r"^body {9}[{]", dead("list", "--values").stdout, re.MULTILINE)) == 4
    assert len(consumer.queue.dead()) == 4


@of("pika")
def test_nothing_is_replayed_or_dropped_without_a_yes(consumer: Adapter) -> None:
    """There is no terminal here, so the question is refused; a letter that is not there is told."""
    poison(consumer)
    for arguments in (["replay"], ["drop", "p1"]):
        assert (dead(*arguments).exit_code, "add --yes" in dead(*arguments).stderr) == (2, True)
    for command in (["show", "p9"], ["drop", "p9", "--yes"]):
        assert (dead(*command).exit_code, "no dead letter of message p9" in dead(*command).stderr) == (1, True)
    assert len(consumer.queue.dead()) == 4


SHOP = """
import os, pika, payments
from projector_dedup.brokers.pika import Consumer
from sqlalchemy import create_engine

dispatcher = payments.dispatcher(create_engine(os.environ["DATABASE_URL"]))
consumer = Consumer(pika.URLParameters(os.environ["AMQP_URL"]), os.environ["QUEUE"], dispatcher)
"""


@of("pika")
def test_a_question_comes_first_on_a_terminal(consumer: Adapter, tmp_path: Path) -> None:
    """It says how many there are; after a no everything is in its place."""
    poison(consumer)
    (tmp_path / "shop.py").write_text(SHOP)
    url = consumer.database.url().render_as_string(hide_password=False)
    environment = {**consumer.settings, "DATABASE_URL": url}
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    command = ("dead", "shop:consumer")
    code, seen = on_a_terminal(*command, "replay", types="n\n", **environment)
    assert (code, "Replay 4 dead letters of shop:consumer?" in seen, "nothing was replayed" in seen) == (1, True, True)
    code, seen = on_a_terminal(*command, "drop", "p2", types="n\n", **environment)
    assert (code, "nothing was dropped" in seen, len(consumer.queue.dead())) == (1, True, 4)
    code, seen = on_a_terminal(*command, "drop", "p2", types="y\n", **environment)
    assert (code, "Dropped 1 dead letters of message p2." in seen, len(consumer.queue.dead())) == (0, True, 3)


@of("pika", "redis")
def test_an_id_that_only_looks_like_another_is_refused(consumer: Adapter) -> None:
    """A line break in one, a backslash in the other: nothing is dropped. Each has a text that stands for it alone."""
    RULES["b"] = "poison"
    ids = ["a\nb", "a\\nb"]
    consumer.queue.publish([Sent(each, payment(1, "b")) for each in ids])
    consumer.consume_until(lambda: len(consumer.queue.dead()) == 2)
    for command in (["show", ids[1]], ["drop", ids[1], "--yes"]):
        refused = dead(*command)
        assert (refused.exit_code, r"a\nb stands for 2 different ids" in refused.stderr) == (1, True), refused.output
    assert len(consumer.queue.dead()) == 2
    for each in ids:
        assert dead("drop", each, "--yes").output.startswith("Dropped 1 dead letters")
    assert consumer.queue.dead() == []


@of("redis")
def test_an_id_that_is_not_utf_8_is_not_that_of_another(consumer: Adapter) -> None:
    """It is not an id, so the hash of the body takes its place, as for a message without an id."""
    body, queue = payment(1, "b"), cast(RedisStream, consumer.queue)
    for each in (b"\xff", rb"\xff"):
        queue.client.xadd(queue.dead_letters, {"message_id": each, "body": body})
    assert [each["id"][:7] for each in listed("list")["dead_letters"]] == ["sha256:", r"\xff"]
    assert dead("drop", r"\xff", "--yes").output == "Dropped 1 dead letters of message \\xff.\n"
    assert [each[b"message_id"] for each in queue.dead_entries()] == [b"\xff"]


@of("redis")
def test_a_dead_letter_of_a_source_has_the_stored_id(consumer: Adapter) -> None:
    """Two producers count from 1 in one queue: to drop the 7 of one leaves that of the other."""

    queue = cast(RedisStream, consumer.queue)

    def convert(incoming: Incoming) -> Message:
        source: Any = incoming.headers["producer"]
        return replace(json_event(incoming), source=source.decode())

    for each in ("one", "two"):
        fields: Any = {"message_id": "7", "producer": each, "body": payment(7)}
        queue.client.xadd(queue.dead_letters, fields)
    with shop(consumer.make(_dispatcher(consumer), convert=convert)):
        assert [each["id"] for each in listed("list")["dead_letters"]] == ["3:one1:7", "3:two1:7"]
        assert "no dead letter of message 7" in dead("drop", "7", "--yes").stderr
        assert dead("drop", "3:one1:7", "--yes").exit_code == 0
    assert [each[b"producer"] for each in queue.dead_entries()] == [b"two"]


@of("nats", "redis")
@pytest.mark.parametrize("fate", ["replay", "drop"])
def test_a_letter_that_another_process_has_settled_is_not_counted(consumer: Adapter, fate: Fate) -> None:
    """It is deleted while this one decides: nothing breaks. A second copy in the queue is a duplicate by its marker."""
    poison(consumer)
    RULES.clear()

    def decide(_: DeadLetter) -> Fate:
        with ThreadPoolExecutor(1) as elsewhere:  # it has an event loop of its own
            elsewhere.submit(consumer.queue.replay).result()
        return fate

    async def settle() -> Any:
        async with await nats.connect(consumer.settings["NATS_URL"]) as connection:
            made: Any = consumer.make(_dispatcher(consumer), connection=connection)
            return await made.settle_dead_letters(decide)

    made: Any = None if isinstance(consumer, Nats) else consumer.make(_dispatcher(consumer))
    sifted = asyncio.run(settle()) if made is None else made.settle_dead_letters(decide)
    assert (sifted.there, sifted.settled) == (4, 0)
    consumer.consume_until(lambda: consumer.settled({"a": 1, "b": 2}, 3)() and {GARBAGE} == {*consumer.queue.dead()})


@of("pika", "aio-pika")
def test_what_another_process_holds_is_told(consumer: Adapter) -> None:
    """Somebody reads the same letters: those that the command did not get stay where they are."""
    poison(consumer)
    RULES.clear()
    queue = cast(RabbitMQ, consumer.queue)
    with pika.BlockingConnection(queue.parameters) as connection:
        channel = connection.channel()

        def hold(*_: Any) -> Any:
            return channel.basic_get(dead_letters(queue.queue))

        made: Any = consumer.make(_dispatcher(consumer))
        with pytest.MonkeyPatch.context() as patch, shop(made):
            real = made._settling.judge

            def judge(decide: Any) -> Any:
                inner = real(decide)

                def judge(*given: Any) -> Any:
                    if not held:
                        held.extend([hold(), hold()])
                    return inner(*given)

                return judge

            held: list[Any] = []
            patch.setattr(made._settling, "judge", judge)
            told = dead("replay", "--yes").stdout
    assert told.startswith("Replayed 2 dead letters. 2 of about 4 were not read"), told


def test_kafka_replays_no_letter_behind_another_that_is_kept(postgresql: Database, cluster: KafkaCluster) -> None:
    """Its group has a position in the partition: the first letter would never be seen again."""
    with adapter(KAFKA, postgresql, cluster) as made:
        for number in (1, 2):
            made.queue.send(payment(number), {"message_id": f"p{number}"}, topic=made.queue.dead_letters)
        letters = made.make(_dispatcher(made))
        with pytest.raises(RefusedError, match="nor replay one behind another that is kept"):
            letters.settle_dead_letters(lambda letter: "keep" if letter.id == "p1" else "replay")
        with pytest.raises(ValueError, match="decide returns"):
            letters.settle_dead_letters(lambda _: None)
        assert [each.id for each in made.queue.dead()] == ["p1", "p2"]
        assert letters.settle_dead_letters(lambda _: "replay").settled == 2
        assert made.queue.dead() == []


@pytest.mark.parametrize("client", THEIRS)
def test_an_application_of_celery_or_faststream_is_refused(client: str, postgresql: Database) -> None:
    """The error says how to reach its dead letters."""
    with adapter(client, postgresql) as made, shop(lambda: made.make(_dispatcher(made))):
        refused = dead("list")
    words = "replay(app, queue)" if client == "celery" else "projector_dedup.brokers.aio_pika or .nats"
    assert (refused.exit_code, words in refused.stderr) == (2, True), refused.output


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("no_such_module:consumer", "ModuleNotFoundError"),
        ("json:no_such_attribute", "AttributeError"),
        ("json:decoder", "is of type module"),
        ("json:dumps", "TypeError"),
    ],
)
def test_a_wrong_name_is_one_line_and_exit_code_2(place: str, words: str) -> None:
    """A missing module or attribute, another type, and a function that takes arguments."""
    refused = CliRunner().invoke(main, ["dead", place, "list"])
    assert (refused.exit_code, refused.stderr.count("\n"), words in refused.stderr) == (2, 1, True), refused.stderr
