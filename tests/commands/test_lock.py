"""``@command(lock=...)``: commands of one subject take turns, on every driver, at every level."""

import threading
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import event, func, select

from command_rig import LEVELS, SYNC_ONES, USUAL_ONES, Desk, Held, Order, Placed, PlaceOrder, desks, place
from databases import DRIVERS, Database
from kit import PATIENCE
from meter import metered
from projector_dedup.commands import Call, InvalidKeyError, abegin_command, begin_command, default_command_tables
from projector_dedup.commands.lock import LOCK
from projector_dedup.errors import HandlerDefinitionError, InProgress
from projector_dedup.maintenance.cleanup import cleanup
from projector_dedup.options import RetryPolicy

RIVALS = 3
desk = desks(DRIVERS, levels=LEVELS)
server = desks([driver for driver in USUAL_ONES if driver.engine != "sqlite"], name="server")
usual = desks(USUAL_ONES, name="usual")
sync = desks(SYNC_ONES, name="sync")


def one_for_all(order: PlaceOrder, call: Call) -> Placed:
    """Look, and place an order only if there is none of this note: no row that two of them meet on."""
    there = call.session.scalar(select(func.count()).where(Order.note == order.note)) or 0
    if not there:
        call.session.add(Order(note=order.note, amount=order.amount))
    return Placed(int(not there), there)


def next_number(order: PlaceOrder, call: Call) -> Placed:
    """Take the highest number of this note, and write the next one."""
    highest = call.session.scalar(select(func.max(Order.amount)).where(Order.note == order.note)) or 0
    call.session.add(Order(note=order.note, amount=highest + 1))
    return Placed(highest + 1, 0)


def by_note(order: PlaceOrder) -> str:
    """The lock key."""
    return order.note


def by_notes(order: PlaceOrder) -> list[str]:
    """Several lock keys."""
    return order.note.split(",")


def test_who_waited_sees_what_the_holder_has_committed(desk: Desk) -> None:
    """The others read after their turn has come: one order is placed, by one of them."""
    held = Held(desk, one_for_all)
    operation = desk.operation(held, lock=by_note)
    futures = [desk.harness.start(desk.handle, operation, PlaceOrder(note="a"), "k0")]
    assert held.entered.wait(PATIENCE)
    futures += [
        desk.harness.start(desk.handle, operation, PlaceOrder(note="a"), f"k{number + 1}") for number in range(RIVALS)
    ]
    desk.harness.waits(1 if desk.harness.engine.dialect.name == "sqlite" else RIVALS)
    held.may_end.set()
    placed = [future.result(PATIENCE).result.number for future in futures]
    assert (placed, desk.orders()) == ([1, 0, 0, 0], ["a"])


@pytest.mark.by_turns
def test_no_number_is_given_twice(desk: Desk) -> None:
    """Four callers, two subjects, ten commands of each caller: numbers without a gap."""
    operation = desk.operation(next_number, lock=by_note)
    commands, start = desk.commands(retry=RetryPolicy(attempts=100, within=60)), threading.Barrier(4)

    def caller(name: int) -> list[tuple[str, int]]:
        start.wait(PATIENCE)
        given = []
        for number in range(10):
            note = "ab"[number % 2]
            answer = desk.handle(operation, PlaceOrder(note=note), f"{name}-{number}", commands)
            given.append((note, answer.result.number))
        return given

    futures = [desk.harness.start(caller, name) for name in range(4)]
    given = sorted(pair for future in futures for pair in future.result(2 * PATIENCE))
    assert given == [(note, number) for note in "ab" for number in range(1, 21)]


@pytest.mark.by_turns
def test_several_keys_in_any_order_do_not_deadlock(usual: Desk) -> None:
    """Each command is tried once only; 50 pairs. At READ COMMITTED, where nobody who has waited begins anew."""
    first, second = (usual.operation(place, f"desk.{name}", lock=by_notes) for name in ("one", "two"))
    level = {} if usual.harness.engine.dialect.name == "sqlite" else {"isolation": "READ COMMITTED"}
    commands = usual.commands(retry=RetryPolicy(attempts=1), **level)
    usual.handle(first, PlaceOrder(note="a,b"), "k", commands)
    both = threading.Barrier(2)

    def caller(operation: Any, note: str) -> None:
        for number in range(50):
            both.wait(PATIENCE)
            usual.handle(operation, PlaceOrder(note=note), f"{note}-{number}", commands)

    futures = [usual.harness.start(caller, *pair) for pair in ((first, "a,b"), (second, "b,a"))]
    for future in futures:
        future.result(4 * PATIENCE)
    assert (usual.spent(), len(usual.orders())) == (101, 101)


@pytest.mark.parametrize(
    ("note", "scope"), [("b", None), ("a", "another tenant")], ids=["another key", "another scope"]
)
def test_who_names_another_lock_does_not_wait(server: Desk, note: str, scope: str | None) -> None:
    """The holder is in its handler all the time."""
    if server.harness.subject.is_mysql:
        pytest.skip("at SERIALIZABLE the handler's own reads lock")
    held = Held(server, one_for_all)
    operation = server.operation(held, lock=by_note)
    first = server.harness.start(server.handle, operation, PlaceOrder(note="a"), "k0")
    assert held.entered.wait(PATIENCE)
    other = server.operation(next_number, "desk.other", lock=by_note)
    assert server.handle(other, PlaceOrder(note=note), "k1", scope=scope).result.number == 1
    held.may_end.set()
    assert first.result(PATIENCE).result.number == 1


def test_a_bounded_wait_ends_and_changes_nothing(usual: Desk) -> None:
    """Another operation of the same lock key waits, and hears that somebody is at it."""
    held = Held(usual, one_for_all)
    operation = usual.operation(held, lock=by_note)
    first = usual.harness.start(usual.handle, operation, PlaceOrder(note="a"), "k0")
    assert held.entered.wait(PATIENCE)
    other = usual.operation(next_number, "desk.other", lock=by_note)
    impatient = usual.commands(claim_timeout=0.3)
    with pytest.raises(InProgress, match="more than"):
        usual.handle(other, PlaceOrder(note="a"), "k1", impatient)
    held.may_end.set()
    first.result(PATIENCE)
    assert usual.handle(other, PlaceOrder(note="a"), "k1", impatient).result.number == 2


@pytest.mark.parametrize("isolation", ["READ COMMITTED", "REPEATABLE READ"])
def test_the_bound_is_one_for_all_keys(server: Desk, isolation: str) -> None:
    """Who has waited for the first key waits shorter for the second one, also where the transaction begins anew."""
    held, bounds = Held(server, one_for_all), list[float]()
    first = server.harness.start(server.handle, server.operation(held, lock=by_note), PlaceOrder(note="a"), "k0")
    assert held.entered.wait(PATIENCE)
    engine = server.harness.engine
    patient = server.commands(claim_timeout=PATIENCE, isolation=isolation)
    other = server.operation(next_number, "desk.other", lock=by_notes)

    @event.listens_for(engine, "before_execute")
    def note(_connection: Any, _statement: Any, _many: Any, parameters: Any, _options: Any) -> None:
        if parameters.get("handler") == LOCK:
            bounds.append(float(parameters["wait_ms"]))

    second = server.harness.start(server.handle, other, PlaceOrder(note="a,b"), "k1", patient)
    server.harness.waits(1)
    held.may_end.set()
    for future in (first, second):
        future.result(PATIENCE)
    event.remove(engine, "before_execute", note)
    assert len(bounds) >= 2
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[1] < bounds[0] <= PATIENCE * 1000


def test_a_holder_that_fails_frees_its_lock(usual: Desk) -> None:
    """Its turn leaves nothing."""
    held = Held(usual, one_for_all, raises=ZeroDivisionError())
    operation = usual.operation(held, lock=by_note)
    held.may_end.set()
    with pytest.raises(ZeroDivisionError):
        usual.handle(operation, PlaceOrder(note="a"), "k0")
    assert usual.handle(operation, PlaceOrder(note="a"), "k1").result.number == 1
    assert usual.orders() == ["a"]


def test_a_lock_costs_one_statement(postgresql: Database) -> None:
    """For each key, and a round trip for BEGIN, which the claim takes along else."""
    with metered(postgresql.url()) as meter:
        desk = Desk(meter.harness)
        desk.create_tables()
        plain, locked = desk.operation(one_for_all), desk.operation(one_for_all, "desk.locked", lock=by_notes)

        def costs(operation: Any, note: str) -> Any:
            asked = PlaceOrder(note=note)
            return meter.cost_of(lambda number, size: desk.handle(operation, asked, f"{note} {number} {size}"))

        without, one, two = costs(plain, "a"), costs(locked, "b"), costs(locked, "c,d")
    assert [each.statements - without.statements for each in (one, two)] == [1, 2]
    assert [each.trips - without.trips for each in (one, two)] == [2, 3], one.sent


def test_cleanup_deletes_locks_that_nobody_has_used_for_long(sync: Desk) -> None:
    """A lock is a row without an outcome."""
    sync.handle(sync.operation(place, lock=by_note), PlaceOrder(note="a"))
    assert sync.records()[0] == ("0:a", LOCK, None)
    sync.age()
    cleanup(sync.harness.engine, retention_hours=168, tables=default_command_tables)
    assert sync.records() == []


@pytest.mark.parametrize("key", [7, UUID(int=7), ("a", 7), [], "a"], ids=str)
def test_a_lock_key_is_a_text_an_int_or_a_uuid(sync: Desk, key: Any) -> None:
    """Or several; none locks nothing."""
    assert sync.handle(sync.operation(place, lock=lambda _: key)).result.number == 1
    several = key if isinstance(key, list | tuple) else [key]
    assert [stored for stored, name, _ in sync.records() if name == LOCK] == sorted(f"0:{each}" for each in several)


@pytest.mark.parametrize("key", [None, True, 1.5, b"a", {"a"}, [None]], ids=str)
def test_another_lock_key_is_refused_before_anything_runs(sync: Desk, key: Any) -> None:
    """By the name of the operation."""
    with pytest.raises(HandlerDefinitionError, match=r"lock= of desk\.place returned"):
        sync.handle(sync.operation(place, lock=lambda _: key))
    assert (sync.ran, sync.records()) == ([], [])


def test_where_a_lock_cannot_be_kept_it_is_refused(usual: Desk) -> None:
    """Without a key, in a transaction of the caller's, under the name of locks, and if it is no function."""
    operation = usual.operation(place, lock=by_note)
    with pytest.raises(InvalidKeyError, match="lock="):
        usual.handle(operation, key=None)
    begin: Any = abegin_command if usual.harness.asynchronous else begin_command
    with pytest.raises(HandlerDefinitionError, match="Commands"):
        usual.harness.run(begin, None, operation, PlaceOrder(), key="k")
    with pytest.raises(HandlerDefinitionError, match="locks"):
        usual.operation(place, LOCK)
    with pytest.raises(HandlerDefinitionError, match="function of the command"):
        usual.operation(place, lock="customer")
