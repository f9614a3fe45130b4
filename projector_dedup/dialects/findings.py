"""Define what `idempotency check` reports: a problem and its remedy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """Names a problem and its remedy; ``fatal`` if deliveries fail, or may be lost or doubled, before it is solved."""

    problem: str
    remedy: str
    fatal: bool = True


def advice(problem: str, remedy: str) -> Finding:
    """Return a finding that is not fatal: nothing is wrong, but it could be better."""
    return Finding(problem, remedy, fatal=False)
