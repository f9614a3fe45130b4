"""``building`` registers a new generation of a projector beside the old one, so that you can rebuild a read model.

The old and the new generation are ordinary projectors. Each has its own name, markers and tables, so each applies a
message once. A query over their markers finds the messages that the new one lacks (``rebuild.rebuild``).
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

from .errors import HandlerDefinitionError
from .handler import DeadLetter, Handler, handlers_of
from .message import Message, logged_id, logger_of, printable

logger = logger_of("projector_dedup")


@dataclass(frozen=True)
class Building:
    """The new generation of a projector, as ``building`` returns it. Pass it to a dispatcher."""

    projector: object
    beside: str
    dead: DeadLetter | None = None


def building(projector: object, *, beside: str, dead: DeadLetter | None = None) -> Building:
    """Register ``projector`` as the new generation of the projector named ``beside``, to rebuild a read model.

    ::

        Dispatcher(factory, AccountTotals(), building(AccountTotals2(), beside="account-totals"))

    The dispatcher delivers each message to both generations. **If the old generation handles a message, a failure of
    the new one does not fail the delivery.** The library logs the failure with the message's id, reports it to the
    observer, and calls ``dead`` with the message and the error. The delivery waits until ``dead`` returns. If the old
    generation does not handle a message, a failure of the new one fails the delivery as usual.

    The new generation cannot arm effects, because the old generation arms them.

    The dispatcher raises ``HandlerDefinitionError`` unless both generations are idempotent, ``beside`` is the name of
    another of its projectors, and no entity is in the ``read_models`` of both.
    """
    if not isinstance(beside, str):
        raise HandlerDefinitionError(
            f'beside must be the name of a projector, as in beside="account-totals", not {beside!r}'
        )
    letters: Any = dead  # a caller without a type checker may pass anything
    if letters is not None and (not callable(letters) or inspect.iscoroutinefunction(letters)):
        raise HandlerDefinitionError("dead must be a plain function (no async def) that takes a message and an error")
    return Building(projector, beside, dead)


def handlers_of_all(projectors: Iterable[object]) -> list[Handler]:
    """Return the handlers of all projectors, in their order. Raises ``HandlerDefinitionError``."""
    found: list[Handler] = []
    for target in projectors:
        if isinstance(target, Building):
            handlers = handlers_of(target.projector)
            found += [replace(handler, beside=target.beside, dead=target.dead) for handler in handlers]
        else:
            found += handlers_of(target)
    for handler in found:
        if handler.beside is not None:
            _refuse_wrong_pair(handler, [each for each in found if each.owner == handler.beside])
    return found


def _refuse_wrong_pair(new: Handler, old: Collection[Handler]) -> None:
    """Raise ``HandlerDefinitionError`` if the projector of ``new`` cannot be built beside that of the ``old`` ones."""
    if not old or any(each.beside is not None for each in old):
        raise HandlerDefinitionError(
            f"building(..., beside={new.beside!r}): the dispatcher has no old generation with this name; pass the name "
            "that the old one has in @projector(name=...), and register the old one too"
        )
    if not all(handler.idempotent for handler in (new, *old)):
        raise HandlerDefinitionError(
            f"{new.owner} is built beside {new.beside}, and one of them has no markers, so the library could not find "
            "the messages that the new one lacks; write @projector(idempotent=True) above both"
        )
    shared = {model.__name__ for each in old for model in {*each.projector.read_models} & {*new.projector.read_models}}
    if shared:
        raise HandlerDefinitionError(
            f"{new.owner} and {new.beside} both have {min(shared)} in their read_models, so each message would change "
            "it twice; give the new one its own table"
        )


def may_fail(handler: Handler, handlers: Iterable[Handler]) -> bool:
    """True if a failure of ``handler`` must not fail the delivery of a message that all these ``handlers`` take."""
    return handler.beside is not None and any(each.owner == handler.beside for each in handlers)


def report_failure(handler: Handler, message: Message, error: Exception) -> None:
    """Log that a handler of the new generation has failed on the message, and call ``dead``."""
    logger.warning(
        "building: %s failed on message %s (%s: %s); the delivery continues, and %s",
        handler.identity,
        logged_id(message),
        type(error).__name__,
        printable(str(error))[:300],
        "the marker is COMMITTED, so correct the read model: `idempotency rebuild` does not find this message"
        if getattr(error, "durable", False)
        else "`idempotency rebuild --verify` finds the message until it is applied",
    )
    if handler.dead is None:
        return
    try:
        handler.dead(message, error)
    except Exception as failure:  # noqa: BLE001  # the old generation has settled the message
        logger.error(
            "building: the function dead= of %s failed on message %s: %s",
            handler.owner,
            logged_id(message),
            type(failure).__name__,
        )
