"""The errors of commands, and what to do about each.

::

    ProjectorDedupError
    |-- RefusedError
    |   |-- InvalidKeyError           no key; a key or scope that is empty, too long, or not text (also a ValueError)
    |   |   `-- UnusableKeyError      what the caller sent: key and scope are too long, or a value equals nothing
    |   |-- KeyReusedError            the key was given to another command before
    |   |-- ResultError               what the handler returned cannot be recorded; nothing was applied
    |   `-- ResultUnreadableError     a record is there, but its result cannot be read
    |-- DuplicateCommandError         ``raise_on_duplicate=True``: the command was handled before
    `-- Rejected                      the recorded answer is a rejection

Beside these, ``Commands.handle`` raises what ``Dispatcher.deliver`` raises. A message may be acknowledged if ``handle``
returned, or if ``handle`` raised ``DuplicateCommandError``: both say that an outcome is recorded. A projector's handler
that asks for a command catches that error itself: else its own writes are rolled back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import ProjectorDedupError, RefusedError

if TYPE_CHECKING:
    from .operation import Handled


class InvalidKeyError(RefusedError, ValueError):
    """The key of a command is missing; or the key or the scope is empty, too long, or no text."""


class UnusableKeyError(InvalidKeyError):
    """The values that the caller sent cannot be recorded or compared, and the program is innocent.

    Key and scope are too long together, or the command has a value such as NaN, a number of thousands of digits, or
    too many levels. Ask with other values. Every other ``InvalidKeyError`` is a fault of the program.
    """


class KeyReusedError(RefusedError):
    """The key was used before, for the same operation with another command. Give every command a key of its own."""


class ResultError(RefusedError):
    """The handler's result cannot be recorded as it is. Everything was rolled back, and nothing is recorded."""


class ResultUnreadableError(RefusedError):
    """The command was handled, and its recorded result cannot be read by the codec of this code.

    ``raw`` has the bytes as they are stored. Name the codec that wrote them in ``older_codecs``.
    """

    def __init__(self, message: str, raw: bytes | None = None) -> None:
        super().__init__(message)
        self.raw = raw


class DuplicateCommandError(ProjectorDedupError):
    """The command was handled before; ``original`` is what ``handle`` would have returned.

    ``done`` is True if the message may be acknowledged. It is False once a projector's handler has let the error out:
    the writes of that handler were rolled back.
    """

    def __init__(self, message: str, original: Handled[Any]) -> None:
        super().__init__(message)
        self.original = original
        self.done = True

    def __reduce__(self) -> tuple[Any, ...]:  # an exception is made again from its args, which lack the original
        return type(self), (*self.args, self.original), vars(self)


class Rejected(ProjectorDedupError):
    """The command was refused for a reason of the business, and that is its recorded answer.

    A handler raises it: its writes are rolled back, and the rejection is recorded. ``Handled.result`` raises it again,
    for the first caller and for every later one, who has ``replayed``. ``detail`` is what JSON can say.
    """

    def __init__(self, code: str, detail: Any = None, *, replayed: bool = False) -> None:
        super().__init__(code if detail is None else f"{code}: {detail}")
        self.code = code
        self.detail = detail
        self.replayed = replayed
