"""A policy decides what to do with an unknown effect: one that may or may not have been done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from ..errors import HandlerDefinitionError


@dataclass(frozen=True)
class Stop:
    """A person decides with ``idempotency effects resolve``."""


@dataclass(frozen=True)
class Resend:
    """Send the effect again with the same provider key, while the provider remembers that key. See ``resend``."""

    within: int  #: milliseconds
    then: Policy


@dataclass(frozen=True)
class Ask:
    """Ask the provider. See ``ask``."""

    function: Callable[..., Any]
    after: int  #: milliseconds
    within: int  #: milliseconds
    then: Policy


Policy = Resend | Ask | Stop

stop = Stop()
"""Do nothing until a person decides; ``idempotency effects list`` lists the effect. It cannot happen twice."""


def resend(*, within: timedelta, then: Policy = stop) -> Resend:
    """Send an unknown effect again, with the same ``attempt.key``.

    ``within`` is the time for which the provider promises to remember a key, minus an hour. It counts from the first
    attempt. An attempt begins only if its whole lease ends within this time. After that, the policy ``then`` decides.

    **What may happen twice**: the effect, if the provider forgets the key earlier, or if a process is suspended for
    longer than ``within`` during an attempt.
    """
    return Resend(_milliseconds("within", within), _policy(then))


def ask(function: Callable[..., Any], *, after: timedelta, within: timedelta, then: Policy = stop) -> Ask:
    """Ask the provider whether an unknown effect was done.

    - ``function``: called with ``(request, attempt)``. It returns the value of the effect if the effect was done. It
      raises ``NotDone`` if the effect was not done; the library then sends it again. It raises ``Rejected`` if the
      provider rejected the request, and ``StillUnknown`` if the provider does not know. Any other error counts as
      ``StillUnknown``.
    - ``after``: the shortest time between the end of the last attempt and the question, because the provider's list may
      lag.
    - ``within``: how long to ask, counted from the first attempt. After that, the policy ``then`` decides.

    **What may happen twice**: the effect, if the provider's list lags longer than ``after``, or if a process is
    suspended for longer than ``after`` during an attempt.
    """
    if not callable(function):
        raise HandlerDefinitionError(f"ask() takes a function with the parameters (request, attempt), not {function!r}")
    earliest, latest = _milliseconds("after", after), _milliseconds("within", within)
    if earliest >= latest:
        raise HandlerDefinitionError(
            "ask() would never ask; within must be longer than after, because it counts from the first attempt"
        )
    return Ask(function, earliest, latest, _policy(then))


def _milliseconds(name: str, duration: object) -> int:
    if not isinstance(duration, timedelta) or duration <= timedelta(0):
        raise HandlerDefinitionError(f"{name} must be a timedelta of more than 0, such as timedelta(hours=23)")
    return int(duration / timedelta(milliseconds=1))


def _policy(given: object) -> Policy:
    if not isinstance(given, Resend | Ask | Stop):
        raise HandlerDefinitionError(f"then must be a policy (resend(...), ask(...) or stop), not {given!r}")
    return given
