"""The answer of a command, and the errors of commands with what to do after each.

::

    ProjectorDedupError
    |-- RefusedError
    |   |-- InvalidKeyError           no key; a key or scope that is empty, too long, or not text (also a ValueError)
    |   |   `-- UnusableKeyError      the caller's values cannot be stored or compared, such as a too long key
    |   |-- KeyReusedError            the key was used for another command before
    |   |-- ResultError               the handler's result cannot be recorded; nothing was applied
    |   `-- ResultUnreadableError     the command was handled, but its recorded result cannot be read
    |-- DuplicateCommandError         ``raise_on_duplicate=True``: the command was handled before
    `-- Rejected                      the recorded answer is a rejection

``Commands.handle`` also raises the errors of ``Dispatcher.deliver``. Acknowledge a message if ``handle`` returns, or
raises ``DuplicateCommandError``: in both cases an outcome is recorded. A projector's handler that calls ``handle`` must
catch ``DuplicateCommandError`` itself, because the error would roll back the handler's own writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic, TypeVar, cast

from ..errors import ProjectorDedupError, RefusedError
from ..outcome import Outcome

R = TypeVar("R")


class InvalidKeyError(RefusedError, ValueError):
    """The key of a command is missing, or the key or the scope is empty, too long or not text. Correct the program."""


class UnusableKeyError(InvalidKeyError):
    """The values that the caller sent cannot be recorded or compared. Call again with other values.

    Key and scope are too long together, or the command contains NaN, a number of thousands of digits or too many
    levels. Every other ``InvalidKeyError`` is a bug of the program.
    """


class KeyReusedError(RefusedError):
    """The key was used before, for the same operation with another command. Give each command its own key."""

    read_from_the_table = True
    """The claim has read the reason, so an earlier COMMIT of this call is not in doubt: it wrote nothing."""


class ResultError(RefusedError):
    """The handler's result cannot be recorded. Everything was rolled back. Correct the handler or its codec."""


class ResultUnreadableError(RefusedError):
    """The command was handled, but the codecs of this code cannot read its recorded result.

    ``raw`` is the stored result in bytes. Name the codec that wrote it in ``older_codecs``.
    """

    def __init__(self, message: str, raw: bytes | None = None) -> None:
        super().__init__(message)
        self.raw = raw


class DuplicateCommandError(ProjectorDedupError):
    """The command was handled before. ``original`` is the recorded answer that ``handle`` would have returned.

    If ``done`` is True, acknowledge the message. ``done`` is False if a projector's handler raised the error, because
    the writes of that handler were then rolled back.
    """

    def __init__(self, message: str, original: Handled[Any]) -> None:
        super().__init__(message)
        self.original = original
        self.done = True

    def __reduce__(self) -> tuple[Any, ...]:  # an exception is made again from its args, which lack the original
        return type(self), (*self.args, self.original), vars(self)


class Rejected(ProjectorDedupError):
    """The command was rejected for a business reason, and the rejection is its recorded answer.

    Raise it in a handler: the library rolls back the handler's writes and records the rejection. ``Handled.result``
    raises it again for every caller. ``replayed`` is True for all callers but the first. ``detail`` is any JSON value.
    """

    def __init__(self, code: str, detail: Any = None, *, replayed: bool = False) -> None:
        super().__init__(code if detail is None else f"{code}: {detail}")
        self.code = code
        self.detail = detail
        self.replayed = replayed


# The answer of a command ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rejection:
    """Return it from a handler instead of a result. The library records it together with the handler's writes.

    ``detail`` is any JSON value. To roll back the handler's writes, raise ``Rejected`` instead.
    """

    code: str
    detail: Any = None


@dataclass(frozen=True)
class Handled(Generic[R]):
    """The result of ``Commands.handle``. If ``handle`` returns it, the outcome of the command is recorded.

    - ``outcome``: ``APPLIED`` for the caller whose command ran, ``DUPLICATE`` for every caller who called again.
    - ``value``: what the handler returned, or None after a rejection.
    - ``rejection``: the ``Rejection``, or None if the command has a result.
    - ``recorded_at``: when the transaction of the record began, by the database's clock. None for the first caller.
    - ``durable``: False only inside ``testing.external_transaction``.
    """

    outcome: Outcome
    value: R | None
    rejection: Rejection | None = None
    recorded_at: datetime | None = None
    durable: bool = True

    @property
    def replayed(self) -> bool:
        """True if the command was handled before, and this is the recorded answer."""
        return self.outcome is Outcome.DUPLICATE

    @property
    def result(self) -> R:
        """The recorded result. Raises ``Rejected`` if the recorded answer is a rejection."""
        if self.rejection is not None:
            raise Rejected(self.rejection.code, self.rejection.detail, replayed=self.replayed)
        return cast(R, self.value)
