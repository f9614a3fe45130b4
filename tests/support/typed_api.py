"""The public API as type checkers see it: checked by `tests/delivery/test_types.py`, never imported."""

from typing import Any, assert_type

from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session, sessionmaker

from projector_dedup import (
    AsyncDispatcher,
    AsyncUnitOfWork,
    Delivery,
    DeliveryFailed,
    Dispatcher,
    Message,
    Outcome,
    UnitOfWork,
    claim,
    on,
    projector,
)


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
    async def add_later(self, event: Message, session: AsyncSession) -> int:
        """Another."""
        return 1


@projector(idempotent=True, name="function")
@on(Paid)
def function(event: Paid, session: Session) -> str:
    """A function projector is still called as it was written."""
    return "done"


def sync_api(factory: sessionmaker[Session], session: Session, event: Paid) -> None:
    """Everything that is not awaited."""
    assert_type(Typed(), Typed)
    assert_type(Typed().add(event, session), None)
    assert_type(function(event, session), str)
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


async def async_api(factory: async_sessionmaker[AsyncSession], session: AsyncSession, event: Paid) -> None:
    """Everything that is."""
    assert_type(await AsyncDispatcher(factory, Typed()).deliver(event), Delivery)
    assert_type(await Typed().add_later(Message("1", event), session), int)
    assert_type(await session.run_sync(claim, "1", "handler"), bool)
    async with AsyncUnitOfWork(factory) as uow:
        assert_type(uow.session, AsyncSession)
        assert_type(await uow.claim("1", "handler"), bool)
        await uow.commit()
