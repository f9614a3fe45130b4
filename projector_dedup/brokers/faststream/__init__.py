"""FastStream: for each broker, subscribers whose messages go to a dispatcher, and are acknowledged after the commit.

Needs the extra ``faststream``, and FastStream's own for the broker. Messages come to the dispatcher as they came to
FastStream, which parses and decodes nothing that could fail before.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from ...extras import needs
from ..settling import Settled

with needs("faststream"):  # the submodules name what they lack of a broker's client themselves
    from faststream import AckPolicy

__all__ = ["AS_IT_CAME", "is_of_a_test", "raise_errors"]

Original = Callable[[Any], Awaitable[Any]]


async def _parse(message: Any, original: Original) -> Any:
    """Parse as the broker's own parser does, even if the application has given its broker another one."""
    return await original(message)


async def _decode(message: Any) -> Any:
    """Return the message itself: what its body says is for ``convert``, where an error has a verdict."""
    return message


AS_IT_CAME: dict[str, Any] = {
    "parser": _parse,
    "decoder": _decode,
    "ack_policy": AckPolicy.MANUAL,  # FastStream acknowledges nothing: that is done behind the commit
    "no_reply": True,
}
"""Arguments of ``broker.subscriber`` for a handler that takes FastStream's message and settles it."""


def is_of_a_test(message: object) -> bool:
    """True if one of FastStream's test brokers made this message: there is no queue in which it could wait or be kept.

    The message of a real broker is an object of the broker's client.
    """
    return type(message).__module__.partition(".")[0] == "faststream"


def raise_errors(settled: Sequence[Settled]) -> None:
    """Raise the error of the first message that was not applied, so that a test fails with it."""
    for each in settled:
        if each.verdict is not None:
            raise each.verdict.error
