"""Amazon SQS: the order of a FIFO group, the redrive policy, dead letters, and the partial batch failures of Lambda.

What every consumer promises is in `test_every_consumer.py`. The server is moto's, in a process of its own.
"""

import base64
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import payments
from adapters import SqsFifoQueue, SqsQueue, adapter
from consumer_rig import wait_for
from databases import Database
from payments import RULES, KilledError, payment
from projector_dedup import Defer
from projector_dedup.brokers.sqs import lambda_handler, replay
from projector_dedup.errors import RefusedError
from sqs_rig import Sqs, sqs


@pytest.fixture
def rig(postgresql: Database) -> Iterator[SqsQueue]:
    """A standard queue of the test's own, and a consumer of it."""
    with adapter("sqs", postgresql) as made:
        yield made


@pytest.fixture
def fifo(postgresql: Database) -> Iterator[SqsFifoQueue]:
    """A FIFO queue of the test's own, and a consumer of it."""
    with adapter("sqs-fifo", postgresql) as made:
        yield made


def test_a_group_keeps_its_order_while_one_of_it_is_retried(fifo: SqsFifoQueue) -> None:
    """The messages behind it wait, although they came with it; another group does not."""
    order: list[str] = []

    def early() -> None:
        order.append("first")
        if order.count("first") < 3:
            raise Defer("not yet")

    RULES.update(first=early, second=lambda: order.append("second"), other=lambda: order.append("other"))
    for number, (account, group) in enumerate([("first", "g"), ("second", "g"), ("other", "h")]):
        fifo.queue.send(payment(number, account).decode(), group)
    fifo.consume_until(fifo.settled({"first": 1, "second": 1, "other": 1}), max_delay=1)
    assert order.index("other") < order.index("second")  # a message that fails is tried again alone
    assert order.index("second") > len(order) - 1 - order[::-1].index("first")


def test_a_rejected_message_lets_its_group_go_on(fifo: SqsFifoQueue) -> None:
    """The dead letter stays in its group, and a replay that comes within five minutes is no duplicate to SQS."""
    RULES["b"] = "poison"
    fifo.queue.send(payment(1, "b").decode(), "g")
    fifo.queue.send(payment(2, "a").decode(), "g")
    fifo.consume_until(fifo.settled({"a": 1}))
    (letter,) = fifo.queue.dead_messages()
    assert letter["Attributes"]["MessageGroupId"] == "g"
    RULES.clear()
    assert fifo.queue.replay() == 1
    fifo.consume_until(fifo.settled({"a": 1, "b": 1}))


def test_the_messages_of_one_request_are_one_transaction(rig: SqsQueue) -> None:
    """Ten at most; one that fails does not take the others with it."""
    RULES["b"] = "poison"
    rig.pay(*((number, "a") for number in range(9)), (9, "b"))
    rig.consume_until(rig.settled({"a": 9}))
    assert payments.transactions(rig.engine) < 9
    assert len(rig.queue.dead()) == 1


@pytest.mark.nightly
def test_what_kills_its_consumer_is_moved_by_the_redrive_policy(postgresql: Database) -> None:
    """SQS counts the receives: nobody else can."""
    with sqs(receives=2) as queue:
        rig = SqsQueue(postgresql, queue)

        def kill() -> None:
            raise KilledError

        RULES["a"] = kill
        rig.pay((1, "a"))
        assert isinstance(rig.failure(), KilledError)
        assert isinstance(rig.failure(), KilledError)
        RULES.clear()
        rig.consume_until(lambda: len(queue.dead()) == 1)
        assert rig.applied == ({}, 0)
        assert replay(queue.client, queue.url) == 1
        rig.consume_until(rig.settled({"a": 1}))
        rig.close()


def test_a_queue_without_a_redrive_policy_is_refused(rig: SqsQueue) -> None:
    """Before anything is received: a rejected message would have no place to go."""
    rig.queue.client.set_queue_attributes(QueueUrl=rig.queue.url, Attributes={"RedrivePolicy": ""})
    rig.pay((1, "a"))
    with pytest.raises(RefusedError, match="has no redrive policy"):
        rig.consumer().run()
    with pytest.raises(RefusedError, match="has no redrive policy"):
        rig.queue.replay()
    assert rig.queue.left() == 1


@pytest.mark.parametrize(("count", "reason"), [(9, "ValueError: this account cannot be read\\nreally"), (10, None)])
def test_a_dead_letter_has_the_attributes_of_its_message(rig: SqsQueue, count: int, reason: str | None) -> None:
    """And the reason, if SQS has room for an attribute more; a replay is without it."""
    RULES["b"] = "poison"
    binary = {"DataType": "Binary.trace", "BinaryValue": b"\xff"}
    given: dict[str, Any] = {f"n{number}": {"DataType": "Number", "StringValue": "7"} for number in range(count - 1)}
    rig.queue.send(payment(1, "b").decode(), trace=binary, **given)
    rig.consume_until(lambda: len(rig.queue.dead()) == 1)
    (letter,) = rig.queue.dead_messages()
    attributes = letter["MessageAttributes"]
    assert attributes.pop("x-rejected-for", {}).get("StringValue") == reason
    assert attributes == {"trace": binary, **given}
    assert rig.queue.replay() == 1
    (again,) = rig.queue.receive()
    assert again["MessageAttributes"] == attributes


def test_a_dead_letter_that_is_too_long_with_its_reason_is_without_it(rig: SqsQueue) -> None:
    """It is a dead letter all the same."""
    RULES["b"] = "poison"
    client, refused = rig.queue.client, []

    def refuse(params: Any, **_: Any) -> None:
        if "x-rejected-for" in params["MessageAttributes"]:
            refused.append(params)
            raise client.exceptions.ClientError({"Error": {"Code": "InvalidParameterValue"}}, "SendMessage")

    client.meta.events.register("provide-client-params.sqs.SendMessage", refuse)  # moto does not count attributes
    rig.pay((1, "b"))
    rig.consume_until(lambda: rig.queue.left() == 0 and len(rig.queue.dead()) == 1)
    assert len(refused) == 1
    assert rig.queue.letters() == {payment(1, "b"): ""}


def test_a_message_that_cannot_be_deleted_is_logged(rig: SqsQueue, caplog: pytest.LogCaptureFixture) -> None:
    """Somebody has purged the queue while its handler ran; the message was applied."""
    RULES["a"] = lambda: rig.queue.client.purge_queue(QueueUrl=rig.queue.url)
    rig.pay((1, "a"))
    rig.consume_until(lambda: "could not delete or delay 1 messages of queue payments-" in caplog.text)
    assert "(ReceiptHandleIsInvalid), and delivers them again" in caplog.text
    assert rig.applied == ({"a": 1}, 1)


def test_a_replay_leaves_what_is_rejected_meanwhile(rig: SqsQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would never end beside a consumer."""
    RULES["b"] = "poison"
    rig.pay((1, "b"))
    rig.consume_until(lambda: len(rig.queue.dead()) == 1)
    monkeypatch.setattr("projector_dedup.brokers.sqs.time.time", lambda: 0)
    assert rig.queue.replay() == 0
    assert len(rig.queue.dead()) == 1


def test_the_queues_of_the_page_are_as_the_consumer_needs_them(rig: SqsQueue, tmp_path: Path) -> None:
    """Made by the snippet that is printed there: the consumer finds the dead letters by the policy."""
    page = (Path(__file__).parents[2] / "docs" / "consumers" / "sqs.md").read_text(encoding="utf-8")
    (tmp_path / "create.py").write_text(
        page.partition("<!-- creates the queues -->\n```python\n")[2].partition("```")[0]
    )
    environment = {**os.environ, **rig.settings}
    command = [sys.executable, str(tmp_path / "create.py")]
    url = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.strip()
    assert url.endswith("/payments")
    assert replay(rig.queue.client, url) == 0


# Lambda --------------------------------------------------------------------------------------------------------------


def invoke(queue: Sqs, handler: Callable[[Any, object], Any]) -> set[str]:
    """Receive a batch as Lambda does, invoke a handler, delete what it does not name; return the bodies it named."""
    messages: list[Any] = []
    while received := queue.receive():  # Lambda gathers up to 10,000 messages for one invocation
        messages += received
    if not messages:
        return set()  # Lambda invokes nothing
    event = {"Records": [_record(message, queue.arn(queue.url)) for message in messages]}
    failed = {each["itemIdentifier"] for each in handler(event, None)["batchItemFailures"]}
    for message in messages:
        if message["MessageId"] not in failed:
            queue.client.delete_message(QueueUrl=queue.url, ReceiptHandle=message["ReceiptHandle"])
    return {message["Body"] for message in messages if message["MessageId"] in failed}


def _record(message: Any, arn: str) -> dict[str, Any]:
    attributes: dict[str, dict[str, Any]] = {}
    for name, each in message.get("MessageAttributes", {}).items():
        binary = base64.b64encode(each["BinaryValue"]).decode() if "BinaryValue" in each else None
        attributes[name] = {"stringValue": each.get("StringValue"), "binaryValue": binary, "dataType": each["DataType"]}
        attributes[name] |= {"stringListValues": [], "binaryListValues": []}
    return {
        "messageId": message["MessageId"],
        "receiptHandle": message["ReceiptHandle"],
        "body": message["Body"],
        "attributes": message["Attributes"],
        "messageAttributes": attributes,
        "md5OfBody": message["MD5OfBody"],
        "eventSource": "aws:sqs",
        "eventSourceARN": arn,
        "awsRegion": "eu-central-1",
    }


def test_lambda_gets_the_messages_that_failed(rig: SqsQueue, caplog: pytest.LogCaptureFixture) -> None:
    """One that is early comes again after its delay; poison is a dead letter at once; the others are done."""
    caplog.set_level(logging.INFO, "projector_dedup.consumers")
    RULES.update(early="early", poison="poison")
    rig.pay((1, "a"), (2, "early"), (3, "poison"), (4, "a"), (1, "a"))
    rig.queue.send(payment(5, "poison").decode(), trace={"DataType": "Binary", "BinaryValue": b"\xff"})
    handler = lambda_handler(rig.queue.client, payments.dispatcher(rig.engine), max_delay=2)
    assert invoke(rig.queue, handler) == {payment(2, "early").decode()}
    assert rig.applied == ({"a": 2}, 2)
    assert rig.queue.letters() == {
        payment(3, "poison"): "ValueError: this account cannot be read\\nreally",
        payment(5, "poison"): "ValueError: this account cannot be read\\nreally",
    }
    traced = [each["MessageAttributes"].get("trace") for each in rig.queue.dead_messages()]
    assert {"DataType": "Binary", "BinaryValue": b"\xff"} in traced
    assert rig.queue.left() == 1
    RULES.clear()
    wait_for(lambda: not invoke(rig.queue, handler) and rig.queue.left() == 0, "the early one", 30)
    assert rig.applied == ({"a": 2, "early": 1}, 3)


def test_lambda_without_messages_has_no_failure(rig: SqsQueue) -> None:
    """An event may be empty."""
    handler = lambda_handler(rig.queue.client, payments.dispatcher(rig.engine))
    assert handler({"Records": []}, None) == {"batchItemFailures": []}


def test_lambda_refuses_a_second_queue_without_a_source(rig: SqsQueue) -> None:
    """Two queues may contain the same ids: nothing of the second is applied, until the source is declared."""
    rig.pay((1, "a"))
    undeclared = lambda_handler(rig.queue.client, payments.dispatcher(rig.engine))
    wait_for(lambda: rig.queue.left() == 1, "the message", 30)
    message = rig.queue.receive()[0]
    own = rig.queue.arn(rig.queue.url)
    assert undeclared({"Records": [_record(message, own)]}, None) == {"batchItemFailures": []}
    second = {**_record(message, f"{own}-2"), "body": payment(2, "b").decode()}
    with pytest.raises(RefusedError, match=r"a consumer of the queues arn:.*, arn:.*-2 needs source="):
        undeclared({"Records": [second]}, None)
    assert rig.applied == ({"a": 1}, 1)


def test_lambda_gets_any_number_of_messages_back(rig: SqsQueue) -> None:
    """SQS takes ten in one request; the dead letter of the batch is one."""
    RULES.update(early="early", poison="poison")
    rig.pay((0, "poison"), *((number, "early") for number in range(1, 12)))
    handler = lambda_handler(rig.queue.client, payments.dispatcher(rig.engine), max_delay=1)
    assert invoke(rig.queue, handler) == {payment(number, "early").decode() for number in range(1, 12)}
    assert rig.queue.left() == 11
    assert len(rig.queue.dead()) == 1
    RULES.clear()
    wait_for(lambda: not invoke(rig.queue, handler) and rig.queue.left() == 0, "the early ones", 30)
    assert rig.applied == ({"early": 11}, 11)


def test_lambda_keeps_one_dead_letter_of_a_batch_that_comes_again(rig: SqsQueue) -> None:
    """Here the function may not delay messages: it raises until somebody gives it the permission."""
    RULES.update(early="early", poison="poison")
    client = rig.queue.new_client()

    def refuse(**_: Any) -> None:
        raise client.exceptions.ClientError({"Error": {"Code": "AccessDenied"}}, "ChangeMessageVisibilityBatch")

    client.meta.events.register("provide-client-params.sqs.ChangeMessageVisibilityBatch", refuse)
    rig.pay((1, "poison"), (2, "early"))
    handler = lambda_handler(client, payments.dispatcher(rig.engine))
    for _ in range(2):
        with pytest.raises(client.exceptions.ClientError, match="AccessDenied"):
            wait_for(lambda: invoke(rig.queue, handler), "Lambda to get the batch", 30)
    assert len(rig.queue.dead()) == 1
    assert rig.queue.left() == 1


def test_lambda_keeps_the_order_of_a_group(fifo: SqsFifoQueue) -> None:
    """Whatever is behind a message that failed, in its group, is named too."""
    RULES["early"] = "early"
    for number, (account, group) in enumerate([("a", "g"), ("early", "g"), ("b", "g"), ("c", "h")]):
        fifo.queue.send(payment(number, account).decode(), group)
    handler = lambda_handler(fifo.queue.client, payments.dispatcher(fifo.engine))
    assert invoke(fifo.queue, handler) == {payment(1, "early").decode(), payment(2, "b").decode()}
    assert fifo.applied == ({"a": 1, "c": 1}, 2)


def test_lambda_has_everything_again_if_a_dead_letter_cannot_be_kept(rig: SqsQueue) -> None:
    """The handler raises, so Lambda deletes nothing; what was applied is a duplicate then."""
    RULES["poison"] = "poison"
    rig.pay((1, "a"), (2, "poison"))
    handler = lambda_handler(rig.queue.client, payments.dispatcher(rig.engine))
    rig.lose_letters()
    with pytest.raises(rig.queue.client.exceptions.QueueDoesNotExist):
        invoke(rig.queue, handler)
    assert rig.queue.left() == 2
    rig.mend_letters()
    handler = lambda_handler(rig.queue.client, payments.dispatcher(rig.engine))
    wait_for(lambda: not invoke(rig.queue, handler) and rig.queue.left() == 0, "both", 30)
    assert rig.applied == ({"a": 1}, 1)
    assert len(rig.queue.dead()) == 1
