"""Cases of commands and effects: what clients ask for at the same time, and what must be true afterwards.

actors.py has the clients and the stage. A command is known by the note of its order. In the end the broker asks once
more, and gets the answer that everybody got.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from sqlalchemy import event, func, insert, select
from sqlalchemy.orm import Session

from actors import Case, Round, Stage, Work, Worker, until_done, with_row
from algorithms import Clock, Faulty, Store
from command_rig import Order, Placed, PlaceOrder, place
from fault_points import add
from projector_dedup.commands import Call, KeyReusedError, Rejected, Rejection, default_command_tables
from projector_dedup.effects import (
    Attempt,
    DoubleEffectError,
    Effects,
    EffectUnknown,
    LeaseLostError,
    NotRecordedError,
    arm,
    effect,
    resend,
    stop,
)
from projector_dedup.effects.policy import Policy
from projector_dedup.errors import InProgress
from projector_dedup.maintenance.rows import forget_record, rename
from rig import QUICK, TOTAL

# Commands -----------------------------------------------------------------------------------------------------------


def order_of(at: Round, note: object = "") -> PlaceOrder:
    """Return the order of the round, or one of several."""
    return PlaceOrder(customer=at.name, note=f"{at.name} {note}".strip())


def own_or_all(worker: Worker) -> tuple[int, ...]:
    """Return the number of the client, and all numbers for the broker."""
    return (0, 1) if worker.is_broker else (worker.number,)


def ask(at: Round, worker: Worker) -> None:
    """Ask for the command of the round; all clients ask with the same key."""
    worker.ask(at, order_of(at))


def ask_in_a_scope(at: Round, worker: Worker) -> None:
    """Ask in an own scope, with the same key as everybody."""
    for number in own_or_all(worker):
        worker.ask(at, order_of(at, number), key=f"{at.name}:x", scope=str(number))


@dataclass(frozen=True)
class CancelOrder(PlaceOrder):
    """Another command, with the same fields."""


def ask_for_another(at: Round, worker: Worker) -> None:
    """Ask for an own command, with the same key as the other client."""
    for number in own_or_all(worker):
        order = (CancelOrder if number else PlaceOrder)(customer=at.name, note=at.name)
        told = type(order).__name__
        try:
            worker.ask(at, order, told=told)
        except KeyReusedError:
            at.answers.append((told, "the key belongs to another command"))


def place_if_paid(order: PlaceOrder, call: Call) -> Placed:
    """A handler that writes, and rejects the command if there is no money."""
    placed = place(order, call)
    if placed.left < 0:
        raise Rejected("no money")
    return placed


def ask_if_paid(at: Round, worker: Worker) -> None:
    """Ask for a command that is rejected without money."""
    worker.ask(at, order_of(at), body=place_if_paid)


def pay_and_ask(at: Round, worker: Worker) -> None:
    """Bring money, and ask for the same command."""

    def pay() -> None:
        with worker.engine.begin() as connection:
            connection.exec_driver_sql(f"update desk_balance set amount = 10 where customer = '{at.name}'")

    until_done(worker, pay)
    ask_if_paid(at, worker)


def place_if_first(order: PlaceOrder, call: Call) -> Placed:
    """A handler that places an order if the customer has none, and locks no row."""
    notes = Order.note.startswith(f"{order.customer} ")
    if call.session.scalar(select(func.count()).select_from(Order).where(notes)):
        return Placed(0, 0)
    placed = Order(note=order.note, amount=order.amount)
    call.session.add(placed)
    call.session.flush()
    return Placed(placed.number, 0)


def locks_of(order: PlaceOrder) -> list[str]:
    """Return the two locks of a customer, to each client in another order."""
    locks = [f"{order.customer} a", f"{order.customer} b"]
    return locks[::-1] if order.note.endswith("1") else locks


def ask_under_locks(at: Round, worker: Worker) -> None:
    """Ask for an own command; commands of one customer run one after the other."""
    for number in own_or_all(worker):
        worker.ask(at, order_of(at, number), key=f"{at.name} {number}", body=place_if_first, lock=locks_of)


def ask_by_old_code(at: Round, worker: Worker) -> None:
    """Ask for the command under the old name of its operation."""
    worker.ask(at, order_of(at), name=f"{at.name} old")


def ask_by_new_code(at: Round, worker: Worker) -> None:
    """Ask for it under the new name, which knows the old one."""
    worker.ask(at, order_of(at), name=f"{at.name} new", formerly=(f"{at.name} old",))


def ask_by_the_new_name(at: Round, worker: Worker) -> None:
    """Ask for it under the new name alone."""
    worker.ask(at, order_of(at), name=f"{at.name} new")


def do_forget(at: Round, worker: Worker) -> None:
    """Forget the command, and again until it has succeeded."""
    until_done(worker, partial(forget_record, worker.engine, at.name, operation="place"))


def ask_beside_a_listener(at: Round, worker: Worker) -> None:
    """Ask, while a listener writes a row when the record is written."""
    row = insert(TOTAL).values(account=at.name, amount=1)

    def write(connection: Any, _cursor: object, statement: str, *_: object) -> None:
        if "processed_command SET" in statement:
            connection.execute(row)

    event.listen(worker.engine, "after_cursor_execute", write)
    try:
        ask(at, worker)
    finally:
        event.remove(worker.engine, "after_cursor_execute", write)


class ScheduledStore(Store):
    """The second store of a published algorithm. A call is a round trip, and a killed client makes none."""

    def __init__(self, path: Path, worker: Worker) -> None:
        self._worker = worker
        self._path, self._clock = path, Clock()  # the table is there

    def _execute(self, sql: str, *values: object) -> list[Any]:
        with self._worker.calling(sql):
            return super()._execute(sql, *values)


def ask_of(algorithm: type[Faulty], path: Path, *, scopes: int = 1) -> Work:
    """Return work that asks a published algorithm for a command. The broker asks once more after an error.

    With two scopes, each client asks in an own one, with the same key.
    """
    Store(path, Clock())

    def ask_it(at: Round, worker: Worker) -> None:
        handle = algorithm(worker.factory, ScheduledStore(path, worker)).handle
        for number in own_or_all(worker)[:scopes] if scopes > 1 else (0,):
            order = order_of(at, number)
            try:
                answer = handle(place, order, at.name, str(number) if scopes > 1 else None)
            except Exception:
                if worker.is_broker:
                    raise
            else:
                worker.refuse_if_killed()
                at.answers.append((order.note, answer))

    return ask_it


def with_customer(stage: Stage, at: Round) -> None:
    """The customer of the command has money."""
    stage.outside.execute(f"insert into desk_balance values ('{at.name}', 1000)")


def without_money(stage: Stage, at: Round) -> None:
    """The customer has none."""
    stage.outside.execute(f"insert into desk_balance values ('{at.name}', 0)")


def with_lookalikes(stage: Stage, at: Round) -> None:
    """The broker has asked for two commands whose scope and key together read as those of the clients do."""
    with_customer(stage, at)
    for number in (0, 1):
        scope = f"{number}:{at.name}"
        stage.broker.call(partial(stage.broker.ask, at, order_of(at, f"was {number}"), key="x", scope=scope))


def with_used_locks(stage: Stage, at: Round) -> None:
    """Both locks were taken before, by a command that placed an order of another kind."""
    stage.broker.call(partial(stage.broker.ask, at, order_of(at), body=place_if_first, lock=locks_of))


def asked(stage: Stage, at: Round) -> None:
    """The command was done before."""
    with_customer(stage, at)
    stage.broker.call(ask, at, stage.broker)


def check_asked(work: Work, *notes: object) -> Callable[[Stage, Round], None]:
    """Return the check that each command was done once, and that everybody gets the same answer, also who asks now."""

    def check(stage: Stage, at: Round) -> None:
        stage.broker.call(work, at, stage.broker)
        check_answers(at)
        for note in (order_of(at, each).note for each in notes or ("",)):
            orders = orders_of(stage, note)
            assert len(orders) == 1, f"{len(orders)} orders were placed for one key"

    return check


def check_answers(at: Round) -> None:
    """All answers to one command are one."""
    for note, answers in groupby(sorted(at.answers, key=str), lambda answer: answer[0]):
        different = {str(answer) for _, answer in answers}
        assert len(different) == 1, f"the answers to {note!r} differ: {different}"


def orders_of(stage: Stage, note: str) -> list[int]:
    """Return the numbers of the orders with this note."""
    return [number for (number,) in stage.outside.execute(f"select number from desk_order where note = '{note}'")]


def check_another(stage: Stage, at: Round) -> None:
    """One of two commands with one key is done, and the other one never gets its answer."""
    check_asked(ask_for_another)(stage, at)
    done = {kind for kind, answer in at.answers if isinstance(answer, Placed)}
    assert len(done) == 1, f"one key was answered to {done or 'nobody'}"


def check_rejected(stage: Stage, at: Round) -> None:
    """A command that was rejected stays so, and has written nothing. No observer is told that it was applied."""
    stage.broker.call(ask_if_paid, at, stage.broker)
    check_answers(at)
    orders = orders_of(stage, at.name)
    assert len(orders) == (0 if isinstance(at.answers[0][1], Rejection) else 1), f"{at.answers}, and {orders} placed"
    applied = [each for worker in stage.workers for each in worker.observations if each.outcome == "applied"]
    assert len(applied) <= len(orders), "a command is said to be applied, and was rejected"


def check_locked(stage: Stage, at: Round) -> None:
    """One of two commands has placed an order, and the other one has seen it."""
    stage.broker.call(ask_under_locks, at, stage.broker)
    check_answers(at)
    orders = [*orders_of(stage, f"{at.name} 0"), *orders_of(stage, f"{at.name} 1")]
    assert len(orders) == 1, f"{len(orders)} orders were placed under one lock"


def check_renamed(stage: Stage, at: Round) -> None:
    """When the records are renamed, code that knows the new name alone gets the answer that everybody got."""
    check_asked(ask_by_old_code)(stage, at)
    rename(stage.broker.engine, f"{at.name} old", f"{at.name} new", tables=default_command_tables)
    check_asked(ask_by_the_new_name)(stage, at)


def check_forgotten(stage: Stage, at: Round) -> None:
    """Each answer is that of an order, at most two are placed, and the last one is the answer from now on."""
    stage.broker.call(ask, at, stage.broker)
    orders, answers = orders_of(stage, at.name), [answer.number for _, answer in at.answers]
    assert set(answers) == {*orders}, f"the answers are {answers}, and the orders {orders}"
    assert len(orders) <= 2
    assert answers[-1] == max(orders)


def check_beside_a_listener(stage: Stage, at: Round) -> None:
    """The row of the listener is there once, as the order is."""
    orders = len(orders_of(stage, at.name))
    assert sum(stage.counts(at, 1)) == orders, "the row of a listener is there without the order, or the order alone"
    check_asked(ask)(stage, at)


# Effects ------------------------------------------------------------------------------------------------------------


@effect(name="charge", lease=30, unknown=stop)
def charge(request: str, attempt: Attempt) -> str:
    """An effect that nobody sends here."""
    return f"{request} {attempt.key}"


def add_and_arm(happened: Any, session: Session) -> None:
    """A handler that arms an effect too."""
    add(happened, session)
    arm(session, charge, happened["account"], key=f"{happened['account']} {happened['amount']}")


def deliver_and_arm(at: Round, worker: Worker) -> None:
    """Deliver an own message to a handler that arms an effect."""
    worker.deliver(at, worker.number, body=add_and_arm)


def check_armed(stage: Stage, at: Round) -> None:
    """The effect of a message is armed if, and only if, the message is applied."""
    keys = [f"0:{at.name} {at.message(number).body['amount']}" for number in (0, 1)]
    query = "select count(*) from external_effect where message_id ="
    armed = [stage.outside.execute(f"{query} '{key}'")[0][0] for key in keys]
    counts = stage.counts(at, 2)
    assert armed == counts, "an effect is armed without its message, or a message is applied without its effect"
    stage.check_counts(at, 2, body=add_and_arm)


UNKNOWN: dict[str, Policy] = {
    "stop": stop,
    "resend": resend(within=timedelta(hours=23)),
    "reject": resend(within=timedelta(hours=23)),
}


def send(at: Round, worker: Worker, policy: str) -> None:
    """Send the effect of the round to a provider outside, which answers the same to a key that it knows.

    The call of the provider is a round trip. The answer is also counted on the account of the round. With the policy
    `reject`, the provider rejects each request.
    """

    def pay(request: str, attempt: Attempt) -> str:
        with worker.calling("CALL provider"):
            at.deeds.append(attempt.key)
        if policy == "reject":
            raise Rejected("no money")
        at.returned.append((worker.number, f"{request} {at.deeds.index(attempt.key)}"))
        return at.returned[-1][1]

    def count(_request: str, _answer: str, session: Session) -> None:
        add({"account": at.name, "amount": 1}, session)

    paid = effect(name=f"pay, {policy}", lease=30, unknown=UNKNOWN[policy])(pay)
    paid.recorded(count)
    try:
        answer = Effects(worker.factory, [paid], retry=QUICK).run(paid, at.name, key=at.name)
    except DoubleEffectError:
        raise
    except Rejected:
        answer = "rejected"
    except LeaseLostError as lost:
        if isinstance(lost.value, Rejected):
            return  # it says nothing of the attempt that has taken over
        answer = lost.value
    except (InProgress, EffectUnknown, NotRecordedError):
        return
    worker.refuse_if_killed()
    at.answers.append(("the effect", answer))


def send_later(at: Round, worker: Worker, policy: str) -> None:
    """Send the effect when the lease of everybody else is over."""

    def end() -> None:
        with worker.engine.begin() as connection:
            mine = f"message_id = '0:{at.name}' and lease_until is not null"
            connection.exec_driver_sql(f"update external_effect set lease_until = 1 where {mine}")

    until_done(worker, end)
    send(at, worker, policy)


def check_sent(stage: Stage, at: Round, policy: str) -> None:
    """The effect is done once, it has one answer, and that is recorded with the rows of `recorded`.

    Under the policy `stop`, a person must decide if no living client has got the answer. No deed may happen twice, and
    the provider is not asked again when somebody has the answer.
    """
    alive = [answer for number, answer in at.returned if not stage.workers[number].proxy.is_dead]
    was_told, asked_before = bool(at.answers), len(at.deeds)
    stage.broker.call(send_later, at, stage.broker, policy)
    check_answers(at)
    deeds = at.deeds if policy == "stop" else {*at.deeds}  # the provider does a key once
    assert len(deeds) <= 1, f"the provider has done {at.deeds}"
    assert not was_told or len(at.deeds) == asked_before, "the provider is asked again, and the answer was known"
    is_done = bool(at.answers)
    assert is_done or (policy == "stop" and not alive), "the answer of the provider is lost"
    assert is_done or any(step.choice.branch != "go" for step in stage.scheduler.steps), (
        "without a fault, it is not done"
    )
    paid = int(is_done and policy != "reject")
    assert stage.counts(at, 1) == [paid], "the rows of `recorded` are not those of the outcome"


def sending(policy: str) -> dict[str, Any]:
    """Return the parts of a case in which two clients send one effect."""
    return {
        "work": (partial(send, policy=policy), partial(send_later, policy=policy)),
        "prepare": with_row,
        "check": partial(check_sent, policy=policy),
        "is_sync": True,
    }


CASES = {
    each.name: each
    for each in (
        Case("a command", (ask, ask), with_customer, check_asked(ask)),
        Case("one key in two scopes", (ask_in_a_scope,) * 2, with_lookalikes, check_asked(ask_in_a_scope, 0, 1)),
        Case("two commands with one key", (ask_for_another,) * 2, with_customer, check_another),
        Case(
            "a command that is rejected",
            (ask_if_paid, pay_and_ask),
            without_money,
            check_rejected,
            is_sync=True,
            is_long=True,
        ),
        Case("two commands under locks", (ask_under_locks,) * 2, with_used_locks, check_locked),
        Case(
            "a command, old and new code",
            (ask_by_old_code, ask_by_new_code),
            with_customer,
            check_renamed,
            is_sync=True,
        ),
        Case("a command that is forgotten", (do_forget, ask), asked, check_forgotten, is_long=True, is_sync=True),
        Case(
            "a command, three times", (ask_beside_a_listener,) * 3, with_customer, check_beside_a_listener, is_long=True
        ),
        Case("an effect", (deliver_and_arm, deliver_and_arm), with_row, check_armed),
        Case("an effect that is sent", **sending("stop"), is_long=True),
        Case("an effect that is sent again", **sending("resend"), is_long=True),
        Case("an effect that is rejected", **sending("reject"), is_long=True),
    )
}
