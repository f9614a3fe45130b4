"""Tell in which state an effect is, and decide what may be done with it: the one place that reads a policy."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Any

from .policy import Ask, Policy, Resend, Stop
from .record import DONE, Seen

HOUR = 3_600_000  # milliseconds


class State(StrEnum):
    """The states of an effect, in the words that people read."""

    ARMED = "armed"  #: nothing was sent
    RUNNING = "running"  #: an attempt, or an ask, has the lease
    UNKNOWN = "unknown"  #: an attempt ended without an answer, and its policy decides
    STOPPED = "needs a person"  #: its policy has ended
    KEPT = "not recorded"  #: an attempt returned its value, and ``settle`` records it
    DECIDED = "decided"  #: a person has decided, and ``settle`` records it
    DONE = "done"
    REJECTED = "rejected"


def state_of(row: Any) -> State:
    """Return the state of a row, which is a ``Seen`` or has all columns and ``now``, the database's time then."""
    if row.outcome is not None:
        return State.DONE if row.outcome == DONE else State.REJECTED
    if row.lease_until is not None and row.lease_until > row.now:
        return State.RUNNING
    if row.evidence is not None:
        return State.KEPT
    if row.decision is not None:
        return State.DECIDED
    if row.stopped_at is not None:
        return State.STOPPED
    return State.ARMED if row.first_sent_at is None else State.UNKNOWN


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
    state = state_of(row)
    if state in (State.DONE, State.REJECTED):
        return Step(Do.ANSWER)
    if state is State.RUNNING and row.lease_until is not None:
        return Step(Do.WAIT, until=row.lease_until)
    if state in (State.KEPT, State.DECIDED):
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
