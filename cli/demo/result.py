"""The result of a run of the demo: both read models, beside the totals of the data file."""

from __future__ import annotations

from dataclasses import dataclass

from .flights import Totals
from .workers import Tally


@dataclass(frozen=True)
class Result:
    """The results of a run: both read models, the totals ``expected`` by the data file, and what both lived through."""

    expected: dict[str, Totals]
    naive: dict[str, Totals]
    idempotent: dict[str, Totals]
    naive_tally: Tally
    tally: Tally

    @property
    def exact(self) -> bool:
        """True if the read model of the idempotent projector is right, carrier by carrier."""
        return self.idempotent == self.expected

    @property
    def naive_is_wrong(self) -> bool:
        """True if the read model of the naive projector is wrong: otherwise the demo would have shown nothing."""
        return self.naive != self.expected
