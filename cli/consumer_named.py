"""Find the consumer that a command names as MODULE:ATTRIBUTE."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from projector_dedup.brokers.running import Runs
from projector_dedup.http.webhook import Webhook

from .check import imported, importing
from .output import Failed

_EXAMPLE = "payments:consumer"


class Misnamed(Failed):
    """The command line names no consumer."""

    exit_code = 2


async def consumer_named(place: str, instead: Mapping[str, str], *kinds: type[Any]) -> Any:
    """Import ``place`` and return its consumer, or the one that its function returns. Awaits an ``async def``.

    Returns an object of one of the ``kinds``, by default a consumer only. A webhook's endpoint leads to its `Webhook`.

    Adds the current folder to ``sys.path``. ``instead`` says what to use for an object of another library, by the name
    of its top-level package. Raises `Misnamed` if the import fails, or for any other object.
    """
    try:
        found = imported(place, "CONSUMER", _EXAMPLE)
        if inspect.isroutine(found) and not hasattr(found, "webhook"):
            with importing(place, "CONSUMER", _EXAMPLE):
                found = found()
                found = await found if inspect.isawaitable(found) else found
        found = getattr(found, "webhook", found)
        _check(found, place, instead, kinds or (Runs,))
    except Failed as error:
        raise Misnamed(error.message) from error
    return found


def _check(found: object, place: str, instead: Mapping[str, str], kinds: tuple[type[Any], ...]) -> None:
    kind = type(found)
    for package in (each.__module__.partition(".")[0] for each in kind.__mro__):
        if package in instead:
            raise Failed(f"{place} is an object of {package}: {instead[package]}")
    if not isinstance(found, kinds):
        webhook = ", a webhook" if Webhook in kinds else ""
        raise Failed(
            f"{place} is of type {kind.__name__}; name a consumer of projector_dedup.brokers{webhook}, or a function "
            f"without arguments that returns one, as in {_EXAMPLE}"
        )
