"""Google Cloud Pub/Sub: ordering keys, the dead-letter policy, dead letters and their replay, on Google's emulator.

What every consumer promises is in `test_every_consumer.py`.
"""

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

import payments
from adapters import PubSubSubscription, adapter
from databases import Database
from payments import RULES, KilledError, payment
from projector_dedup import Defer
from projector_dedup.brokers import pubsub as plug
from projector_dedup.errors import RefusedError
from projector_dedup.message import printable
from pubsub_rig import pubsub

PAGE = Path(__file__).parents[2] / "docs" / "consumers" / "pubsub.md"


@pytest.fixture
def rig(postgresql: Database) -> Iterator[PubSubSubscription]:
    """A subscription of the test's own, and a consumer of it."""
    with adapter("pubsub", postgresql) as made:
        yield made


def test_an_ordering_key_keeps_its_order_while_a_message_is_retried(postgresql: Database) -> None:
    """The messages behind it wait, although they came with it; another key does not, and neither do keyless ones."""
    order: list[str] = []

    def early() -> None:
        order.append("first")
        if order.count("first") < 3:  # in the batch, and alone
            raise Defer("not yet")

    with pubsub(ordered=True) as queue:
        rig = PubSubSubscription(postgresql, queue)
        RULES.update(first=early, **{name: lambda name=name: order.append(name) for name in ("second", "other", "no")})
        for number, (account, key) in enumerate([("first", "g"), ("second", "g"), ("other", "h"), ("no", "")]):
            queue.send(payment(number, account), key)
        rig.consume_until(rig.settled({"first": 1, "second": 1, "other": 1, "no": 1}), max_delay=1)
        RULES.clear()
        rig.close()
    assert [each for each in order if each in ("first", "second")][-2:] == ["first", "second"]
    assert order.index("second") > len(order) - 1 - order[::-1].index("first")
    assert order.index("other") < order.index("second")
    assert order.index("no") < order.index("second")


def test_the_messages_of_one_request_are_one_transaction(rig: PubSubSubscription) -> None:
    """One that fails does not take the others with it."""
    RULES["b"] = "poison"
    rig.pay(*((number, "a") for number in range(9)), (9, "b"))
    rig.consume_until(rig.settled({"a": 9}))
    assert payments.transactions(rig.engine) < 9
    assert len(rig.queue.dead()) == 1


@pytest.mark.nightly
def test_what_kills_its_consumer_is_moved_by_the_dead_letter_policy(postgresql: Database) -> None:
    """Pub/Sub counts the deliveries; the replay is without the attributes that it has added."""
    with pubsub(attempts=5) as queue:
        rig = PubSubSubscription(postgresql, queue)

        def kill() -> None:
            raise KilledError

        RULES["a"] = kill
        rig.pay((1, "a"))
        for _ in range(5):
            assert isinstance(rig.failure(), KilledError)
            rig.queue._messages(queue.subscription)
        RULES.clear()
        rig.consume_until(lambda: len(queue.dead_messages()) == 1)
        assert rig.applied == ({}, 0)
        assert queue.replay() == 1
        rig.consume_until(rig.settled({"a": 1}))
        rig.close()


def test_a_subscription_without_a_dead_letter_policy_is_refused(rig: PubSubSubscription) -> None:
    """Before anything is received: a rejected message would have no place to go."""
    rig.pay((1, "a"))
    queue = rig.queue
    consumer = plug.Consumer(queue.subscriber, queue.publisher, queue.dead_letters, payments.dispatcher(rig.engine))
    with pytest.raises(RefusedError, match="has no dead-letter policy"):
        consumer.run()


def test_a_dead_letter_has_the_attributes_of_its_message(rig: PubSubSubscription) -> None:
    """And the reason; a replay is without that."""
    RULES["b"] = "poison"
    rig.queue.send(payment(1, "b"), trace="\N{SNOWMAN}", message_id="p1")
    rig.consume_until(lambda: len(rig.queue.dead()) == 1)
    (letter,) = rig.queue.dead_messages()
    given = {"trace": "\N{SNOWMAN}", "message_id": "p1"}
    assert dict(letter.attributes) == {**given, "x-rejected-for": "ValueError: this account cannot be read\\nreally"}
    assert rig.queue.replay() == 1
    (again,) = rig.queue._messages(rig.queue.subscription)
    assert dict(again.attributes) == given


NAMES = ("self", "topic", "data", "ordering_key", "retry", "timeout")


@pytest.mark.parametrize("name", [*NAMES, "x" * 256])
def test_an_attribute_may_have_any_name(rig: PubSubSubscription, name: str) -> None:
    """Also that of an argument of Google's client: the dead letter and its replay have the attribute."""
    RULES["b"] = "poison"
    rig.queue.send_named(payment(1, "b"), {name: "v"})
    rig.consume_until(lambda: len(rig.queue.dead()) == 1)
    (letter,) = rig.queue.dead_messages()
    assert letter.attributes[name] == "v"
    assert rig.queue.replay() == 1
    (again,) = rig.queue._messages(rig.queue.subscription)
    assert dict(again.attributes) == {name: "v"}


@pytest.mark.parametrize("name", ["googclient_schemaencoding", "CloudPubSubDeadLetterSourceTopicPublishTime"])
def test_what_the_service_adds_is_not_published_again(rig: PubSubSubscription, name: str) -> None:
    """Google refuses some of it: the dead letter and its replay are without it, also if nothing else is left."""
    RULES["b"] = "poison"
    rig.queue.send_named(payment(1, "b"), {name: "v", "trace": "t"})
    rig.queue.send_named(b"", {name: "v"})
    rig.consume_until(lambda: len(rig.queue.dead()) == 2)
    assert {*rig.queue.letters()} == {payment(1, "b"), b""}
    assert not any(name in each.attributes for each in rig.queue.dead_messages())
    assert rig.queue.replay() == 2
    again = {each.data: dict(each.attributes) for each in rig.queue._messages(rig.queue.subscription)}
    assert again[payment(1, "b")] == {"trace": "t"}
    assert [*again[b""]] == ["x-rejected-for"]  # Pub/Sub takes no message without data and attributes


@pytest.mark.parametrize(("count", "has_reason"), [(99, True), (100, False)])
def test_a_dead_letter_without_room_for_its_reason_is_without_it(
    rig: PubSubSubscription, count: int, has_reason: bool
) -> None:
    """It has all attributes of its message: Pub/Sub takes a hundred."""
    RULES["b"] = "poison"
    given = {f"attribute-{number}": "x" for number in range(count)}
    rig.queue.send_named(payment(1, "b"), given)
    rig.consume_until(lambda: len(rig.queue.dead()) == 1)
    (letter,) = rig.queue.dead_messages()
    found = dict(letter.attributes)
    assert ("x-rejected-for" in found) == has_reason
    assert {name: value for name, value in found.items() if name != "x-rejected-for"} == given


@pytest.mark.parametrize("text", ["\N{SNOWMAN}", "\N{LANGUAGE TAG}", "\0", "x"], ids=["snowman", "tag", "null", "x"])
def test_a_reason_is_cut_to_the_bytes_that_an_attribute_has(rig: PubSubSubscription, text: str) -> None:
    """However many bytes one character has, escaped or not."""

    def fail() -> None:
        raise ValueError(text * 5_000)

    RULES["b"] = fail
    rig.pay((1, "b"))
    rig.consume_until(lambda: len(rig.queue.dead()) == 1)
    (reason,) = rig.queue.letters().values()
    assert reason.startswith(f"ValueError: {printable(text)}")
    assert 900 < len(reason.encode()) <= 1024


def test_a_replay_leaves_what_is_rejected_meanwhile(rig: PubSubSubscription, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would never end beside a consumer."""

    class Before(datetime):
        """A clock that is late."""

        @classmethod
        def now(cls, _: object = None) -> datetime:  # type: ignore[override]
            """Return a moment long ago."""
            return datetime(2013, 1, 1, tzinfo=UTC)

    RULES["b"] = "poison"
    rig.pay((1, "b"))
    rig.consume_until(lambda: len(rig.queue.dead()) == 1)
    monkeypatch.setattr(plug, "datetime", Before)
    assert rig.queue.replay() == 0
    assert len(rig.queue.dead()) == 1


def test_the_subscriptions_of_the_page_are_as_the_consumer_needs_them(
    rig: PubSubSubscription, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made by the snippet that is printed there: messages are replayed by the names that it gives."""
    source = PAGE.read_text(encoding="utf-8").partition("<!-- creates the subscriptions -->\n```python\n")[2]
    monkeypatch.setenv("PUBSUB_EMULATOR_HOST", rig.queue.address)
    made: dict[str, str] = {}
    exec(source.partition("```")[0], made)
    names = [f"{made['PROJECT']}/subscriptions/{name}" for name in ("totals", "totals-dead")]
    assert plug.replay(rig.queue.subscriber, rig.queue.publisher, *names) == 0
    found = rig.queue.subscriber.get_subscription(request={"subscription": names[0]})
    assert found.dead_letter_policy.max_delivery_attempts == 100
