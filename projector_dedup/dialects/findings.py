"""Define what `idempotency check` reports: a problem, advice or a note, each with what to do."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """Names a problem and its remedy; ``fatal`` if deliveries fail, or may be lost or doubled, before it is solved.

    ``informs`` if there is nothing to solve: ``problem`` says how the database is set up, ``remedy`` what follows.
    """

    problem: str
    remedy: str
    fatal: bool = True
    informs: bool = False


def advice(problem: str, remedy: str) -> Finding:
    """Return a finding that is not fatal: nothing is wrong, but it could be better."""
    return Finding(problem, remedy, fatal=False)


def note(fact: str, consequence: str) -> Finding:
    """Return a finding that asks for nothing: a fact about the database, and what follows from it."""
    return Finding(fact, consequence, fatal=False, informs=True)
