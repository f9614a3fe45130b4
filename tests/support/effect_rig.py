"""A till that charges: one effect and the payments it records, on any driver, by sync or async alike."""

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from sqlalchemy import MetaData, String, select, update
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from sqlalchemy.util import greenlet_spawn

from databases import DRIVERS, USUAL_DRIVERS
from kit import Gate, Harness
from projector_dedup.effects import (
    AsyncEffects,
    Attempt,
    Effects,
    EffectUnknown,
    NotDone,
    Policy,
    Rejected,
    aarm,
    arm,
    ask,
    default_effect_tables,
    effect,
    stop,
)
from projector_dedup.effects.record import new_token
from reach import reach

TABLE = default_effect_tables.marker
SAID: dict[str, Any] = {"why": "the provider shows it", "who": "ada"}
"""What a person says with a decision."""
TIMES = ("armed_at", "lease_until", "first_sent_at", "ended_at", "next_at", "stopped_at")


class Base(DeclarativeBase):
    """The base of the till's entities."""

    metadata = MetaData()


class Payment(Base):
    """A payment that was recorded; its number follows from nothing, so that recording twice makes two."""

    __tablename__ = "till_payment"
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    order: Mapped[str] = mapped_column("order_id", String(80))
    what: Mapped[str] = mapped_column(String(80))


@dataclass(frozen=True)
class Charge:
    """A request."""

    order: str = "o1"
    amount: int = 30


class Lost(Exception):  # noqa: N818
    """The reply of the provider was lost."""


def function_of(body: Callable[..., Any], returns: Any = str, *, asynchronous: bool) -> Any:
    """Return a function of ``body`` for an effect: as it is, or an ``async def`` that runs it on sync sessions."""

    def direct(request: Any, *others: Any) -> Any:
        return body(request, *others)

    async def awaited(request: Any, *others: Any) -> Any:
        return await greenlet_spawn(body, request, *(getattr(each, "sync_session", each) for each in others))

    chosen: Any = awaited if asynchronous else direct
    chosen.__annotations__ = {"request": Charge, "return": returns}
    return chosen


@dataclass
class Till:
    """One effect on one subject.

    ``sent`` has the provider key of each call that did the deed, and ``asked`` that of each question about it.
    """

    harness: Harness
    sent: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def create_tables(self) -> None:
        """Create the till's table and those of effects."""
        for metadata in (Base.metadata, TABLE.metadata):
            self.harness.transact(partial(_create, metadata))

    def plain(self, _request: Charge, attempt: Attempt) -> str:
        """Do the deed, and return its number at the provider."""
        self.sent.append(attempt.key)
        return f"pi_{len(self.sent)}"

    def body(self, *ends: Any, gate: Gate | None = None) -> Callable[..., Any]:
        """Return a function for an effect. Each call ends as the next of ``ends``, which it raises or returns.

        Each call does the deed, unless it ends with ``NotDone``. A call after the last end returns the deed's number.
        The first attempt does the deed, and then waits at the gate.
        """
        left = [*ends]

        def function(request: Charge, attempt: Attempt) -> Any:
            end = left.pop(0) if left else None
            value = None if isinstance(end, NotDone) else self.plain(request, attempt)
            if gate is not None and attempt.number == 1:
                gate.stop()
            if isinstance(end, BaseException):
                raise end
            return value if end is None else end

        return function

    def asks(self, end: Any, after: float = 5, within: float = 3600, gate: Gate | None = None) -> Any:
        """Return the policy that asks the provider. Each question ends as ``end``, which it raises or returns."""

        def look(_request: Charge, attempt: Attempt) -> Any:
            self.asked.append(attempt.key)
            if gate is not None:
                gate.stop()
            if isinstance(end, Exception):
                raise end
            return end

        return ask(self.function(look), after=timedelta(seconds=after), within=timedelta(seconds=within))

    def loses_reply(self, request: Charge, attempt: Attempt) -> str:
        """Do the deed; the reply is lost the first time."""
        value = self.plain(request, attempt)
        if len(self.sent) == 1:
            raise Lost
        return value

    def function(self, body: Callable[..., Any], returns: Any = str) -> Any:
        """Return a function of ``body``, as it is, or as an ``async def``."""
        return function_of(body, returns, asynchronous=self.harness.asynchronous)

    def effect(
        self,
        body: Callable[..., Any] | None = None,
        unknown: Policy = stop,
        lease: float = 30,
        recorded: Callable[..., Any] | None = None,
        refused: Callable[..., Any] | None = None,
        name: str = "till.charge",
    ) -> Any:
        """Return an effect of ``body`` that records payments."""
        made = effect(name=name, lease=lease, unknown=unknown)(self.function(body or self.plain))
        made.recorded(self.function(recorded or book))
        made.refused(self.function(refused or refuse))
        return made

    def effects(self, *effects: Any, **options: Any) -> Any:
        """Return ``Effects`` or ``AsyncEffects``."""
        kind: Any = AsyncEffects if self.harness.asynchronous else Effects
        return kind(self.harness.factory, effects, **options)

    def run(self, made: Any, request: Charge | None = Charge(), key: Any = "k1", **said: Any) -> Any:
        """Call ``run``, and await it if it is asynchronous."""
        return self.harness.run(self.effects(made).run, made, request, key=key, **said)

    def run_unknown(self, made: Any) -> None:
        """Call ``run``, which does not learn whether the effect was done."""
        with pytest.raises(EffectUnknown):
            self.run(made)

    def stopped(self) -> Any:
        """Return an effect whose reply was lost, and whose policy has ended: it needs a person."""
        made = self.effect(self.loses_reply)
        self.run_unknown(made)
        self.pass_time(31)
        assert self.settle(made) == "1 stopped"
        return made

    def overdue(self, made: Any, gate: Gate, *said: Any) -> Future[Any]:
        """Start an attempt, which stops at the gate, and let its lease end."""
        attempt = self.harness.start(self.run, made, *said)
        gate.arrival()
        self.pass_time(40)
        return attempt

    def settle(self, *effects: Any, **said: Any) -> str:
        """Call ``settle``, and return what it counted, without zeros."""
        counted = str(self.harness.run(self.effects(*effects).settle, **said))
        return ", ".join(part for part in counted.split(", ") if not part.startswith("0 "))

    def arm(self, made: Any, request: Charge = Charge(), key: Any = "k1", **said: Any) -> None:
        """Arm the effect in a transaction of its own."""
        self.harness.transact(lambda session: arm(session, made, request, key=key, **said))

    def row(self, key: str = "k1") -> Any:
        """Return the row of the effect as another connection sees it; None if there is none."""
        wanted = select(TABLE).where(TABLE.c.message_id == f"0:{key}")
        return self.harness.transact(lambda session: session.execute(wanted).one_or_none())

    def pass_time(self, seconds: float) -> None:
        """Make every row that much older."""
        shifted = {name: TABLE.c[name] - int(seconds * 1000) for name in TIMES}
        self.harness.transact(lambda session: session.execute(update(TABLE).values(shifted)))

    def change(self, key: str = "k1", **values: Any) -> None:
        """Write into a row, as a person's tool does: under a new token."""
        changed = update(TABLE).where(TABLE.c.message_id == f"0:{key}").values(token=new_token(), **values)
        self.harness.transact(lambda session: session.execute(changed))

    def change_times(self, key: str = "k1", **times: int) -> None:
        """Write times into a row, under the same token."""
        changed = update(TABLE).where(TABLE.c.message_id == f"0:{key}").values(times)
        self.harness.transact(lambda session: session.execute(changed))

    def payments(self) -> list[tuple[str, str]]:
        """Return what was recorded, as another connection sees it."""
        rows = select(Payment.order, Payment.what).order_by(Payment.number)
        found = self.harness.transact(lambda session: session.execute(rows).all())
        return [(order, what) for order, what in found]


def book(request: Charge, value: str, session: Session) -> None:
    """Record a payment."""
    session.add(Payment(order=request.order, what=value))


def refuse(request: Charge, why: Rejected, session: Session) -> None:
    """Record a refusal."""
    session.add(Payment(order=request.order, what=f"refused: {why.code}"))


def _create(metadata: MetaData, session: Session) -> None:
    metadata.create_all(session.connection())


@contextlib.contextmanager
def till_on(request: pytest.FixtureRequest, driver: Any, **subject: Any) -> Iterator[Till]:
    """Return a till with its tables on an empty database of the driver's."""
    with Harness(reach(request, driver, **subject)) as harness:
        till = Till(harness)
        till.create_tables()
        yield till


def tills(drivers: Any = USUAL_DRIVERS) -> Any:
    """Return a fixture: a till on each of the drivers in turn."""

    @pytest.fixture(params=drivers, ids=str, name="till")
    def till(request: pytest.FixtureRequest) -> Iterator[Till]:
        with till_on(request, request.param) as till:
            yield till

    return till


__all__ = ["DRIVERS", "aarm"]
