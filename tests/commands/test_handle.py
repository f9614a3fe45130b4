"""A command is done once, and everybody who asks again gets the recorded answer; on every driver."""

from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy.exc import IntegrityError

from command_rig import Balance, Desk, Placed, PlaceOrder, desks, place
from databases import DRIVERS
from projector_dedup import Outcome
from projector_dedup.commands import AsyncCall, Call, Rejected, Rejection
from projector_dedup.options import RetryPolicy

desk = desks(DRIVERS)


def test_a_command_is_done_once_and_answered_as_often_as_it_is_asked(desk: Desk) -> None:
    """Result, writes and record are of one transaction, and of one run."""
    operation = desk.operation()
    answers = [desk.handle(operation, PlaceOrder(30)) for _ in range(3)]
    assert [answer.result for answer in answers] == [Placed(1, 999_970)] * 3
    assert [answer.outcome for answer in answers] == [Outcome.APPLIED, Outcome.DUPLICATE, Outcome.DUPLICATE]
    assert [answer.replayed for answer in answers] == [False, True, True]
    assert (desk.ran, desk.orders(), desk.spent()) == (["k1"], ["k1"], 30)
    assert desk.records() == [("0:k1", "desk.place", 1)]
    assert answers[0].recorded_at is None
    assert answers[1].recorded_at is not None
    assert answers[1].recorded_at == answers[2].recorded_at


def test_a_rejection_that_is_returned_commits_with_its_writes(desk: Desk) -> None:
    """It is what the business decided, and what it wrote about that stays."""

    def refuse(order: PlaceOrder, call: Call) -> Placed | Rejection:
        place(order, call)
        return Rejection("too_late", {"by": 3})

    operation = desk.operation(refuse)
    answers = [desk.handle(operation) for _ in range(2)]
    assert [answer.rejection for answer in answers] == [Rejection("too_late", {"by": 3})] * 2
    assert (len(desk.ran), desk.orders()) == (1, ["k1"])
    for answer in answers:
        with pytest.raises(Rejected, match="too_late") as told:
            _ = answer.result
        assert (told.value.detail, told.value.replayed) == ({"by": 3}, answer.replayed)


def test_a_rejection_that_is_raised_is_recorded_without_writes(desk: Desk) -> None:
    """Whoever asks again is told the same, and the handler does not run again."""

    def refuse(order: PlaceOrder, call: Call) -> Placed:
        place(order, call)
        raise Rejected("insufficient_funds", {"missing": 5})

    operation = desk.operation(refuse)
    answers = [desk.handle(operation) for _ in range(2)]
    assert [answer.rejection for answer in answers] == [Rejection("insufficient_funds", {"missing": 5})] * 2
    assert [answer.outcome for answer in answers] == [Outcome.APPLIED, Outcome.DUPLICATE]
    assert (len(desk.ran), desk.orders(), desk.spent()) == (1, [], 0)
    assert desk.records() == [("0:k1", "desk.place", 2)]


def test_any_other_error_records_nothing_and_leaves_the_key_free(desk: Desk) -> None:
    """A failure is no answer: the next caller tries again."""
    fails = [True, True, False]

    def stumble(order: PlaceOrder, call: Call) -> Placed:
        placed = place(order, call)
        if fails.pop(0):
            raise ValueError("a bug")
        return placed

    operation = desk.operation(stumble)
    for _ in range(2):
        with pytest.raises(ValueError, match="a bug"):
            desk.handle(operation)
        assert (desk.orders(), desk.records()) == ([], [])
    assert not desk.handle(operation).replayed
    assert (desk.orders(), len(desk.records())) == (["k1"], 1)


def test_without_a_key_nothing_is_recorded(desk: Desk) -> None:
    """Asked twice, done twice: nobody said that it is the same command."""
    operation = desk.operation()
    answers = [desk.handle(operation, key=None) for _ in range(2)]
    assert [answer.replayed for answer in answers] == [False, False]
    assert (len(desk.orders()), desk.records()) == (2, [])


def test_the_present_answers_where_no_result_is_stored(desk: Desk) -> None:
    """An operation with a default runs once, and later callers see how things stand now."""
    operation = desk.operation(name="desk.default", default=_present_async if desk.harness.asynchronous else _present)
    answers = [desk.handle(operation, PlaceOrder(7), key=key) for key in ("k1", "k2", "k1")]
    assert [answer.result for answer in answers] == [Placed(1, 999_993), Placed(2, 999_986), Placed(0, 999_986)]
    assert desk.ran == ["k1", "k2"]
    assert [outcome for _, _, outcome in desk.records()] == [3, 3]


def _present(order: PlaceOrder, call: Call) -> Placed:
    return Placed(0, call.session.get_one(Balance, order.customer).amount)


async def _present_async(order: PlaceOrder, call: AsyncCall) -> Placed:
    return Placed(0, (await call.session.get_one(Balance, order.customer)).amount)


def test_a_record_says_when(desk: Desk) -> None:
    """By the database's clock, in whatever zone the server is."""
    operation = desk.operation()
    desk.handle(operation)
    recorded = desk.handle(operation).recorded_at
    assert recorded is not None
    assert recorded.tzinfo is UTC
    assert abs(datetime.now(UTC) - recorded) < timedelta(minutes=10)


def test_a_rejection_that_hides_a_database_error_is_tried_again_first(desk: Desk) -> None:
    """Where the error has aborted the transaction, a rival may have caused it; in the end the rejection counts."""

    def refuse(order: PlaceOrder, call: Call) -> Placed:
        call.session.add(Balance(customer=order.customer, amount=0))
        try:
            call.session.flush()
        except IntegrityError:
            raise Rejected("customer_exists") from None
        return Placed(0, 0)

    operation = desk.operation(refuse)
    assert desk.handle(operation).rejection == desk.handle(operation).rejection == Rejection("customer_exists")
    aborts = desk.harness.engine.dialect.name == "postgresql"
    assert len(desk.ran) == (1 + RetryPolicy().unique_violations if aborts else 1)
    assert desk.records() == [("0:k1", "desk.place", 2)]
