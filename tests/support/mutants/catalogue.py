"""All mutants, by the promise or the part of the library that they break: `catalogue.txt`, read and checked."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from .mutant import Mutant

_GROUP = re.compile(r"# ([a-z-]+): ")
_HEADER = re.compile(r"([a-z0-9-]+): (.+)")


def _mutant(header: str, fields: list[str], line: int) -> Mutant:
    """Return the mutant of a header and the fields below it, the first of which is on this line."""
    found: dict[str, list[str]] = {"where": [], "old": [], "new": [], "tests": [], "hangs": []}
    for field in fields:
        word, text = field[4:10].strip(), field[10:]
        if word not in found:
            raise ValueError(f"catalogue.txt, from line {line}: {field!r} is no field of a mutant")
        found[word].append(text.removesuffix(r"\s") if text.endswith(r" \s") else text)
    named = _HEADER.fullmatch(header)
    if named is None or len(found["where"]) != 1 or not found["old"] or not found["tests"]:
        raise ValueError(f"catalogue.txt, from line {line}: a mutant has a name, what it breaks, where, old and tests")
    old, new = ("\n".join(found[each]) for each in ("old", "new"))
    return Mutant(named[1], named[2], found["where"][0], old, new, tuple(found["tests"]), bool(found["hangs"]))


def read(text: str) -> dict[str, tuple[Mutant, ...]]:
    """Return the mutants of a catalogue by the name of their group; raise `ValueError` with the line of a mistake."""
    groups: dict[str, list[Mutant]] = {}
    group: list[Mutant] | None = None
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if begins := _GROUP.match(line):
            group = groups.setdefault(begins[1], [])
        elif line and not line.startswith(("#", " ")):
            below = lines[number + 1 :]
            end = next((place for place, each in enumerate(below) if not each.startswith(" ")), len(below))
            if group is None:
                raise ValueError(f"catalogue.txt, line {number + 1}: a mutant stands before the first group")
            group.append(_mutant(line, below[:end], number + 2))
    return {name: tuple(mutants) for name, mutants in groups.items()}


GROUPS: Mapping[str, tuple[Mutant, ...]] = read((Path(__file__).parent / "catalogue.txt").read_text(encoding="utf-8"))
MUTANTS: tuple[Mutant, ...] = tuple(mutant for mutants in GROUPS.values() for mutant in mutants)


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
