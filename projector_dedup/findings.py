"""What `check` says: something to mend, and how."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """Something to mend; ``fatal`` if deliveries fail, or could be lost or doubled, before it is."""

    problem: str
    remedy: str
    fatal: bool = True


def advice(problem: str, remedy: str) -> Finding:
    """What is not wrong but could be better."""
    return Finding(problem, remedy, fatal=False)
