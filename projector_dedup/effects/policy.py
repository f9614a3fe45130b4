"""Policies: what may be done with an effect of which nobody knows whether it was done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from ..errors import HandlerDefinitionError


@dataclass(frozen=True)
class Stop:
    """A person decides (``idempotency effects resolve``)."""


@dataclass(frozen=True)
class Resend:
    """Send it again with the same provider key, as long as the provider remembers that key. See ``resend``."""

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
"""Do nothing: the effect is listed until a person decides. Nothing can happen twice."""


def resend(*, within: timedelta, then: Policy = stop) -> Resend:
    """Send an unknown effect again, with the same ``attempt.key``.

    ``within`` is how long the provider remembers a key, counted from the first sending; choose it an hour shorter than
    what the provider promises. An attempt is begun only if its whole lease fits. Afterwards ``then`` decides.

    **What may happen twice**: the effect, if the provider forgets the key earlier, or if a process was suspended for
    longer than that in the middle of an attempt.
    """
    return Resend(_milliseconds("within", within), _policy(then))


def ask(function: Callable[..., Any], *, after: timedelta, within: timedelta, then: Policy = stop) -> Ask:
    """Ask the provider whether an unknown effect was done.

    ``function(request, attempt)`` returns the value of the effect if it was done. It raises ``NotDone`` if not, and the
    effect is sent again. It raises ``Rejected`` if the provider has refused, and ``StillUnknown``, or anything else, if
    it cannot tell. It is called only when ``after`` has passed since the last attempt ended, because the provider's
    list may lag. From ``within`` after the first sending on, ``then`` decides.

    **What may happen twice**: the effect, if the provider's list lags longer than ``after``, or if a process was
    suspended for longer than that in the middle of an attempt.
    """
    if not callable(function):
        raise HandlerDefinitionError(f"ask() takes a function of (request, attempt), not {function!r}")
    earliest, latest = _milliseconds("after", after), _milliseconds("within", within)
    if earliest >= latest:
        raise HandlerDefinitionError(
            "ask() would never ask: within is counted from the first sending, and exceeds after"
        )
    return Ask(function, earliest, latest, _policy(then))


def _milliseconds(name: str, duration: object) -> int:
    if not isinstance(duration, timedelta) or duration <= timedelta(0):
        raise HandlerDefinitionError(f"{name} is a timedelta of more than 0, such as timedelta(hours=23)")
    return int(duration / timedelta(milliseconds=1))


def _policy(given: object) -> Policy:
    if not isinstance(given, Resend | Ask | Stop):
        raise HandlerDefinitionError(f"then is a policy: resend(...), ask(...) or stop, not {given!r}")
    return given
