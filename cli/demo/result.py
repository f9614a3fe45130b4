"""The result of a run of the demo: the totals of both sides, beside those of the input."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from .scene import Sums
from .workers import Tally


@dataclass(frozen=True)
class Result:
    """The results of a run: the totals of both sides, those ``expected`` by the input, and what both lived through."""

    expected: Mapping[str, Sums]
    naive: Mapping[str, Sums]
    idempotent: Mapping[str, Sums]
    naive_tally: Tally
    tally: Tally

    @property
    def exact(self) -> bool:
        """True if the side with the library is right, group by group, and gave each message one answer of its own."""
        return self.idempotent == self.expected and contradicted(self.tally) == 0

    @property
    def naive_is_wrong(self) -> bool:
        """True if the totals of the naive side are wrong: otherwise the demo would have shown nothing."""
        return self.naive != self.expected


def contradicted(tally: Tally) -> int:
    """Return the number of messages whose callers did not all get one answer that nobody else got."""
    different = {message: set(answers) for message, answers in tally.answers.items()}
    given = Counter(answer for answers in different.values() for answer in answers)
    return sum(len(answers) > 1 or any(given[answer] > 1 for answer in answers) for answers in different.values())
