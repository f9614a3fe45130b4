"""A version that another command has meanwhile made: read again, or told to the client who named it."""

import threading
from collections.abc import Iterator

import pytest
from sqlalchemy import Index, func, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from command_rig import Desk, Order, Placed, PlaceOrder, desk_on
from databases import DRIVERS, USUAL, USUAL_ASYNC
from kit import PATIENCE
from projector_dedup.commands import Call
from projector_dedup.errors import RetriesExhaustedError
from projector_dedup.options import RetryPolicy


class ExpectedVersionError(Exception):
    """The error of an event store whose stream has another version than was expected."""


@pytest.fixture(
    params=[driver for driver in DRIVERS if driver.drivername in {*USUAL.values(), *USUAL_ASYNC.values()}], ids=str
)
def desk(request: pytest.FixtureRequest) -> Iterator[Desk]:
    """A desk on each database, sync and async, whose orders are a stream: one of each version."""
    with desk_on(request, request.param) as desk:
        version = Index("one_of_each_version", Order.amount, unique=True)
        try:
            desk.harness.transact(lambda session: version.create(session.connection()))
        finally:
            Order.__table__.indexes.discard(version)  # type: ignore[attr-defined]  # of this desk alone
        yield desk


def latest(session: Session) -> int:
    """Return the version of the stream."""
    return session.scalar(select(func.max(Order.amount))) or 0


class Append:
    """A handler that appends to the stream, and is held when it has read the version, the first time that it runs."""

    def __init__(self, desk: Desk, *, held: bool = False) -> None:
        self.has_read, self.may_go_on = threading.Event(), threading.Event()
        self._desk = desk
        if not held:
            self.may_go_on.set()

    def __call__(self, _order: PlaceOrder, call: Call) -> Placed:
        """Append with the next version; the store tells by an error of its own that another was faster."""
        version = latest(call.session) + 1
        self.has_read.set()
        assert self._desk.harness.blocking(self.may_go_on.wait, PATIENCE)
        call.session.add(Order(note=str(call.key), amount=version))
        try:
            call.session.flush()
        except IntegrityError as error:
            raise ExpectedVersionError(version) from error
        return Placed(version, 0)


@pytest.mark.parametrize("also", [(), (ExpectedVersionError,)], ids=["not named", "named"])
def test_a_rival_that_was_faster(desk: Desk, also: tuple[type[Exception], ...]) -> None:
    """The command reads the new version, and appends behind it, if the policy names the error of the store."""
    if desk.harness.engine.dialect.name == "sqlite":
        pytest.skip("one writer: nobody appends while a command runs")
    held = Append(desk, held=True)
    operation = desk.operation(held, isolation="READ COMMITTED")  # the store tells of rivals, not the database
    commands = desk.commands(retry=RetryPolicy(unique_violations=0, also=also))
    slow = desk.harness.start(desk.handle, operation, key="slow", commands=commands)
    assert held.has_read.wait(PATIENCE)
    assert desk.handle(desk.operation(Append(desk)), key="fast").result.number == 1
    held.may_go_on.set()
    if also:
        assert slow.result(PATIENCE).result.number == 2
        assert desk.orders() == ["fast", "slow"]
    else:
        with pytest.raises(ExpectedVersionError):
            slow.result(PATIENCE)
        assert desk.orders() == ["fast"]


def test_an_error_that_stays_is_told_in_the_end(desk: Desk) -> None:
    """As often as the policy says, and nothing is recorded: the key is free."""

    def conflict(_order: PlaceOrder, _call: Call) -> Placed:
        raise ExpectedVersionError(7)

    commands = desk.commands(retry=RetryPolicy(attempts=3, base=0, also=(ExpectedVersionError,)))
    with pytest.raises(RetriesExhaustedError, match="ExpectedVersionError: 7"):
        desk.handle(desk.operation(conflict), commands=commands)
    assert (len(desk.ran), desk.records()) == (3, [])


@pytest.mark.parametrize("also", [[ValueError], (ValueError(),), ("ValueError",), (KeyboardInterrupt,)])
def test_only_classes_of_exceptions_are_named(also: object) -> None:
    """Anything else is refused when the policy is made."""
    with pytest.raises(ValueError, match="also must be a tuple"):
        RetryPolicy(also=also)  # type: ignore[arg-type]
