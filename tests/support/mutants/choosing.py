"""Choosing some mutants of all, anew each day, so that CI meets every one of them in time."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from .mutant import Mutant


def picked(groups: Mapping[str, Sequence[Mutant]], number: int, date: str) -> list[Mutant]:
    """Return ``number`` mutants, the same for the same date, from as many groups as possible."""
    chance = random.Random(date)
    shuffled = [chance.sample(mutants, len(mutants)) for mutants in groups.values()]
    chance.shuffle(shuffled)
    chosen: list[Mutant] = []
    while len(chosen) < number and any(shuffled):
        for group in shuffled:
            if group and len(chosen) < number:
                chosen.append(group.pop())
    return chosen
