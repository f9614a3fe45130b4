"""The check of an effect: whatever the provider does, each request is done once, rejected, or listed as unknown."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, ClassVar, Protocol

from sqlalchemy import BigInteger, MetaData, select, update
from sqlalchemy.engine import Connection, Engine, Row
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.orm import Session

from ..effects import Ask, AsyncEffects, Effects, EffectUnknown, Rejected, Stop, default_effect_tables
from ..effects.definition import Definition
from ..effects.record import DONE
from .checking import Failure, KeyedCheck, Request, UnusableError
from .fault_points import CALL_KILLS, CAN_KILL, PROVIDER, FaultPoints
from .provider import Behaviour, Call, Provider


class Settled(Protocol):
    """The type of the fixture ``settled``."""

    def __call__(
        self,
        effect: Any,
        requests: Sequence[Any],
        *,
        provider: Provider,
        expected: Callable[[list[Any]], Any],
        read: Callable[[Session], Any],
        metadata: MetaData | None = None,
        reset: Callable[[], None] | None = None,
        seed: int | None = None,
        schedules: int = 30,
        schedule: Sequence[Any] | None = None,
        **options: Any,
    ) -> None:
        """Run ``requests`` by many schedules. Fail the test if the provider and your database disagree in the end.

        ``effect`` is a function with ``@effect``, which sends ``attempt.key`` to ``provider.url``. ``requests`` are
        tuples ``(key, request)`` or ``(key, request, scope)``. ``provider`` is a started ``Provider``: the check starts
        it again before each schedule, with an empty log. ``expected`` computes the value that ``read`` must return from
        the requests that are recorded as done. The other arguments are those of ``exactly_once`` and of ``Effects``.

        The check makes the rows older instead of waiting for leases and policies.

        Raises ``UnusableError`` if the arguments do not fit, for example if a table is not empty.
        """


class EffectCheck(KeyedCheck):
    """The check of one effect. The arguments are those of ``settled``."""

    name: ClassVar[str] = "settled"

    def __init__(self, effect: Any, requests: Sequence[Any], *, provider: Provider, **arguments: Any) -> None:
        if not isinstance(effect, Definition):
            raise UnusableError(f"settled: {effect!r} is no effect; give a function with @effect")
        if not callable(arguments.get("expected")):
            raise UnusableError("settled: some requests are rejected; give expected= a function of the requests done")
        super().__init__(requests, default_effect_tables, **arguments)
        self._provider = provider
        self._rows = self.tables.marker
        self._done: list[int] = []
        self.points: ProviderPoints = ProviderPoints(self.sync_engine, provider)
        self._effect = copy.copy(effect)
        self._effect.function = self.points.around_call(effect.function, asynchronous=effect.asynchronous)

    def all_faults(self) -> Sequence[str]:
        """Return the behaviours of the provider, and the kills around the call."""
        behaviours = (PROVIDER + each for each in Behaviour if each is not Behaviour.NORMAL)
        return (*behaviours, *(CALL_KILLS if CAN_KILL else ()))

    def worker(self) -> Any:
        """Return what runs a request."""
        kind = AsyncRunning if isinstance(self.engine, AsyncEngine) else Running
        return kind(self._effects(), self._effect)

    def _effects(self) -> Any:
        made: Any = AsyncEffects if isinstance(self.engine, AsyncEngine) else Effects
        return made(self.session_factory, [self._effect], **self.options)

    def begin(self) -> None:
        """Start the provider again, with an empty log."""
        super().begin()
        self.points.killed = False
        self._provider.kill()
        self._provider.log.unlink(missing_ok=True)
        self._provider.start()

    async def before_again(self) -> None:
        """Let the time of a lease pass, and of the policy's ``after``; then settle."""
        self._wait_for_late_deeds()
        policy, after = self._effect.unknown, 0
        while not isinstance(policy, Stop):
            after = max(after, policy.after if isinstance(policy, Ask) else 0)
            policy = policy.then
        passed = self._effect.lease.ms + after + 1000
        times = [each for each in self._rows.c if isinstance(each.type, BigInteger)]
        older = update(self._rows).values({each.name: each - passed for each in times})
        await self.on_connection(lambda connection: connection.execute(older))
        settling = self._effects().settle()
        if isinstance(self.engine, AsyncEngine):
            await settling

    def _wait_for_late_deeds(self) -> None:
        late = any(call.behaviour is Behaviour.DO_LATE for call in self._provider.calls())
        time.sleep((self._provider.delay if late else 0) + self._provider.index_lag)

    @property
    def ordered(self) -> bool:
        """True: effects have no order that a user could declare."""
        return True

    def unended(self, number: int, error: Exception | None) -> Failure | None:  # noqa: ARG002  # complaint judges it
        """Return None: what is unknown may stay unknown, for example if the provider repeats its error."""
        return None

    async def complaint(self, delivered: Sequence[int]) -> Failure | None:
        """Compare each row with the log of the provider."""
        self._wait_for_late_deeds()
        rows = [await self.on_connection(partial(self._row, number)) for number in delivered]
        keys = {row.provider_key for row in rows}
        calls = self._provider.calls()
        for call in calls:
            if call.done and not keys & {call.key, call.tag}:
                return Failure("no key", f"The provider got a call without attempt.key: {call.body!r}.")
        for number, row in zip(delivered, rows, strict=True):
            its = [call for call in calls if row.provider_key in (call.key, call.tag)]
            if (text := self._wrong(row, its)) is not None:
                return Failure(text, f"{self.names[number]} {text}.")
        self._done = [number for number, row in zip(delivered, rows, strict=True) if row.outcome == DONE]
        return None

    def _row(self, number: int, connection: Connection) -> Row[Any]:
        is_its = (self._rows.c.message_id == self.stored_key(number)) & (self._rows.c.handler == self._effect.identity)
        return connection.execute(select(self._rows).where(is_its)).one()

    def _wrong(self, row: Row[Any], calls: list[Call]) -> str | None:
        deeds = [call for call in calls if call.done]
        if len(deeds) > 1:
            return f"was done {len(deeds)} times"
        heard = calls and calls[-1].answered == 201 and calls[-1].behaviour is Behaviour.NORMAL
        if row.outcome is None and heard and not self.points.killed:
            return "is unknown at the end, and the provider has answered"
        if row.outcome == DONE and not deeds:
            return "is recorded as done, and the provider has done nothing with attempt.key"
        if row.outcome not in (None, DONE) and deeds:
            return "is recorded as rejected, and the provider has done it"
        return None

    def counted(self, delivered: Sequence[int]) -> list[Any]:  # noqa: ARG002  # those of the last complaint
        """Return the requests that are recorded as done."""
        return super().counted(self._done)


class ProviderPoints(FaultPoints):
    """Fault points that are also behaviours of the provider."""

    def __init__(self, engine: Engine, provider: Provider) -> None:
        super().__init__(engine)
        self._provider = provider
        self.killed = False  #: a process was killed since the provider was started

    def arm(self, fault: str | None, burst: Collection[int] = ()) -> None:
        """Choose the fault of the next calls."""
        super().arm(fault, burst)
        self.killed = self.killed or fault in CALL_KILLS
        if fault is not None and fault.startswith(PROVIDER):
            self._provider.next(Behaviour(fault.removeprefix(PROVIDER)))


class Running:
    """Runs requests. What is rejected has ended, and so has what is unknown if its policy is ``stop``."""

    def __init__(self, effects: Any, effect: Definition[Any, Any]) -> None:
        self._effects, self._effect = effects, effect
        ends = (Rejected, EffectUnknown) if isinstance(effect.unknown, Stop) else (Rejected,)
        self.ends: tuple[type[Exception], ...] = ends

    def _run(self, request: Request) -> Any:
        return self._effects.run(self._effect, request.body, key=request.key, scope=request.scope)

    def deliver(self, request: Request) -> Any:
        """Run one request."""
        try:
            return self._run(request)
        except self.ends:
            return None


class AsyncRunning(Running):
    """``Running`` for an ``async def`` effect."""

    async def deliver(self, request: Request) -> Any:
        """Run one request."""
        try:
            return await self._run(request)
        except self.ends:
            return None
