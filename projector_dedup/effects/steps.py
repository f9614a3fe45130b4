"""Decide what may be done with an effect now: the one place that reads a policy."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from .policy import Ask, Policy, Resend, Stop
from .record import Seen

HOUR = 3_600_000  # milliseconds


class Do(Enum):
    """The steps that may be taken with an effect."""

    ANSWER = "answer"  #: it has an outcome
    WAIT = "wait"  #: somebody is at work, or it is too early to ask
    RECORD = "record"  #: an attempt has left its value, or a person has decided
    SEND = "send"  #: surely nothing was sent, or it may be sent again
    ASK = "ask"  #: ask the provider
    STOP = "stop"  #: the policy has ended: a person decides


@dataclass(frozen=True)
class Step:
    """One step with a row, by its policy. Times are those of the row."""

    do: Do
    until: int = 0  #: of WAIT
    latest: int | None = None  #: of SEND: not later than this
    ask: Ask | None = None


def next_step(row: Seen, policy: Policy, lease: int) -> Step:
    """Return what may be done with the row; ``lease`` is in milliseconds."""
    if row.outcome is not None:
        return Step(Do.ANSWER)
    if row.lease_until is not None and row.lease_until > row.now:
        return Step(Do.WAIT, until=row.lease_until)
    if row.evidence is not None or row.decision is not None:
        return Step(Do.RECORD)
    if row.first_sent_at is None:
        return Step(Do.SEND)
    while not isinstance(policy, Stop):
        end = row.first_sent_at + policy.within
        if isinstance(policy, Resend):
            if row.now < end - lease:
                return Step(Do.SEND, latest=end - lease - 1)
        elif row.now < end:
            earliest = row.last_ended_at + policy.after
            return Step(Do.ASK, latest=end - 1, ask=policy) if row.now >= earliest else Step(Do.WAIT, until=earliest)
        policy = policy.then
    return Step(Do.STOP)


def pace(row: Seen, lease: int, *, sent: bool = True) -> int:
    """Return the milliseconds until ``settle`` looks again: as long as it was tried already, from a lease to an hour.

    ``sent``: since the first sending. Else since it was armed, for what was never sent.
    """
    since = (row.first_sent_at or row.now) if sent else row.armed_at
    return min(max(row.now - since, lease), HOUR)
