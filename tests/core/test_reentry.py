"""A handler that delivers on its own engine would wait for itself: refused at once, whichever row it is.

Each test is written once for threads and asyncio: `done` awaits what has to be awaited.
"""

import asyncio
import threading
from collections.abc import Callable
from contextvars import copy_context
from typing import Any

import pytest
from sqlalchemy import URL, Engine, create_engine, event, select
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.pool import NullPool

from databases import DRIVERS, SERVERS, Driver, each_driver
from projector_dedup import Message, Outcome
from projector_dedup.errors import BatchFailed, DeliveryFailed, UnsafeSessionError
from projector_dedup.guard import GuardedSession
from projector_dedup.markers import claim
from projector_dedup.reentry import Handling
from projector_dedup.tables import default_tables
from projector_dedup.testing import external_transaction
from projector_dedup.unit_of_work import AsyncUnitOfWork, UnitOfWork
from rig import (
    NOTHING,
    ONCE,
    ONE_ATTEMPT,
    Durable,
    Rig,
    RigOn,
    add,
    added,
    create_tables,
    dispatcher_on,
    done,
    handler_of,
)

REFUSED = "inside a handler"
BOUNDS = {"postgresql": "set lock_timeout = '500ms'", "mariadb": "set innodb_lock_wait_timeout = 1"}


@pytest.fixture(name="rig")
def rig_fixture(driver: Driver, rig_on: RigOn) -> Rig:
    """Without the refusal a delivery waits for its own lock: let the database end that wait, and the test fail."""
    rig = rig_on(driver)
    _bound(rig.sync_engine)
    return rig


def _bound(engine: Engine) -> None:
    if engine.name in BOUNDS:

        @event.listens_for(engine, "connect")
        def _set(dbapi_connection: Any, _record: object) -> None:
            cursor = dbapi_connection.cursor()
            cursor.execute(BOUNDS[engine.name])
            cursor.close()
            dbapi_connection.commit()


def deliver_with(rig: Rig, inner: Callable[[], Any]) -> Any:
    """Deliver m-1 to a handler that adds 1 and then calls ``inner``."""

    def handler(session: Session) -> None:
        add(session)
        done(inner())

    return rig.deliver(handler, retry=ONE_ATTEMPT)


def inner_delivery(rig: Rig, message_id: str = "m-2", **options: Any) -> Callable[[], Any]:
    """What delivers another message, to be awaited or not."""
    deliver = rig.adeliver if rig.driver.is_async else rig.deliver
    return lambda: deliver(add, message_id, retry=ONE_ATTEMPT, **options)


def factory_of(url: URL, **options: Any) -> Any:
    """A session factory for the driver of a URL, on an engine of its own."""
    if url.get_dialect().is_async:
        engine = create_async_engine(url, poolclass=NullPool, **options)
        _bound(engine.sync_engine)
        return async_sessionmaker(engine)
    sync_engine = create_engine(url, poolclass=NullPool, **options)
    _bound(sync_engine)
    return sessionmaker(sync_engine)


def other_factory(rig: Rig) -> Any:
    """Another factory, on a copy of the rig's engine, which shares its pool."""
    return type(rig.factory)(rig.engine.execution_options(of="a copy"))


def adds(_event: object, session: Session) -> None:
    """Add 1."""
    add(session)


@pytest.mark.parametrize("idempotent", [True, False], ids=["marked", "unmarked"])
@pytest.mark.parametrize("message_id", ["m-1", "m-2"], ids=["same message", "other message"])
@each_driver(usual=True)
def test_a_delivery_inside_a_handler_is_refused(message_id: str, idempotent: bool, rig: Rig) -> None:
    """The inner delivery raises at once, the outer one fails with the same error, and nothing of either is durable."""
    refusals: list[UnsafeSessionError] = []
    inner = inner_delivery(rig, message_id, idempotent=idempotent)

    def noted() -> Any:
        try:
            return done(inner())
        except UnsafeSessionError as error:
            refusals.append(error)
            raise

    with pytest.raises(UnsafeSessionError, match=REFUSED) as raised:
        deliver_with(rig, noted)
    assert refusals == [raised.value]
    rig.assert_settled(NOTHING)
    assert rig.deliver(add).outcome is Outcome.APPLIED
    assert rig.durable() == ONCE


@each_driver(usual=True)
def test_the_refusal_is_not_retried(rig: Rig) -> None:
    """A handler that delivers will do so again: it runs once, however many attempts the policy has."""
    calls: list[Session] = []
    inner = inner_delivery(rig)

    def handler(session: Session) -> None:
        calls.append(session)
        done(inner())

    with pytest.raises(UnsafeSessionError, match=REFUSED):
        rig.deliver(handler)
    assert len(calls) == 1


@each_driver(usual=True)
def test_a_batch_inside_a_handler_is_refused(rig: Rig) -> None:
    """``deliver_batch`` reports every message of the inner batch as refused."""
    dispatcher = dispatcher_on(other_factory(rig), adds)
    with pytest.raises(BatchFailed) as raised:
        deliver_with(rig, lambda: dispatcher.deliver_batch([added("m-2"), added("m-3")]))
    assert [type(error) for error in raised.value.exceptions] == [UnsafeSessionError]
    assert {delivery.outcome for delivery in raised.value.deliveries} == {Outcome.FAILED}
    assert rig.durable() == NOTHING


@each_driver(usual=True)
def test_a_delivery_by_a_handler_of_a_batch_is_refused(rig: Rig) -> None:
    """The message whose handler delivers fails, and the others of its batch are applied."""
    inner = dispatcher_on(other_factory(rig), adds)

    def body(happened: Any, session: Session) -> None:
        add(session)
        if happened["delivers"]:
            done(inner.deliver(added("inner")))

    events = [Message(f"m-{number}", {"delivers": number == 2}, type="added") for number in range(5)]
    dispatcher = dispatcher_on(rig.factory, body)
    with pytest.raises(BatchFailed) as raised:
        rig.in_one_task(lambda: done(dispatcher.deliver_batch(events)))
    assert [delivery.outcome for delivery in raised.value.deliveries] == [
        Outcome.FAILED if number == 2 else Outcome.APPLIED for number in range(5)
    ]
    assert rig.durable() == Durable(4, 4)


def by_another_dispatcher(factory: Any) -> Any:
    """Another dispatcher, with other handlers, on a copy of the engine."""
    return dispatcher_on(factory, adds).deliver(added("m-2"))


def by_a_unit_of_work(factory: Any) -> Any:
    """By hand, which is a transaction of its own, as a delivery is."""

    async def awaited() -> None:
        async with AsyncUnitOfWork(factory) as uow:
            await uow.claim("m-1", "totals")

    if isinstance(factory, async_sessionmaker):
        return awaited()
    with UnitOfWork(factory) as uow:
        return uow.claim("m-1", "totals")


def by_a_function_projector(factory: Any) -> Any:
    """``FunctionProjector.deliver`` and ``adeliver``."""
    target = handler_of(factory, adds, "function")
    deliver = target.adeliver if isinstance(factory, async_sessionmaker) else target.deliver
    return deliver(added("m-2"), session_factory=factory)


@pytest.mark.parametrize("deliver", [by_another_dispatcher, by_a_unit_of_work, by_a_function_projector])
@each_driver(usual=True)
def test_every_way_to_deliver_inside_a_handler_is_refused(deliver: Callable[[Any], Any], rig: Rig) -> None:
    """Whoever delivers on the handler's engine, and nothing of either is durable."""
    factory = other_factory(rig)
    with pytest.raises(UnsafeSessionError, match=REFUSED):
        deliver_with(rig, lambda: deliver(factory))
    assert rig.durable() == NOTHING


@each_driver(usual=True)
def test_a_claim_on_the_handlers_own_session_is_no_reentry(rig: Rig) -> None:
    """Its marker is one more row of the handler's transaction."""

    def handler(session: Session) -> None:
        add(session)
        assert claim(session, "part-1", "part")

    rig.deliver(handler)
    assert rig.durable() == Durable(2, 1)


@each_driver(is_async=False, usual=True)
def test_a_claim_on_another_session_inside_a_handler_is_refused(rig: Rig) -> None:
    """Such a marker would commit without the handler's, and could wait for it."""
    factory = other_factory(rig)

    def claims() -> None:
        with factory() as session:
            claim(session, "m-1", "totals")

    with pytest.raises(UnsafeSessionError, match=REFUSED):
        deliver_with(rig, claims)
    assert rig.durable() == NOTHING


@each_driver(is_async=False, usual=True)
def test_a_refusal_that_the_handler_swallows_leaves_its_own_work_whole(rig: Rig) -> None:
    """The inner delivery did nothing and said so; the handler's transaction was not touched, so it may go on."""
    inner = inner_delivery(rig)

    def swallow() -> None:
        with pytest.raises(UnsafeSessionError):
            inner()

    assert deliver_with(rig, swallow).outcome is Outcome.APPLIED
    assert rig.durable() == ONCE


# What is no re-entry ----------------------------------------------------------------------------------------------


@each_driver(usual=True)
def test_a_delivery_after_the_handler_is_none(driver: Driver, rig: Rig) -> None:
    """A handler that has returned, or failed, is forgotten, also by one and the same task."""
    deliver = rig.adeliver if driver.is_async else rig.deliver

    def fails(session: Session) -> None:
        add(session)
        raise ZeroDivisionError

    def in_one_task() -> None:
        for number in range(3):
            done(deliver(add, f"m-{number}"))
        with pytest.raises(ZeroDivisionError):
            done(deliver(fails, "failing"))
        done(deliver(add, "last"))

    rig.in_one_task(in_one_task)
    assert rig.durable() == Durable(4, 4)


@each_driver(is_async=False, usual=True)
def test_several_handlers_of_one_event_do_not_deliver_inside_each_other(rig: Rig) -> None:
    """A dispatcher calls them one after the other."""
    dispatcher_on(rig.factory, adds, adds, adds).deliver(added("m-1"))
    assert rig.durable() == Durable(3, 3)


@each_driver(is_async=False, usual=True)
def test_several_refused_handlers_are_reported_together(rig: Rig) -> None:
    """An inner event with two handlers fails with ``DeliveryFailed``, and so does the outer delivery."""
    dispatcher = dispatcher_on(other_factory(rig), adds, adds)
    with pytest.raises(DeliveryFailed) as raised:
        deliver_with(rig, lambda: dispatcher.deliver(added("m-2")))
    assert {type(error) for error in raised.value.exceptions} == {UnsafeSessionError}
    assert rig.durable() == NOTHING


@each_driver(is_async=False, usual=True)
def test_a_delivery_by_a_listener_that_hears_of_the_commit_is_none(rig: Rig) -> None:
    """After COMMIT no lock is held, so ``after_commit`` may deliver what the handler has collected."""
    factory, inner = sessionmaker(rig.sync_engine), inner_delivery(rig)
    event.listen(factory, "after_commit", lambda _session: inner())
    dispatcher_on(factory, adds).deliver(added("m-1"))
    assert rig.durable() == Durable(2, 2)


@each_driver(is_async=False, usual=True)
def test_a_delivery_by_a_listener_before_the_commit_is_refused(rig: Rig) -> None:
    """The handler's locks are still held in ``before_commit``."""
    factory, inner = sessionmaker(rig.sync_engine), inner_delivery(rig)
    event.listen(factory, "before_commit", lambda _session: inner())
    with pytest.raises(UnsafeSessionError, match=REFUSED):
        dispatcher_on(factory, adds).deliver(added("m-1"))
    rig.assert_settled(NOTHING)


@each_driver(usual=True)
def test_a_delivery_on_another_database_is_none(driver: Driver, rig: Rig, tmp_path: Any) -> None:
    """A second database has locks of its own; but whoever comes back from there to the first is refused."""
    elsewhere = DRIVERS[-1] if driver.is_async else DRIVERS[-2]
    url = URL.create(drivername=elsewhere.drivername, database=str(tmp_path / "other"))
    create_tables(url.set(drivername="sqlite"))
    other = factory_of(url)
    there = dispatcher_on(other, adds)
    deliver_with(rig, lambda: there.deliver(added("m-2")))
    assert rig.durable() == ONCE

    back = inner_delivery(rig, "m-4")
    returning = dispatcher_on(other, lambda _event, _session: done(back()))
    rig.outside.empty()
    with pytest.raises(UnsafeSessionError, match=REFUSED):
        deliver_with(rig, lambda: returning.deliver(added("m-3")))
    assert rig.durable() == NOTHING


@each_driver(*SERVERS, usual=True)
def test_a_delivery_on_another_engine_of_the_database_is_not_seen(rig: Rig) -> None:
    """It may deliver what waits for nothing of the handler's (docs/handlers.md)."""
    other = dispatcher_on(factory_of(rig.engine.url), adds)

    def handler(_session: Session) -> None:
        done(other.deliver(added("m-2")))

    rig.deliver(handler, retry=ONE_ATTEMPT)
    assert rig.durable() == Durable(2, 1)


@each_driver(*SERVERS, is_async=False)
def test_units_of_work_side_by_side_are_none(driver: Driver, rig_on: RigOn) -> None:
    """Outside of handlers, a caller may hold two in one thread."""
    factory = sessionmaker((rig := rig_on(driver)).sync_engine)
    with UnitOfWork(factory) as one, UnitOfWork(factory) as two:
        assert one.claim("m-1", "totals")
        assert two.claim("m-2", "totals")
        two.commit()
        one.commit()
    assert rig.durable() == Durable(2, 0)


# Tasks and threads ------------------------------------------------------------------------------------------------


@each_driver(is_async=True, usual=True)
def test_a_task_of_the_handler_is_refused_while_the_handler_runs(rig: Rig) -> None:
    """To await it would be to wait for oneself."""
    inner = inner_delivery(rig)
    with pytest.raises(UnsafeSessionError, match=REFUSED):
        deliver_with(rig, lambda: asyncio.gather(inner()))
    assert rig.durable() == NOTHING


@each_driver(is_async=True, usual=True)
def test_a_task_that_outlives_the_handler_may_deliver(rig: Rig) -> None:
    """Its context is a copy of the handler's, in which the handler has ended."""
    tasks: list[asyncio.Task[Any]] = []

    async def deliver() -> None:
        ended = asyncio.Event()

        async def later() -> None:
            await ended.wait()
            await rig.adeliver(add, "m-2")

        async def handler(session: AsyncSession) -> None:
            await session.run_sync(add)
            tasks.append(asyncio.create_task(later()))
            await asyncio.sleep(0)

        await rig.adeliver(handler)
        ended.set()
        await asyncio.gather(*tasks)

    rig.run(deliver())
    assert rig.durable() == Durable(2, 2)


@each_driver(is_async=False, usual=True)
def test_a_thread_that_was_given_the_context_is_refused(rig: Rig) -> None:
    """``asyncio.to_thread`` copies the context: a synchronous delivery in it is inside the handler."""
    inner = inner_delivery(rig)
    with pytest.raises(UnsafeSessionError, match=REFUSED):
        deliver_with(rig, lambda: asyncio.run(asyncio.to_thread(inner)))
    assert rig.durable() == NOTHING


@each_driver(*SERVERS, is_async=False)
def test_a_thread_of_its_own_is_not_seen(rig: Rig) -> None:
    """It has a context of its own, and may deliver what waits for nothing of the handler's (docs/handlers.md)."""
    inner = inner_delivery(rig)

    def handler(_session: Session) -> None:
        thread = threading.Thread(target=inner)
        thread.start()
        thread.join()

    rig.deliver(handler, retry=ONE_ATTEMPT)
    assert rig.durable() == Durable(2, 1)


@each_driver(is_async=True, usual=True)
def test_tasks_side_by_side_do_not_see_each_others_handlers(rig: Rig) -> None:
    """Deliveries of different tasks overlap as ever."""

    async def deliver() -> None:
        await asyncio.gather(*(rig.adeliver(add, f"m-{number}") for number in range(8)))

    rig.run(deliver())
    assert rig.durable() == Durable(8, 8)


def test_a_delivery_that_is_closed_in_another_context_disturbs_nobody() -> None:
    """A coroutine that nobody awaits any more is closed by whoever drops it, in that one's context."""
    handling = Handling(GuardedSession())
    copy_context().run(handling.__enter__)
    handling.__exit__()


# An outer transaction ---------------------------------------------------------------------------------------------


@each_driver(usual=True)
def test_a_test_in_an_outer_transaction_is_told_too(rig: Rig) -> None:
    """What would wait for ever in production is refused where one connection would let it pass."""

    def in_an_outer_transaction() -> None:
        connection = rig.engine.connect() if isinstance(rig.engine, Engine) else done(rig.engine.connect().start())
        factory = type(rig.factory)(connection)
        with external_transaction(dispatcher_on(factory, adds)) as inner:
            outer = dispatcher_on(factory, lambda _event, _session: done(inner.deliver(added("m-2"))))
            with external_transaction(outer), pytest.raises(UnsafeSessionError, match=REFUSED):
                done(outer.deliver(added("m-1")))
            assert done(inner.deliver(added("m-2"))).outcome is Outcome.APPLIED
            found = done(connection.execute(select(default_tables.marker.c.message_id)))
            assert found.scalars().all() == ["m-2"]
        done(connection.close())

    rig.in_one_task(in_an_outer_transaction)
