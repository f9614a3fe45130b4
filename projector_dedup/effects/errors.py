"""The errors that the functions of an effect raise, and those that ``Effects.run`` raises.

::

    NotDone                     raised by a body: surely nothing was sent; by an ask function: it was not done
    StillUnknown                raised by an ask function: the provider does not know yet
    Rejected                    raised by both: the provider said no (the same class as for commands)

    ProjectorDedupError
    |-- RefusedError
    |   `-- NotArmedError       ``run`` without an request, and nothing is armed under the key
    |-- InProgress              an attempt has the lease now; ``retry_after`` says when it ends
    |-- EffectUnknown           an attempt ended without an answer; the policy decides, or a person
    |-- NotRecordedError        done outside; the value is kept, and ``settle`` records it
    `-- LeaseLostError          done outside, but after the lease was lost; the value is kept beside the row
        `-- DoubleEffectError   and another attempt was done too: look at the provider
"""

from __future__ import annotations

from typing import Any

from ..errors import ProjectorDedupError, RefusedError


class NotDone(ProjectorDedupError):
    """Nothing was sent, or nothing came of it. ``settle`` may send the effect again.

    A body raises it only if it surely sent nothing. An ask function raises it if the provider says that it has nothing.
    """


class StillUnknown(ProjectorDedupError):
    """An ask function raises it: the provider could not say. ``settle`` asks again later."""


class NotArmedError(RefusedError):
    """``run`` was called with a key alone, and nothing is armed under this key. Arm the effect, or give its request."""


class EffectUnknown(ProjectorDedupError):
    """An attempt was made, and nobody knows whether it was done.

    ``settle`` finds out, or sends again, as the effect's policy says. If the policy has ended, a person decides.
    """


class NotRecordedError(ProjectorDedupError):
    """The effect was done, and returned ``value``, but ``recorded`` failed. ``settle`` tries to record it again.

    The value is kept in the row, so that the effect is not sent again.
    """

    def __init__(self, message: str = "", value: Any = None) -> None:
        super().__init__(message)
        self.value = value


class LeaseLostError(ProjectorDedupError):
    """The attempt was done, and returned ``value``, after another process had taken the effect over.

    The value is kept beside the row as evidence.
    """

    def __init__(self, message: str = "", value: Any = None) -> None:
        super().__init__(message)
        self.value = value


class DoubleEffectError(LeaseLostError):
    """Two attempts were done. Look at the provider, and undo one of them."""
