"""A Redis stream of a test's own, looked at from outside of its consumer."""

import contextlib
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import redis

from brokers import broker
from consumer_rig import Sent
from payments import payment
from projector_dedup.brokers.redis import dead_stream, replay
from reached import reached
from redis_garbage import garbage

GROUP = "airlines"


class RedisStream:
    """A stream with a name of its own."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.client = redis.Redis.from_url(self.address)
        server: Any = self.client.info("server")
        reached.saw("redis", server["redis_version"])
        self.stream = f"payments-{uuid.uuid4().hex}"
        self.dead_letters = dead_stream(self.stream, GROUP)

    def close(self) -> None:
        """Delete the stream and its dead letters."""
        self.client.delete(self.stream, self.dead_letters)
        self.client.close()

    def publish(self, messages: Sequence[Sent]) -> None:
        """Add the messages of a plan to the stream."""
        for each in messages:
            entry: Any = {"body": each.body, "message_id": each.id, "type": each.type}
            self.client.xadd(self.stream, {name: value for name, value in entry.items() if value is not None})

    def pay(self, number: int, account: str = "a", **fields: Any) -> bytes:
        """Add a payment to the stream; return the id of its entry."""
        entry: Any = {"body": payment(number, account), **fields}
        added: Any = self.client.xadd(self.stream, entry)
        return bytes(added)

    def add_garbage(self, seed: int) -> int:
        """Add what no client should add; return the number of entries."""
        entries = list(garbage(seed, 60))
        for entry in entries:
            self.client.execute_command("XADD", self.stream, "*", *entry)  # type: ignore[no-untyped-call]
        return len(entries)

    def settled(self, entries: int) -> Callable[[], bool]:
        """True once so many entries were read, and none is pending."""

        def done() -> bool:
            groups = self._groups()
            return bool(groups) and groups[0]["pending"] == 0 and groups[0]["entries-read"] == entries

        return done

    def dead_entries(self) -> list[dict[bytes, bytes]]:
        """Return the dead letters, with all their fields."""
        found: Any = self.client.xrange(self.dead_letters)
        return [fields for _, fields in found]

    def letters(self) -> dict[bytes, str]:
        """Return the body of each dead letter, and why it is one."""
        return {each.get(b"body", b""): each[b"x-rejected-for"].decode() for each in self.dead_entries()}

    def dead(self) -> list[Sent]:
        """Return the dead letters, as they were sent."""
        found = self.dead_entries()
        return [
            Sent((each.get(b"message_id") or b"").decode("latin-1") or None, each.get(b"body", b"")) for each in found
        ]

    def replay(self) -> int:
        """Add the dead letters to the stream again, by the library."""
        return replay(self.client, self.stream, GROUP)

    def left(self) -> int:
        """Return how many entries were not read yet, or not acknowledged."""
        groups = self._groups()
        if not groups:  # nobody has consumed yet
            length: Any = self.client.xlen(self.stream)
            return int(length)
        return int(groups[0]["lag"] or 0) + int(groups[0]["pending"])

    def owner(self, number: bytes) -> bytes:
        """Return the consumer to which a pending entry belongs; nothing if it is not pending."""
        if not self._groups():
            return b""
        pending: Any = self.client.xpending_range(self.stream, GROUP, number, number, 1)
        return bytes(pending[0]["consumer"]) if pending else b""

    def _groups(self) -> Any:
        return self.client.xinfo_groups(self.stream) if self.client.exists(self.stream) else []


@contextlib.contextmanager
def redis_stream() -> Iterator[RedisStream]:
    """A stream of its own on the Redis of this run; the test ends here if there is none."""
    with contextlib.closing(RedisStream(broker("redis"))) as opened:
        yield opened
