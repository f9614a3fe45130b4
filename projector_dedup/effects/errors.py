"""The errors that the functions of an effect raise, and those that ``Effects.run`` raises.

::

    NotDone                     raised by the function: nothing was sent; by an ask function: it was not done
    StillUnknown                raised by an ask function: the provider does not know yet
    Rejected                    raised by both: the provider rejected the request (the same class as for commands)

    ProjectorDedupError
    |-- RefusedError
    |   `-- NotArmedError       ``run`` without a request, and no effect is armed under the key
    |-- InProgress              another attempt has the lease; ``retry_after`` is the time until it ends
    |-- EffectUnknown           an attempt ended without an answer; the policy decides, or a person
    |-- NotRecordedError        the effect was done; the value is kept, and ``settle`` records it
    `-- LeaseLostError          the effect was done after the lease had ended; the value is kept as evidence
        `-- DoubleEffectError   another attempt was done too: check the provider
"""

from __future__ import annotations

from typing import Any

from ..errors import ProjectorDedupError, RefusedError


class NotDone(ProjectorDedupError):
    """The effect was not done. ``settle`` may send it again.

    Raise it in the function of an effect only if the function certainly sent nothing. Raise it in an ask function if
    the provider answers that it has not done the effect.
    """


class StillUnknown(ProjectorDedupError):
    """Raise it in an ask function if the provider does not know the answer yet. ``settle`` asks again later."""


class NotArmedError(RefusedError):
    """``run`` was called without a request, and no effect is armed under the key. Arm it, or pass its request."""


class EffectUnknown(ProjectorDedupError):
    """An attempt ended without an answer, so it is unknown whether the effect was done.

    ``settle`` asks the provider or sends the effect again, by the policy of the effect. If the policy has ended, a
    person decides with ``idempotency effects resolve``.
    """


class NotRecordedError(ProjectorDedupError):
    """The effect was done and returned ``value``, but ``recorded`` failed. ``settle`` tries to record it again.

    The row keeps the value, so the effect is not sent again.
    """

    def __init__(self, message: str = "", value: Any = None) -> None:
        super().__init__(message)
        self.value = value


class LeaseLostError(ProjectorDedupError):
    """The attempt was done and returned ``value``, after another process had taken over the effect.

    The row keeps the value as evidence.
    """

    def __init__(self, message: str = "", value: Any = None) -> None:
        super().__init__(message)
        self.value = value


class DoubleEffectError(LeaseLostError):
    """Two attempts were done. At the provider, undo each deed that is not the recorded value."""
