"""Several messages in one transaction: what is there together, in their order, around one that fails."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine
from sqlalchemy.orm import sessionmaker

import payments
from adapters import BATCHED, CLIENTS, KAFKA, adapter
from consumer_rig import wait_for
from databases import Database
from kafka_cluster import kafka_cluster
from kafka_garbage import produce
from payments import RULES, payment
from projector_dedup import Defer, Dispatcher, Message, Outcome, on, projector
from projector_dedup.brokers.incoming import Incoming
from projector_dedup.brokers.settling import Settled, Settling, deliver_in_groups
from projector_dedup.building import building
from projector_dedup.errors import BatchFailed, RefusedError, RetriesExhaustedError
from projector_dedup.message import by_path


@pytest.mark.parametrize("client", [each for each in BATCHED if each != KAFKA])
def test_messages_that_are_there_share_a_transaction(client: str, postgresql: Database) -> None:
    """Those that come a little later too, if the consumer is told to wait."""
    with adapter(f"{client}-batches", postgresql) as rig:
        rig.pay(*((number, "a") for number in range(12)))
        rig.consume_until(rig.settled({"a": 12}), batch_wait=0.5)
        assert payments.transactions(rig.engine) == 2


def test_messages_of_kafka_share_a_transaction(postgresql: Database, tmp_path: Path) -> None:
    """The first ones may come alone, while the consumer gets its partitions."""
    with kafka_cluster(tmp_path) as cluster, adapter(f"{KAFKA}-batches", postgresql, cluster) as rig:
        rig.pay(*((number, "a") for number in range(12)))
        rig.consume_until(rig.settled({"a": 12}), batch_wait=0.5)
        assert payments.transactions(rig.engine) <= 4


LIMITS = {"sqs": ("batch", 11, "SQS, 10"), "pubsub": ("batch", 1_001, "a request, 1000")}
PREFETCHED = {"batch": 7, "prefetch": 6}


@pytest.mark.parametrize("client", ["pika", "aio-pika", "nats", "redis", "sqs", "pubsub"])
def test_a_batch_that_no_broker_gives_is_refused(client: str, postgresql: Database) -> None:
    """When the consumer is made."""
    with adapter(client, postgresql) as rig:
        dispatcher: Any = (
            payments.async_dispatcher(rig.database.async_url)[0] if rig.is_awaited else payments.dispatcher(rig.engine)
        )
        for wrong in (0, -1):
            with pytest.raises(ValueError, match=f"batch is at least 1.*: not {wrong}"):
                rig.make(dispatcher, batch=wrong)
        for other in ("10", 1.5, True, None):
            with pytest.raises(TypeError, match="batch is a whole number of messages"):
                rig.make(dispatcher, batch=other)
        if client in LIMITS:
            name, number, says = LIMITS[client]
            with pytest.raises(ValueError, match=f"and at most the limit of {says}: not {number}"):
                rig.make(dispatcher, **{name: number})
        if client.endswith("pika"):
            with pytest.raises(ValueError, match=r"prefetch is at least 1 .*, at most 65,535"):
                rig.make(dispatcher, prefetch=70_000)
            with pytest.raises(ValueError, match="and at most prefetch, 6: not 7"):
                rig.make(dispatcher, **PREFETCHED)
        if client != "pubsub":
            for seconds in (-1, 11, float("nan")):
                with pytest.raises(ValueError, match="batch_wait is a number of seconds from 0 to 10"):
                    rig.make(dispatcher, batch=5, batch_wait=seconds)
            with pytest.raises(ValueError, match="batch_wait needs a batch of more than one message"):
                rig.make(dispatcher, batch=1, batch_wait=1)
            with pytest.raises(TypeError, match="batch_wait is a number of seconds"):
                rig.make(dispatcher, batch=5, batch_wait=True)
    assert set(CLIENTS) > set(LIMITS)


# In their order ------------------------------------------------------------------------------------------------------


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    """A database with a read model; no account fails."""
    RULES.clear()
    made = create_engine(f"sqlite:///{tmp_path / 'payments.db'}")
    yield made
    RULES.clear()
    made.dispose()


def once(error: Exception) -> Any:
    """A rule that fails until the handler has met it alone."""
    met: list[object] = []

    def rule() -> None:
        met.append(None)
        if len(met) <= 2:  # in the batch, and alone
            raise error

    return rule


def came(*accounts: str) -> list[Incoming]:
    """Messages in the order of a partition."""
    return [Incoming(payment(number, account), f"p{number}") for number, account in enumerate(accounts)]


def said(settled: list[Settled] | list[Settled | None]) -> str:
    """A letter for each: acknowledged, retried, rejected, or a point for one that waits."""
    letters = {True: "a", False: "r"}
    return "".join("." if each is None else "x" if each.reject else letters[each.acknowledge] for each in settled)


def test_nothing_overtakes_a_message_that_is_retried(engine: Engine) -> None:
    """It is the first of the next batch; what is behind it is applied after it, a rejected message too."""
    settling = Settling(payments.dispatcher(engine))
    messages = came("a", "a", "b", "a", "poison", "a")
    RULES.update(b=once(Defer("not yet")), poison="poison")
    assert said(settling.deliver_in_order(messages)) == "aar"
    assert payments.markers(engine) == {"p0", "p1"}
    assert said(settling.deliver_in_order(messages[2:])) == "aax"
    assert payments.markers(engine) == {"p0", "p1", "p2", "p3"}
    assert said(settling.deliver_in_order(messages[5:])) == "a"


@pytest.mark.parametrize("position", [0, 1, 3])
def test_what_cannot_be_read_or_routed_holds_up_what_is_behind_it(position: int, engine: Engine) -> None:
    """A message with another type, and one that is no JSON."""
    settling = Settling(payments.dispatcher(engine))
    for body in (b"no JSON", b'{"type": "unknown", "message_id": "u"}'):
        messages = came("a", "a", "a", "a")
        messages[position] = Incoming(body)
        answers = settling.deliver_in_order(messages)
        assert said(answers) in ("a" * position + "x", "a" * position)
        rest = messages[len(answers) :]
        assert said(answers)[position:] == "x" or said(settling.deliver_in_order(rest)) == "x"
        assert payments.markers(engine) == {f"p{number}" for number in range(position)}


def test_a_group_waits_for_its_message_and_no_other_group_does(engine: Engine) -> None:
    """A message without a group waits for nobody."""
    settling = Settling(payments.dispatcher(engine))
    RULES.update(b="early", poison="poison")
    messages = came("a", "b", "a", "b", "a", "poison", "a")
    groups = ["1", "1", "1", "", "", "2", "2"]
    assert said(deliver_in_groups(settling, messages, groups)) == "ar.raxa"
    assert payments.markers(engine) == {"p0", "p4", "p6"}


def test_a_batch_in_order_stops_at_a_failure_for_each_handler(engine: Engine) -> None:
    """The errors of the messages behind it say so."""
    payments.Base.metadata.create_all(engine)
    got: dict[str, list[str]] = {"fails": [], "works": []}

    def noting(name: str, fails_at: str) -> Any:
        def handle(body: Any, _session: object) -> None:
            if body == fails_at:
                raise ValueError("this one")
            got[name].append(body)

        return projector(idempotent=True, name=name)(on("noted")(handle))

    dispatcher = Dispatcher(sessionmaker(engine), noting("fails", "b"), noting("works", ""))
    with pytest.raises(BatchFailed) as raised:
        dispatcher.deliver_batch([Message(each, each, "noted") for each in "abcd"], in_order=True)
    outcomes = [each.outcome for each in raised.value.deliveries]
    assert outcomes == [Outcome.APPLIED, *[Outcome.FAILED] * 3]
    assert {name: sorted(set(bodies)) for name, bodies in got.items()} == {
        "fails": ["a"],
        "works": ["a", "b", "c", "d"],
    }
    last = raised.value.deliveries[-1].error
    assert isinstance(last, RetriesExhaustedError)
    assert "not tried, because an earlier one failed" in str(last)


def test_beside_a_new_generation_messages_in_order_are_delivered_one_by_one(engine: Engine) -> None:
    """Both generations get them in their order, around one that both defer."""
    payments.Base.metadata.create_all(engine)
    got: dict[str, list[str]] = {"old": [], "new": []}
    early = {"old", "new"}

    def generation(name: str) -> Any:
        def handle(body: Any, _session: object) -> None:
            if body["account"] == "b" and name in early:
                early.discard(name)
                raise Defer("not yet")
            got[name].append(body["account"])

        return projector(idempotent=True, name=name)(on("payment")(handle))

    new = building(generation("new"), beside="old")
    dispatcher = Dispatcher(sessionmaker(engine), generation("old"), new, type=by_path("type"))
    settling, messages = Settling(dispatcher), came("a", "b", "c")
    assert said(deliver_in_groups(settling, messages, ["g"] * 3)) == "ar."
    assert said(deliver_in_groups(settling, messages[1:], ["g"] * 2)) == "aa"
    assert got == {"old": ["a", "b", "c"], "new": ["a", "b", "c"]}
    with pytest.raises(RefusedError, match="keeps no order"):
        dispatcher.deliver_batch([Message("x", {"account": "a"}, "payment")], in_order=True)


def test_messages_in_front_of_one_that_ends_the_consumer_are_settled(postgresql: Database, tmp_path: Path) -> None:
    """Its error says how to drop it by its offset: what came before must not be dropped with it."""
    with kafka_cluster(tmp_path) as cluster, adapter(f"{KAFKA}-batches", postgresql, cluster) as rig:
        good: Any = [(payment(number), [], 0) for number in range(5)]
        produce(rig.queue.config["bootstrap.servers"], rig.queue.topic, [*good, (payment(5), [(b"\xff", b"")], 0)])
        error = rig.failure(batch_wait=1.0)
        assert isinstance(error, RefusedError)
        assert rig.applied == ({"a": 5}, 5)


def test_a_backlog_does_not_keep_a_consumer_from_stopping(postgresql: Database) -> None:
    """The tasks of aio-pika's consumer end when it is stopped, however many messages wait."""
    with adapter("aio-pika-batches", postgresql) as rig:
        rig.pay(*((number, "a") for number in range(600)))
        with rig.consuming(prefetch=12, batch_wait=0.01):
            wait_for(lambda: rig.applied[1] > 0, "the first batch")
        assert rig.applied[1] < 600
