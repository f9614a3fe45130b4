"""What tells the transaction of a claim from any other: its marker, and a mark that ends with it."""

from __future__ import annotations

from typing import Any, Protocol

_MARK = "the mark"


class Marker(Protocol):
    """What the database can say of the marker of a unit of work. Each question is a round trip."""

    key: dict[str, Any] | None  #: without one, only the transaction can be asked about

    def mark_transaction(self) -> None:
        """Make its transaction one that can be told from any other."""

    def note_place(self) -> None:
        """Remember where it is, before somebody chooses another schema or database for what comes next."""

    def is_ours(self) -> bool:
        """Whether the transaction that is open now is the one that inserted it."""

    def is_committed(self) -> bool | None:
        """True if it is there, now that its transaction has ended; None if there never was one, or nobody can tell."""


def what_is_durable(marker: Marker) -> str | None:
    """What a commit below SQLAlchemy has left behind, to be said of it; None if there was no commit."""
    committed = marker.is_committed()
    if committed:
        return (
            ", by a commit: the marker and what the handler had written by then are COMMITTED, and what it wrote later "
            "may not be. A redelivery will be skipped as a duplicate, so look at the read model"
        )
    if committed is None and marker.key is None:
        return (
            ". If by a commit, what it had written by then is COMMITTED, and without a marker a redelivery writes it "
            "again: look at the read model first"
        )
    if committed is None:
        return (
            ". If by a commit, the marker and what it had written by then are COMMITTED, and a redelivery will be "
            "skipped as a duplicate. Which it was cannot be told, because several tables have the marker's name, or it "
            "cannot be read any more, after what the handler chose (a schema, a database, a role): look for the marker "
            "where it was claimed, and at the read model"
        )
    return None


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
        if _MARK in self._open:
            return
        self._open.append(_MARK)  # first: a listener that hears of the mark's own statement may ask for the driver
        try:
            self.marker.mark_transaction()
        except BaseException:
            self._open.remove(_MARK)
            raise
