"""Consume a queue of Amazon SQS, in a process or in AWS Lambda: acknowledge, retry, reject, replay the dead letters.

Needs the extra ``sqs``.
"""

from __future__ import annotations

import base64
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import EllipsisType
from typing import Any, Unpack
from urllib.parse import urlsplit
from urllib.request import getproxies

from ..extras import needs

with needs("sqs"):
    from botocore.client import BaseClient
    from botocore.exceptions import BotoCoreError, ClientError

from ..dispatcher import Dispatcher
from ..errors import RefusedError
from .dead_letters import Decide, Judge, Sifted, replay_each, sift_older
from .incoming import Convert, Incoming, json_event, with_headers
from .running import Runs, cannot_reach, draining, try_address
from .settling import (
    RetryOptions,
    Settled,
    Settling,
    SettlingOptions,
    check_batch,
    deliver_in_groups,
    expect,
    filled,
    logger,
    named_in_log,
    new_settling,
    undeclared,
)

__all__ = ["Consumer", "lambda_handler", "replay"]

_POLL = 5  # whole seconds that a request waits for messages; `stop` takes as long if no message comes
_MANY = 10  # messages of one request: the limit of SQS
_MAX_ATTRIBUTES = 10  # of one message: the limit of SQS
_REJECTED_FOR = "x-rejected-for"
_CLIENT = 'client is what boto3.client("sqs") returns'

_Message = Mapping[str, Any]
"""A message as ``receive_message`` returns it."""


class Consumer(Runs):
    """Consumes a queue of Amazon SQS, standard or FIFO, in batches.

    The consumer deletes a message after the commit. To retry a message after a delay, it changes the visibility
    timeout. It sends a rejected message to the dead-letter queue of the queue's redrive policy, with the error in the
    attribute ``x-rejected-for``, and then deletes it. Start as many processes as you need.

    The consumer delivers a batch in one transaction, and settles each message separately. In a FIFO queue, while a
    message waits for its retry, the later messages of its group wait too.

    ``convert`` builds the event from the body and the attributes ``message_id``, ``type``, ``occurred_at`` and
    ``content_type``. Up to ``batch`` messages share one transaction; SQS returns at most 10. If fewer are there, the
    consumer waits ``batch_wait`` seconds for more. The other options are ``SettlingOptions``; a delivery is a receive,
    which SQS counts.
    """

    def __init__(
        self,
        client: BaseClient,
        queue_url: str,
        dispatcher: Dispatcher,
        convert: Convert = json_event,
        *,
        batch: int = _MANY,
        batch_wait: float = 0.0,
        **options: Unpack[SettlingOptions],
    ) -> None:
        expect(BaseClient, client, _CLIENT)
        check_batch(batch, batch_wait, most=_MANY, limit="the limit of SQS")
        self._batch, self._batch_wait = batch, batch_wait
        self._client: Any = client  # boto3 creates the methods at run time
        self._url = queue_url
        self._settling = new_settling(Consumer.__init__, dispatcher, convert, options, broker="sqs")

    def settle_dead_letters(self, decide: Decide) -> Sifted:
        """Keep, replay or drop each present dead letter, as ``decide`` says. ``replay`` explains when.

        SQS counts a receive of each, and hides those that are kept until the end. If the process is killed meanwhile,
        they stay hidden for ten minutes. In a FIFO queue, a letter that is kept hides the later ones of its group.
        """
        return _sift(self._client, self._url, self._settling.judge(decide))

    def run(self) -> None:
        """Consume until ``stop`` is called, or until SIGTERM or Ctrl-C in the main thread.

        Raises ``ConnectionError`` if SQS cannot be reached, and the error of boto3 if it fails later. Raises
        ``RefusedError`` if the queue has no redrive policy, because there is no queue for rejected messages then.
        """
        with draining(self.stop):
            queue = self._open()
            while not self._stopping:
                found = _receive(self._client, self._url, _POLL, self._batch)
                more = partial(_receive, self._client, self._url, 0)
                if messages := filled(found, self._batch, self._batch_wait, more):
                    done, _ = queue.settle(messages)
                    _delete(self._client, self._url, done)

    def _open(self) -> _Queue:
        endpoint = urlsplit(self._client.meta.endpoint_url)
        host, port = str(endpoint.hostname), endpoint.port or (80 if endpoint.scheme == "http" else 443)
        if not (self._client.meta.config.proxies or getproxies()):  # a proxy would connect in place of the client
            try_address("SQS", host, port)
        try:
            queue = _Queue(self._client, self._url, self._settling)
        except BotoCoreError as error:
            raise cannot_reach("SQS", f"{host}:{port}", error) from error
        self._log_start(f"queue {_name(self._url)} of SQS at {host}:{port}")
        return queue


def lambda_handler(
    client: BaseClient,
    dispatcher: Dispatcher,
    convert: Convert = json_event,
    *,
    source: str | EllipsisType | None = ...,
    **options: Unpack[RetryOptions],
) -> Callable[[Mapping[str, Any], object], dict[str, list[dict[str, str]]]]:
    """Return a handler for AWS Lambda that settles the messages of each invocation like ``Consumer``.

    ::

        handler = lambda_handler(boto3.client("sqs"), dispatcher, convert)

    The handler returns ``batchItemFailures``: the messages that SQS must deliver again. Lambda deletes all others.
    **Give the event source mapping the function response type ReportBatchItemFailures.** Without it, Lambda deletes all
    messages of the batch, and the failed messages are lost. ``source`` is that of ``SettlingOptions``. Without it, the
    handler raises ``RefusedError`` for the messages of a second queue. The other options are ``RetryOptions``.

    If boto3 fails, the handler raises its error. Lambda then delivers the whole batch again, and the applied messages
    are duplicates.
    """
    expect(BaseClient, client, _CLIENT)
    of_sqs = {"source": None if source is ... else source, "broker": "sqs"}
    settling = new_settling(lambda_handler, dispatcher, convert, options, **of_sqs)
    queues: dict[str, _Queue] = {}

    def handler(event: Mapping[str, Any], context: object = None) -> dict[str, list[dict[str, str]]]:  # noqa: ARG001
        if not event["Records"]:
            return {"batchItemFailures": []}
        messages = [_of_lambda(record) for record in event["Records"]]
        queue: str = event["Records"][0]["eventSourceARN"]  # Lambda takes each batch from one queue
        if queue not in queues:
            if queues and source is ...:
                raise RefusedError(undeclared(f"the queues {named_in_log([*queues, queue])}"))
            queues[queue] = _Queue(client, _url_of(client, queue), settling)
        _, again = queues[queue].settle(messages)
        return {"batchItemFailures": [{"itemIdentifier": message["MessageId"]} for message in again]}

    return handler


def replay(client: BaseClient, queue_url: str) -> int:
    """Move the present dead letters of a queue back to it, and return their number.

    Fix the cause first. Replay while the markers are kept: a message that was applied before is then a duplicate.
    ``replay`` returns if SQS has no dead letter, or for five seconds none from before its start.
    """
    expect(BaseClient, client, _CLIENT)
    return _sift(client, queue_url, replay_each).settled


def _sift(sqs: Any, queue_url: str, judge: Judge) -> Sifted:
    """Settle the present dead letters that nobody else is receiving."""
    dead, began = _dead_letter_queue(sqs, queue_url), time.time() * 1000
    sizes = ("ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible")
    there = sqs.get_queue_attributes(QueueUrl=dead, AttributeNames=sizes)["Attributes"]

    def replay(letter: _Message) -> None:
        kept = {name: value for name, value in _attributes(letter).items() if name != _REJECTED_FOR}
        _send(sqs, queue_url, letter, kept)

    settled = sift_older(
        lambda: _receive(sqs, dead, 1),
        lambda letter: judge(incoming := _incoming(letter, dead), incoming.headers.get(_REJECTED_FOR), None),
        replay,
        lambda letter: sqs.delete_message(QueueUrl=dead, ReceiptHandle=letter["ReceiptHandle"]),
        is_newer=lambda letter: int(letter["Attributes"]["SentTimestamp"]) > began,
        delay=lambda letter, seconds: _delay(sqs, dead, [(letter, seconds)]),
    )
    return Sifted(sum(int(there[size]) for size in sizes), settled)


class _Queue:
    """A queue whose messages are delivered, and then either done or returned to SQS with a delay."""

    def __init__(self, client: Any, url: str, settling: Settling) -> None:
        self._client, self._url, self._settling = client, url, settling
        self._dead = _dead_letter_queue(client, url)

    def settle(self, messages: Sequence[_Message]) -> tuple[list[_Message], list[_Message]]:
        """Deliver messages. Return those to delete, and those that SQS delivers again after their delay."""
        done: list[_Message] = []
        delays: list[tuple[_Message, int]] = []
        for message, settled in zip(messages, self._deliver(messages), strict=True):
            if settled is None:  # SQS delivers it after the message before it in its group is settled
                delays.append((message, 0))
            elif settled.reject:
                self._keep(message, settled.reason)
                self._settling.kept(settled)
                # At once: if a later request fails, the batch comes again, and with it one more dead letter.
                _delete(self._client, self._url, [message])
            elif settled.acknowledge:
                done.append(message)
            else:
                delays.append((message, math.ceil(settled.delay)))
        _delay(self._client, self._url, delays)
        return done, [message for message, _ in delays]

    def _deliver(self, messages: Sequence[_Message]) -> list[Settled | None]:
        """Return a ``Settled`` for each message; None if the message must wait for another one of its group."""
        incoming = [_incoming(message, self._url) for message in messages]
        if not _is_fifo(self._url):
            return [*self._settling.deliver_batch(incoming)]
        groups = [message["Attributes"]["MessageGroupId"] for message in messages]
        return deliver_in_groups(self._settling, incoming, groups)

    def _keep(self, message: _Message, reason: str) -> None:
        """Send a rejected message to the dead-letter queue; without the reason if the message has no room for it."""
        attributes = _attributes(message)
        if _REJECTED_FOR in attributes or len(attributes) < _MAX_ATTRIBUTES:
            marked = {**attributes, _REJECTED_FOR: {"DataType": "String", "StringValue": reason}}
            try:
                return _send(self._client, self._dead, message, marked)
            except ClientError:  # the reason may make the message too long; any other error occurs again below
                pass
        return _send(self._client, self._dead, message, attributes)


def _receive(client: Any, url: str, seconds: int, most: int = _MANY) -> list[_Message]:
    """Return up to ``most`` messages as soon as there is one; none after ``seconds``."""
    found: list[_Message] = client.receive_message(
        QueueUrl=url,
        MaxNumberOfMessages=most,
        WaitTimeSeconds=seconds,
        MessageAttributeNames=["All"],
        MessageSystemAttributeNames=["All"],
    ).get("Messages", [])
    return found


def _delete(client: Any, url: str, messages: Sequence[_Message]) -> None:
    _batch(client.delete_message_batch, url, [{"ReceiptHandle": each["ReceiptHandle"]} for each in messages])


def _delay(client: Any, url: str, delays: Sequence[tuple[_Message, int]]) -> None:
    """Have SQS deliver each message again after its number of seconds."""
    entries = [{"ReceiptHandle": each["ReceiptHandle"], "VisibilityTimeout": delay} for each, delay in delays]
    _batch(client.change_message_visibility_batch, url, entries)


def _batch(request: Callable[..., Any], url: str, entries: Sequence[Mapping[str, Any]]) -> None:
    """Send one request for each ten messages. SQS delivers a message again if the request fails for it."""
    for first in range(0, len(entries), _MANY):
        named = [{"Id": str(number), **entry} for number, entry in enumerate(entries[first : first + _MANY])]
        if failed := request(QueueUrl=url, Entries=named).get("Failed", []):
            logger.warning(
                "SQS could not delete or delay %d messages of queue %s (%s), and delivers them again",
                *(len(failed), _name(url), ", ".join(sorted({each["Code"] for each in failed}))),
            )


def _send(client: Any, url: str, message: _Message, attributes: Mapping[str, Any]) -> None:
    """Send a copy of a message. In a FIFO queue, the copy stays in its group, and SQS drops a second copy."""
    fifo = {
        "MessageGroupId": message["Attributes"].get("MessageGroupId"),
        "MessageDeduplicationId": message["MessageId"],  # with the original's own value, SQS would drop a replay
    }
    client.send_message(
        QueueUrl=url, MessageBody=message["Body"], MessageAttributes=attributes, **(fifo if _is_fifo(url) else {})
    )


def _dead_letter_queue(client: Any, url: str) -> str:
    """Return the URL of the queue that the redrive policy of a queue names."""
    attributes = client.get_queue_attributes(QueueUrl=url, AttributeNames=["All"])["Attributes"]
    policy = json.loads(attributes.get("RedrivePolicy") or "{}")
    if not (target := policy.get("deadLetterTargetArn")):
        raise RefusedError(
            f"the queue {_name(url)} has no redrive policy, so there is no queue for rejected messages: give it a "
            "redrive policy that names a dead-letter queue"
        )
    return _url_of(client, target)


def _url_of(client: Any, arn: str) -> str:
    account, name = arn.split(":")[4:6]
    url: str = client.get_queue_url(QueueName=name, QueueOwnerAWSAccountId=account)["QueueUrl"]
    return url


def _name(url: str) -> str:
    return url.rpartition("/")[2]


def _is_fifo(url: str) -> bool:
    return url.endswith(".fifo")  # SQS requires this suffix


def _attributes(message: _Message) -> dict[str, dict[str, Any]]:
    """Return the attributes of a message in the form that ``send_message`` takes."""
    taken = ("DataType", "StringValue", "BinaryValue")
    found: Mapping[str, Mapping[str, Any]] = message.get("MessageAttributes") or {}
    return {name: {key: each[key] for key in taken if key in each} for name, each in found.items()}


def _incoming(message: _Message, url: str) -> Incoming:
    """Return a message for a converter: its body, and its attributes as headers."""
    headers = {name: each.get("StringValue", each.get("BinaryValue")) for name, each in _attributes(message).items()}
    return with_headers(
        message["Body"].encode(),
        headers,
        attempt=int(message["Attributes"]["ApproximateReceiveCount"]),
        origin=f"queue {_name(url)}",
        id_name="message attribute message_id",
    )


def _of_lambda(record: Mapping[str, Any]) -> _Message:
    """Return a record of Lambda's event in the form of ``receive_message``."""
    attributes: dict[str, dict[str, Any]] = {}
    for name, each in record.get("messageAttributes", {}).items():
        attributes[name] = {"DataType": each["dataType"]}
        if each.get("binaryValue") is not None:
            attributes[name]["BinaryValue"] = base64.b64decode(each["binaryValue"])
        else:
            attributes[name]["StringValue"] = each["stringValue"]
    return {
        "MessageId": record["messageId"],
        "ReceiptHandle": record["receiptHandle"],
        "Body": record["body"],
        "Attributes": record["attributes"],
        "MessageAttributes": attributes,
    }
