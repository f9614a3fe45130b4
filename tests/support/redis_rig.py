"""A Redis stream of a test's own, looked at from outside of its consumer, and the read model behind it."""

import uuid
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import redis
from sqlalchemy import create_engine

import payments
from consumer_rig import Sent
from databases import Database
from payments import RULES, payment
from projector_dedup.integrations.redis import dead_stream, replay
from reached import reached
from redis_garbage import garbage

GROUP = "airlines"


class RedisStream:
    """A stream with a name of its own, and the read model of its projector."""

    def __init__(self, database: Database, address: str) -> None:
        self.engine = create_engine(database.url())
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
        self.engine.dispose()

    def publish(self, messages: Sequence[Sent]) -> None:
        """Add the messages of a plan to the stream."""
        for each in messages:
            entry: Any = {"body": each.body, **({"message_id": each.id} if each.id else {})}
            self.client.xadd(self.stream, entry)

    def pay(self, number: int, account: str = "a", **fields: Any) -> bytes:
        """Add a payment to the stream; return the id of its entry."""
        entry: Any = {"body": payment(number, account), **fields}
        added: Any = self.client.xadd(self.stream, entry)
        return bytes(added)

    def add_garbage(self, seed: int) -> int:
        """Add what no client should add, and a payment behind it; return the number of entries."""
        RULES.update(b="poison", c="early")
        entries = list(garbage(seed, 60))
        for entry in entries:
            self.client.execute_command("XADD", self.stream, "*", *entry)  # type: ignore[no-untyped-call]
        self.pay(1_000, "behind")
        return len(entries) + 1

    def garbage_is_settled(self, entries: int, caplog: pytest.LogCaptureFixture) -> Callable[[], bool]:
        """True once all is settled, and what came too early was delayed before."""

        def done() -> bool:
            if "behind" in self.applied[0] and "is to come again in 0.2 s" in caplog.text:
                RULES.pop("c", None)
            return self.settled(entries)()

        return done

    def settled(self, entries: int) -> Callable[[], bool]:
        """True once so many entries were read, and none is pending."""

        def done() -> bool:
            groups: Any = self.client.xinfo_groups(self.stream) if self.client.exists(self.stream) else []
            return bool(groups) and groups[0]["pending"] == 0 and groups[0]["entries-read"] == entries

        return done

    def letters(self) -> list[dict[bytes, bytes]]:
        """Return the dead letters."""
        found: Any = self.client.xrange(self.dead_letters)
        return [fields for _, fields in found]

    def dead(self) -> list[Sent]:
        """Return the dead letters, as they were sent."""
        letters = self.letters()
        return [Sent((each.get(b"message_id") or b"").decode() or None, each[b"body"]) for each in letters]

    def replay(self) -> int:
        """Add the dead letters to the stream again, by the library."""
        return replay(self.client, self.stream, GROUP)

    def left(self) -> int:
        """Return how many entries were not read yet, or not acknowledged."""
        groups: Any = self.client.xinfo_groups(self.stream)
        return int(groups[0]["lag"]) + int(groups[0]["pending"])

    @property
    def applied(self) -> tuple[dict[str, int], int]:
        """The balances, and the number of markers."""
        return payments.applied(self.engine)

    def numbers(self) -> list[bytes]:
        """Return the numbers of the entries in the stream."""
        entries: Any = self.client.xrange(self.stream)
        return [number for number, _ in entries]

    def owner(self, number: bytes) -> bytes:
        """Return the consumer to which a pending entry belongs; nothing if it is not pending."""
        if not self.client.exists(self.stream) or not self.client.xinfo_groups(self.stream):
            return b""
        pending: Any = self.client.xpending_range(self.stream, GROUP, number, number, 1)
        return bytes(pending[0]["consumer"]) if pending else b""
