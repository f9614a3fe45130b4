"""What is delivered: messages with ids that look random, some of them again."""

from __future__ import annotations

import hashlib
import random
import uuid
from typing import NamedTuple

ROWS = 100
_REMEMBERED = 2_000


class Item(NamedTuple):
    """One message: add one to ``row``. ``number`` is its position in its stream, for who tracks positions."""

    id: str
    row: int
    number: int


class Stream:
    """The messages of one contender. ``redelivered`` is the share of those that had been delivered before.

    Rows follow each other, so that the messages at hand at any time change different ones; ``scattered``: in no order.
    """

    def __init__(self, name: str, redelivered: float = 0.0, rows: int = ROWS, *, scattered: bool = False) -> None:
        self.new = 0
        self._name = name
        self._redelivered = redelivered
        self._rows = rows
        self._scattered = scattered
        self._random = random.Random(name)
        self._sent: list[Item] = []

    def take(self, count: int) -> list[Item]:
        """The next ``count`` messages."""
        return [self._next() for _ in range(count)]

    def _next(self) -> Item:
        if self._sent and self._random.random() < self._redelivered:
            return self._random.choice(self._sent)
        digest = hashlib.md5(f"{self._name}-{self.new}".encode(), usedforsecurity=False).digest()
        row = int.from_bytes(digest[:4]) if self._scattered else self.new
        item = Item(str(uuid.UUID(bytes=digest)), row % self._rows, self.new + 1)
        if self._redelivered:
            slot = self.new % _REMEMBERED
            self._sent[slot : slot + 1] = [item]
        self.new += 1
        return item
