"""A queue of Amazon SQS for one test, emulated by moto in a process of its own, looked at by a client of the test's."""

import atexit
import contextlib
import json
import secrets
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import boto3
import urllib3

from consumer_rig import Sent, wait_for
from payments import payment
from projector_dedup.brokers.sqs import replay
from projector_dedup.testing.provider import free_port

VISIBILITY = 5  # seconds after which SQS delivers a message again whose consumer died


@cache
def server() -> dict[str, str]:
    """Start the server of this process, and return the environment of its clients."""
    port = free_port()
    program = Path(__file__).with_name("sqs_server.py")
    process = subprocess.Popen([sys.executable, program, str(port)], stderr=subprocess.DEVNULL)
    atexit.register(process.kill)
    url = f"http://127.0.0.1:{port}"
    wait_for(lambda: _answers(url), "the server of SQS", 60)
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_DEFAULT_REGION": "eu-central-1",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
    }


def _answers(url: str) -> bool:
    with contextlib.suppress(urllib3.exceptions.HTTPError):
        return bool(urllib3.request("GET", url, retries=False).status)
    return False


class Sqs:
    """One queue with a name of its own, and its dead-letter queue."""

    def __init__(self, *, fifo: bool = False, receives: int = 1000) -> None:
        self.environment = server()
        self.client: Any = self.new_client()
        self._end = ".fifo" if fifo else ""
        self._name = f"payments-{secrets.token_hex(6)}"
        self.dead_url = self.make_dead()
        policy = {"deadLetterTargetArn": self.arn(self.dead_url), "maxReceiveCount": receives}
        self.url = self._make("", {"VisibilityTimeout": str(VISIBILITY), "RedrivePolicy": json.dumps(policy)})

    def new_client(self) -> Any:
        """Make another client of the server."""
        return boto3.client(
            "sqs",
            endpoint_url=self.environment["AWS_ENDPOINT_URL"],
            region_name=self.environment["AWS_DEFAULT_REGION"],
            aws_access_key_id="test",
            aws_secret_access_key="test",
        )

    def _make(self, suffix: str, attributes: Mapping[str, str]) -> str:
        given = {**attributes, **({"FifoQueue": "true"} if self._end else {})}
        name = f"{self._name}{suffix}{self._end}"
        return str(self.client.create_queue(QueueName=name, Attributes=given)["QueueUrl"])

    def make_dead(self) -> str:
        """Make the dead-letter queue; return its URL."""
        return self._make("-dead", {})

    def arn(self, url: str) -> str:
        """Return the name that a policy has for a queue."""
        return str(self.client.get_queue_attributes(QueueUrl=url, AttributeNames=["All"])["Attributes"]["QueueArn"])

    def send(self, body: str, group: str = "", **attributes: Any) -> None:
        """Send one message with any attributes, each a text or as ``send_message`` takes it."""
        given = {
            name: {"DataType": "String", "StringValue": value} if isinstance(value, str) else value
            for name, value in attributes.items()
        }
        unique = uuid.uuid4().hex
        fifo = {"MessageGroupId": group or unique, "MessageDeduplicationId": unique} if self._end else {}
        self.client.send_message(QueueUrl=self.url, MessageBody=body, MessageAttributes=given, **fifo)

    def publish(self, messages: Sequence[Sent]) -> None:
        """Send the messages of a plan; in a FIFO queue each has a group of its own."""
        for each in messages:
            beside = {"message_id": each.id, "type": each.type}
            self.send(each.body.decode("latin-1"), **{name: value for name, value in beside.items() if value})

    def send_strange(self) -> int:
        """Send attributes that no client should; return the number of messages."""
        binary, number = {"DataType": "Binary", "BinaryValue": b"\xff\x00"}, {"DataType": "Number", "StringValue": "7"}
        strange: list[dict[str, Any]] = [
            {},
            {"trace": binary, "n": number, "custom": {"DataType": "String.uuid", "StringValue": "\N{SNOWMAN}"}},
            {f"attribute-{at}": "x" for at in range(10)},
            {"type": binary},
            {"message_id": binary},
            {"message_id": {"DataType": "Binary", "BinaryValue": b"binary"}},
            {"occurred_at": number},
            {"message_id": number},
            {"x-rejected-for": "?"},
        ]
        sent = 0
        for attributes in strange:
            for account in "a" if "message_id" in attributes else "abc":  # one id is one message
                sent += 1
                self.send(payment(sent, account).decode(), **attributes)
        return sent

    def receive(self, url: str = "") -> list[dict[str, Any]]:
        """Receive up to ten messages, which nobody else gets for a while."""
        asked = {"MaxNumberOfMessages": 10, "MessageAttributeNames": ["All"], "MessageSystemAttributeNames": ["All"]}
        return list(self.client.receive_message(QueueUrl=url or self.url, **asked).get("Messages", []))

    def dead_messages(self) -> list[dict[str, Any]]:
        """The dead letters that are there, which stay there."""
        found: list[dict[str, Any]] = []
        while letters := self.receive(self.dead_url):
            found += letters
        for each in found:
            self.client.change_message_visibility(
                QueueUrl=self.dead_url, ReceiptHandle=each["ReceiptHandle"], VisibilityTimeout=0
            )
        return found

    def dead(self) -> list[Sent]:
        """The dead letters, as they were sent."""
        return [
            Sent(each.get("MessageAttributes", {}).get("message_id", {}).get("StringValue"), _body(each))
            for each in self.dead_messages()
        ]

    def letters(self) -> dict[bytes, str]:
        """The body of each dead letter, and why it is one."""
        return {
            _body(each): each.get("MessageAttributes", {}).get("x-rejected-for", {}).get("StringValue", "")
            for each in self.dead_messages()
        }

    def replay(self) -> int:
        """Send the dead letters again, by the library."""
        return replay(self.client, self.url)

    def left(self) -> int:
        """How many messages wait to be received, or were received and not deleted."""
        found = self.client.get_queue_attributes(QueueUrl=self.url, AttributeNames=["All"])["Attributes"]
        return int(found["ApproximateNumberOfMessages"]) + int(found["ApproximateNumberOfMessagesNotVisible"])

    def close(self) -> None:
        """Delete the queues."""
        for url in (self.url, self.dead_url):
            with contextlib.suppress(self.client.exceptions.QueueDoesNotExist):
                self.client.delete_queue(QueueUrl=url)
        self.client.close()


def _body(message: Mapping[str, Any]) -> bytes:
    return str(message["Body"]).encode("latin-1", "backslashreplace")


@contextlib.contextmanager
def sqs(**options: Any) -> Iterator[Sqs]:
    """A queue of its own."""
    with contextlib.closing(Sqs(**options)) as opened:
        yield opened
