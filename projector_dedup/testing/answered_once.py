"""The check of a command: each key is done once, and everyone who asks again gets the recorded answer."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar, Protocol

from sqlalchemy import MetaData
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.orm import Session

from ..commands import AsyncCommands, Commands, Handled, Rejection
from ..commands.operation import Operation
from ..commands.record import RecordKey, default_command_tables
from .checking import Failure, KeyedCheck, Request, UnusableError


class AnsweredOnce(Protocol):
    """The type of the fixture ``answered_once``."""

    def __call__(
        self,
        operation: Any,
        requests: Sequence[Any],
        *,
        expected: Any,
        read: Callable[[Session], Any],
        metadata: MetaData | None = None,
        ordered: bool | Callable[[Any], Hashable] = False,
        reset: Callable[[], None] | None = None,
        seed: int | None = None,
        schedules: int = 30,
        schedule: Sequence[Any] | None = None,
        **options: Any,
    ) -> None:
        """Handle ``requests`` by many schedules. Fail the test if one is done twice, or answered in two ways.

        ``operation`` is a function with ``@command``. ``requests`` are tuples ``(key, command)`` or
        ``(key, command, scope)``. ``expected`` is the value that ``read`` must return after all requests, or a function
        that computes it from the requests that were handled; it gets one request for each key. The other arguments are
        those of ``exactly_once`` and of ``Commands``.

        Raises ``UnusableError`` if the arguments do not fit, for example if a table is not empty.
        """


class CommandCheck(KeyedCheck):
    """The check of one command. The arguments are those of ``answered_once``."""

    name: ClassVar[str] = "answered_once"

    def __init__(self, operation: Any, requests: Sequence[Any], **arguments: Any) -> None:
        if not isinstance(operation, Operation):
            raise UnusableError(f"answered_once: {operation!r} is no command; give a function with @command")
        self._operation = operation
        self._answers: defaultdict[Any, list[Any]] = defaultdict(list)
        super().__init__(requests, default_command_tables, **arguments)

    def worker(self) -> Any:
        """Return commands that note their answers."""
        asynchronous = isinstance(self.engine, AsyncEngine)
        made: Any = (AsyncCommands if asynchronous else Commands)(self.session_factory, **self.options)
        operation = copy.copy(self._operation)
        operation.function = self.points.around(operation.function, asynchronous=operation.asynchronous)

        def asked(request: Request) -> Any:
            return made.handle(operation, request.body, key=request.key, scope=request.scope)

        return (AsyncAsking if asynchronous else Asking)(asked, self._answers)

    def begin(self) -> None:
        """Forget the answers of the last schedule."""
        super().begin()
        self._answers.clear()

    async def complaint(self, delivered: Sequence[int]) -> Failure | None:
        """Ask once more with each key, by a new worker, and compare all answers."""
        worker = self.worker()
        for number in delivered:
            request = self.messages[number]
            asked = worker.deliver(request)
            handled: Handled[Any] = await asked if isinstance(self.engine, AsyncEngine) else asked
            if not handled.replayed:
                return Failure("not recorded", f"The answer to {request.key} was not recorded: it was done again.")
            if self._operation.settings.default is None:
                answers = self._answers[self.stored_key(number)]
                other = next((each for each in answers if not self._are_equal(each, answers[0])), None)
                if other is not None:
                    text = f"{request.key} was answered in two ways:\n  first {answers[0]!r}\n  then  {other!r}"
                    return Failure("two answers", text)
        return None

    def _are_equal(self, one: Any, other: Any) -> bool:
        """True for equal answers, and for those that the library stores alike: values may have no equality."""
        if one == other or isinstance(one, Rejection) or isinstance(other, Rejection):
            return bool(one == other)
        dumps = self._operation.codec.dumps
        return dumps(one) == dumps(other)


class Asking:
    """Handles requests, and notes each answer."""

    def __init__(self, asked: Callable[[Request], Any], answers: dict[Any, list[Any]]) -> None:
        self._asked, self._answers = asked, answers

    def deliver(self, request: Request) -> Handled[Any]:
        """Handle one request."""
        return self._noted(request, self._asked(request))

    def _noted(self, request: Request, handled: Handled[Any]) -> Handled[Any]:
        key = RecordKey.of(request.key, request.scope).stored
        self._answers[key].append(handled.rejection or handled.value)
        return handled


class AsyncAsking(Asking):
    """``Asking`` for an ``async def`` command."""

    async def deliver(self, request: Request) -> Handled[Any]:  # type: ignore[override]  # awaited, as the check does
        """Handle one request."""
        return self._noted(request, await self._asked(request))
