"""The check of a projector: each message is applied exactly once, whatever happens between broker and database."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Protocol
from uuid import UUID

from sqlalchemy import MetaData
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.orm import Session

from ..building import handlers_of_all
from ..dispatcher import AsyncDispatcher, Dispatcher
from ..message import IdExtractor, Message, attribute_or_key, envelope, id_text
from ..tables import default_tables
from .checking import Check, Failure, UnusableError
from .elsewhere import called_elsewhere
from .schedules import HOWS


class ExactlyOnce(Protocol):
    """The type of the fixture ``exactly_once``."""

    def __call__(
        self,
        projector: Any,
        messages: Sequence[Any],
        *,
        expected: Any,
        read: Callable[[Session], Any],
        metadata: MetaData | None = None,
        ordered: bool | Callable[[Any], Hashable] = False,
        batches: bool = True,
        redelivers: bool = False,
        reset: Callable[[], None] | None = None,
        seed: int | None = None,
        schedules: int = 30,
        schedule: Sequence[Any] | None = None,
        **options: Any,
    ) -> None:
        """Deliver ``messages`` to ``projector`` by many schedules, and fail the test if the read model is ever wrong.

        ``projector`` is a projector, a list of projectors, or a class or function that makes one. ``messages`` are
        events, pairs ``(message_id, event)`` or ``Message`` objects. ``expected`` is the value that ``read`` must
        return after all messages, or a function that computes it from the messages that were delivered. ``read`` gets
        a plain ``Session``, also for async projectors. ``metadata`` has the tables of the read model; without it, the
        tables must exist. All rows of these tables are deleted before each schedule.

        ``ordered=True`` keeps the order of the messages; a function of the event keeps the order of each key that the
        function returns. ``batches=False`` leaves out ``deliver_batch``. An error of a handler after which
        ``verdict_of`` rejects the message is a failure; with ``redelivers=True``, the message is delivered again.
        ``reset`` undoes, before each schedule, what
        handlers have changed outside the database. ``schedules`` is the number of generated schedules, ``seed`` their
        seed. ``schedule`` runs this one alone. The other arguments are those of ``Dispatcher``.

        Raises ``UnusableError`` if the arguments do not fit, for example if a table is not empty.
        """


class ProjectorCheck(Check):
    """The check of one projector, or of several. The arguments are those of ``exactly_once``."""

    name: ClassVar[str] = "exactly_once"

    def __init__(self, projector: Any, messages: Sequence[Any], *, batches: bool = True, **arguments: Any) -> None:
        self._make = maker_of(projector)
        self.hows = HOWS if batches else Check.hows
        super().__init__(messages, default_tables, **arguments)

    def message_of(self, given: Any) -> Any:
        """Return a ``Message`` of a pair, and everything else as it is."""
        if isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], (str, UUID)):
            return Message(*given)
        return given

    def difference(self) -> Failure | None:
        """Compare the ids that are computed from the messages with those that another process computes."""
        extractor = self.options.get("message_id", attribute_or_key)
        computed = [each for each in self.messages if not _contains_id(each, extractor)]
        if not computed:
            return None
        ids = partial(_ids, computed, extractor)
        try:
            there = called_elsewhere(ids)
        except Exception as error:
            raise UnusableError(
                f"exactly_once cannot compute the ids in another process, as a second worker does: {error}; define "
                "the events and message_id= in a module that can be imported, or give pairs (message_id, event)"
            ) from error
        for each, here, other in zip(computed, ids(), there, strict=True):
            if here != other:
                said = f"The id of {self.name_of(each)} is {here!r}, and {other!r} in another process."
                remedy = "It must not come from hash(), the order of a set, a counter, or a value that the test has set"
                return Failure("id", f"{said} {remedy}; for the last, give pairs (message_id, event).")
        return None

    def worker(self) -> Any:
        """Return a dispatcher with projectors of its own."""
        made = AsyncDispatcher if isinstance(self.engine, AsyncEngine) else Dispatcher
        dispatcher = made(self.session_factory, *self._make(), **self.options)
        self.points.watch(dispatcher)
        return dispatcher


def _ids(messages: Sequence[Any], extractor: IdExtractor) -> list[str | None]:
    return [id_text(envelope(each, None, extractor, needed=False)) for each in messages]


def _contains_id(message: Any, extractor: IdExtractor) -> bool:
    if isinstance(message, Message):
        return message.id is not None or _contains_id(message.body, extractor)
    held = message if isinstance(message, Mapping) else getattr(message, "__dict__", ())
    return extractor is attribute_or_key and "message_id" in held


def maker_of(given: Any) -> Callable[[], list[Any]]:
    """Return a function that makes the projectors of a new worker: of a projector, or of what makes one."""
    several = list(given) if isinstance(given, (list, tuple)) else [given]

    def made(each: Any) -> Any:
        if isinstance(each, (type, types.FunctionType, partial)):
            return each()
        try:
            return copy.deepcopy(each)
        except Exception as error:
            raise UnusableError(
                f"exactly_once makes a new projector for each worker, and cannot copy this one ({error}); give a "
                "function without arguments that makes it, or its class"
            ) from error

    return lambda: [made(each) for each in several]


def is_async(projector: Any) -> bool:
    """True if the handlers are ``async def``."""
    return any(handler.is_async for handler in handlers_of_all(maker_of(projector)()))
