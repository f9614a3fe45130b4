"""The public API as type checkers see it: checked by `tests/core/test_types.py`, never imported."""

# ruff: noqa: D102  # the names of the handlers say what they are

from collections.abc import Collection, Sequence
from typing import Any, assert_type

from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session, sessionmaker

from projector_dedup import AsyncDispatcher, Dispatcher, Message, Outcome, on, projector
from projector_dedup.errors import DeliveryFailed
from projector_dedup.markers import claim
from projector_dedup.outcome import Delivery
from projector_dedup.unit_of_work import AsyncUnitOfWork, UnitOfWork
from projector_dedup.verdict import Action, verdict_of


class Paid:
    """An event."""

    amount: int = 1


@projector(idempotent=True, name="typed")
class Typed:
    """The decorators change no type."""

    @on(Paid)
    def add(self, event: Paid, session: Session) -> None:
        """A handler."""
        assert_type(event.amount, int)

    @on("payment.received", name="pinned", envelope=True)
    async def add_later(self, event: Message, session: AsyncSession) -> None:
        """Another."""


@projector(idempotent=True, name="function")
@on(Paid)
def function(event: Paid, session: Session) -> None:
    """A function projector is still called as it was written."""


class Refunded:
    """Another event."""

    amount: int = 1


class OurSession(Session):
    """A session of the user's own class."""


class Shapes:
    """Every way to write a handler."""

    @on(Paid)
    def of_our_session(self, event: Paid, session: OurSession) -> None: ...

    @on(Paid)
    def without_it(self, event: Paid, _session: object) -> None: ...

    @on(Paid)
    def of_anything(self, event: object, session: Any) -> None: ...

    @on(Paid, Refunded)
    def of_two(self, event: Paid | Refunded, session: Session) -> None: ...

    @on(Paid, Refunded, str)
    def of_three(self, event: Paid | Refunded | str, session: Session) -> None: ...

    @on(Paid, Refunded, str, int)
    def of_many(self, event: Any, session: Session) -> None: ...

    @on(Paid, "refunded")
    def of_a_class_and_a_name(self, event: Paid | dict[str, Any], session: Session) -> None: ...

    @on("paid", "refunded")
    def of_names(self, event: dict[str, Any], session: Session) -> None: ...

    @on(dict)
    def of_a_generic_class(self, event: dict[str, Any], session: Session) -> None: ...

    @on(Collection, subclasses=True)
    def of_an_abstract_class(self, event: Collection[str], session: Session) -> None: ...

    @on(Paid, batch=True, formerly=["before"], name="set")
    def of_a_batch(self, events: list[Paid], session: Session) -> None: ...

    @on(Paid, Refunded, batch=True)
    async def of_a_batch_of_two(self, events: Sequence[Paid | Refunded], session: AsyncSession) -> None: ...

    @on("paid", batch=True)
    def of_a_batch_of_names(self, events: list[Any], session: Session) -> None: ...

    @on(Paid, envelope=True, batch=True)
    def of_a_batch_of_messages(self, events: list[Message], session: Session) -> None: ...

    @on(Paid)
    @staticmethod
    def static(event: Paid, session: Session) -> None: ...

    @classmethod
    @on(Paid)
    def of_the_class(cls, event: Paid, session: Session) -> None: ...

    @on(Paid)
    def with_more(self, event: Paid, session: Session, more: int = 1) -> None: ...


def sync_api(factory: sessionmaker[Session], session: Session, event: Paid) -> None:
    """Everything that is not awaited."""
    assert_type(Typed(), Typed)
    assert_type(Typed().add(event, session), None)
    assert_type(Shapes().of_a_batch([event], session), None)
    assert_type(Shapes.static(event, session), None)
    assert_type(verdict_of(ValueError()).action, Action)
    assert_type(function(event, session), None)
    assert_type(function.deliver(event, message_id="1", session_factory=factory), Delivery)
    delivery = Dispatcher(factory, Typed(), function).deliver(event, message_id="1")
    assert_type(delivery, Delivery)
    assert_type(delivery.outcome, Outcome)
    assert_type(claim(session, "1", "handler"), bool)
    with UnitOfWork(factory) as uow:
        assert_type(uow, UnitOfWork)
        assert_type(uow.session, Session)
        assert_type(uow.claim("1", "handler"), bool)
    try:
        pass
    except DeliveryFailed as failed:
        assert_type(failed.delivery, Delivery)
        assert_type(failed.exceptions[0].args, tuple[Any, ...])


def of_our_sessions(factory: sessionmaker[OurSession], event: Paid) -> None:
    """A factory of the user's own class of sessions is one."""
    assert_type(Dispatcher(factory, Typed()).deliver(event), Delivery)
    assert_type(function.deliver(event, session_factory=factory), Delivery)
    with UnitOfWork(factory) as uow:
        assert_type(uow.session, Session)


async def async_api(factory: async_sessionmaker[AsyncSession], session: AsyncSession, event: Paid) -> None:
    """Everything that is."""
    assert_type(await AsyncDispatcher(factory, Typed()).deliver(event), Delivery)
    assert_type(await Typed().add_later(Message("1", event), session), None)
    assert_type(await session.run_sync(claim, "1", "handler"), bool)
    async with AsyncUnitOfWork(factory) as uow:
        assert_type(uow.session, AsyncSession)
        assert_type(await uow.claim("1", "handler"), bool)
        await uow.commit()
