"""What tells the transaction of a claim from any other: its marker, and a mark that ends with it."""

from __future__ import annotations

from typing import Any, Protocol

_MARK = "the mark"


class Marker(Protocol):
    """What the database can say of the marker of a unit of work. Each question is a round trip."""

    key: dict[str, Any] | None  #: without one, only the transaction can be asked about

    def mark_transaction(self) -> None:
        """Make its transaction one that can be told from any other."""

    def is_ours(self) -> bool:
        """Whether the transaction that is open now is the one that inserted it."""

    def is_committed(self) -> bool | None:
        """Whether it is there, now that its transaction has ended; None if there never was one."""


class Savepoints:
    """Those that are open, and the mark among them.

    The mark goes with the savepoint in which it was set, be that released or rolled back, and is then set again.
    """

    def __init__(self, marker: Marker) -> None:
        self.marker = marker
        self._open: list[str] = []

    def began(self, name: str) -> None:
        """A savepoint was set."""
        self._open.append(name)

    def ended(self, name: str) -> None:
        """It could be ended, so the transaction is the one in which it was set, as the mark was after it."""
        place = self._open.index(name) if name in self._open else 0
        gone = self._open[place:]
        del self._open[place:]
        if _MARK in gone:
            self.mark()

    def mark(self) -> None:
        """Mark the transaction, once: a second mark would belong to whatever transaction is open by then."""
        if _MARK not in self._open:
            self.marker.mark_transaction()
            self._open.append(_MARK)
