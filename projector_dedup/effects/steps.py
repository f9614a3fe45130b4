"""Find out the state of an effect, and decide the next step by its policy. No other module reads a policy."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Any

from .policy import Ask, Policy, Resend, Stop
from .record import DONE, DOUBLE, HOUR, Seen


class State(StrEnum):
    """The states of an effect. The values are the words that the command line prints."""

    ARMED = "armed"  #: nothing was sent
    RUNNING = "running"  #: an attempt or an ask function has the lease
    UNKNOWN = "unknown"  #: an attempt ended without an answer, and the policy decides
    STOPPED = "needs a person"  #: the policy has ended, or an attempt returned a value that cannot be stored
    DOUBLE = "done twice"  #: two attempts were done, and no person has seen it
    KEPT = "not recorded"  #: an attempt returned its value, and ``settle`` records it
    DECIDED = "decided"  #: a person has decided, and ``settle`` records it
    DONE = "done"
    REJECTED = "rejected"


def state_of(row: Any) -> State:
    """Return the state of a row: a ``Seen``, or all columns with ``now``, the database's time of the query."""
    if row.outcome is not None:
        if row.evidence_outcome == DOUBLE:
            return State.DOUBLE
        return State.DONE if row.outcome == DONE else State.REJECTED
    if row.lease_until is not None and row.lease_until > row.now:
        return State.RUNNING
    if row.evidence is not None:
        return State.KEPT
    if row.decision is not None:
        return State.DECIDED
    if row.stopped_at is not None or row.evidence_outcome is not None:
        return State.STOPPED
    return State.ARMED if row.first_sent_at is None else State.UNKNOWN


class Do(Enum):
    """The possible next steps of an effect."""

    ANSWER = "answer"  #: return the recorded outcome
    WAIT = "wait"  #: another process has the lease, or it is too early to ask
    RECORD = "record"  #: record the value that an attempt has left, or the decision of a person
    SEND = "send"  #: send it: nothing was sent before, or the policy permits to send it again
    ASK = "ask"  #: ask the provider
    STOP = "stop"  #: the policy has ended, so a person decides


@dataclass(frozen=True)
class Step:
    """The next step of a row. Times are milliseconds of the database's clock."""

    do: Do
    until: int = 0  #: of WAIT
    latest: int | None = None  #: the latest time for SEND or ASK
    ask: Ask | None = None


def next_step(row: Seen, policy: Policy, lease: int) -> Step:
    """Return the next step of the row. ``lease`` is in milliseconds.

    If the database's clock was ahead during an attempt, neither its lease nor the policy can be counted from then.
    """
    state = state_of(row)
    if row.outcome is not None:
        return Step(Do.ANSWER)
    if state in (State.KEPT, State.DECIDED):
        return Step(Do.RECORD)
    if row.is_unstorable or row.was_sent_ahead or row.stopped_at is not None:
        return Step(Do.STOP)
    if state is State.RUNNING and row.lease_until is not None:
        return Step(Do.WAIT, until=row.lease_until)
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
    """Return the milliseconds until ``settle`` tries again: the age of the effect, but a lease to an hour.

    The age counts from the first attempt if ``sent``, else from the arming.
    """
    since = (row.first_sent_at or row.now) if sent else row.armed_at
    return min(max(row.now - since, lease), HOUR)
