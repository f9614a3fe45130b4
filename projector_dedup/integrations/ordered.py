"""Deliver the messages of a broker that keeps the order within groups: no message overtakes one that is retried."""

from __future__ import annotations

from collections.abc import Sequence

from .incoming import Incoming
from .settling import Settled, Settling


def deliver_in_order(settling: Settling, incoming: Sequence[Incoming], groups: Sequence[str]) -> list[Settled | None]:
    """Deliver messages one by one, and return a ``Settled`` for each; None if it must wait for one of its group.

    Messages with the group "" are in no group. A rejected message does not delay its group.
    """
    answers: list[Settled | None] = []
    waiting: set[str] = set()  # groups with a message that is retried
    for each, group in zip(incoming, groups, strict=True):
        settled = None if group in waiting else settling.deliver(each)
        if group and settled is not None and not settled.acknowledge and not settled.reject:
            waiting.add(group)
        answers.append(settled)
    return answers
