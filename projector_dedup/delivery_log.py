"""The log lines of a delivery: its outcome, or that it is tried again. Nothing of a message but its id is logged."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from .handler import Handler
from .message import Message, id_text, printable
from .outcome import Outcome
from .retry import Attempts

logger = logging.getLogger("projector_dedup")


def log_outcomes(
    handler: Handler, messages: Sequence[Message], outcomes: Sequence[Outcome], attempts: Attempts
) -> None:
    """Log the outcome of each message: at INFO if it is a duplicate, else at DEBUG."""
    for message, outcome in zip(messages, outcomes, strict=True):
        duplicate = outcome is Outcome.DUPLICATE
        level = logging.INFO if duplicate else logging.DEBUG
        if not logger.isEnabledFor(level):  # what follows escapes texts, for every message
            continue
        after_unknown = duplicate and attempts.unknown is not None
        logger.log(
            level,
            "%s%s: message %s, handler %s",
            outcome.value,
            " (after_unknown_commit)" if after_unknown else "",
            _log_id(message),
            printable(handler.identity),
            extra=_extra(handler, message, outcome.value, attempts) | {"after_unknown_commit": after_unknown},
        )


def log_retry(handler: Handler, messages: Sequence[Message], error: Exception, attempts: Attempts) -> None:
    """Log at INFO that messages are tried again, and after which error."""
    others = f" and {len(messages) - 1} more" if len(messages) > 1 else ""
    logger.info(
        "retry after %s: message %s%s, handler %s",
        type(error).__name__,
        _log_id(messages[0]),
        others,
        printable(handler.identity),
        extra=_extra(handler, messages[0], "retry", attempts),
    )


def _extra(handler: Handler, message: Message, outcome: str, attempts: Attempts) -> dict[str, Any]:
    return {
        "message_id": _log_id(message),
        "handler": printable(handler.identity),
        "outcome": outcome,
        "attempts": attempts.number,
    }


def _log_id(message: Message) -> str:
    return printable(str(id_text(message)))[:600]
