"""An operation that is renamed: code of both names runs at once, and a command is still done once."""

from typing import Any

import pytest
from sqlalchemy.orm import Session

from command_rig import SQLITE, USUAL_ONES, Desk, PlaceOrder, desks
from databases import DRIVERS
from projector_dedup.commands import AsyncCommands, Call, Commands, Handled, begin_command, command
from projector_dedup.commands.errors import InvalidKeyError
from projector_dedup.errors import HandlerDefinitionError, RefusedError

desk = desks(DRIVERS)
on_sqlite = desks(SQLITE, "on_sqlite")
usual = desks([driver for driver in USUAL_ONES if driver.engine == "sqlite"], "usual")


def test_old_and_new_code_give_each_others_answers(desk: Desk) -> None:
    """Whichever of them was first; and the newest, which has forgotten the old name, finds what the new one made."""
    old = desk.operation(name="desk.old")
    new = desk.operation(name="desk.new", formerly=["desk.old"])
    newest = desk.operation(name="desk.new")
    first = desk.handle(old, PlaceOrder(1), key="k1")
    second = desk.handle(new, PlaceOrder(2), key="k2")
    assert desk.handle(new, PlaceOrder(1), key="k1").result == first.result
    assert desk.handle(old, PlaceOrder(2), key="k2").result == second.result
    assert desk.handle(newest, PlaceOrder(2), key="k2").result == second.result
    assert (sorted(desk.orders()), desk.spent()) == (["k1", "k2"], 3)
    assert all(outcome == 1 for *_, outcome in desk.records())


def test_a_duplicate_in_the_callers_transaction_leaves_no_record_without_an_outcome(desk: Desk) -> None:
    """Where its claim has inserted the new name, that one gets the answer too."""
    if desk.harness.asynchronous:
        pytest.skip("begin_command() is for a Session")
    old = desk.operation(name="desk.old")
    new = desk.operation(name="desk.new", formerly=["desk.old"])
    first = desk.handle(old)
    with desk.harness.factory() as session:
        answer = begin_command(session, new, PlaceOrder(), key="k1")
        assert isinstance(answer, Handled)
        assert answer.result == first.result
        session.commit()
    assert all(outcome == 1 for *_, outcome in desk.records())


# What @command and handle() refuse -----------------------------------------------------------------------------------


def sync_one(order: PlaceOrder, call: Call) -> None:
    """Do nothing."""


async def async_one(order: PlaceOrder, call: Call) -> None:
    """Do nothing."""


class Shop:
    """A class whose methods are operations."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix

    @command(name="shop.note")
    def note(self, order: PlaceOrder, call: Call) -> str:
        """Return a text of the shop's."""
        return f"{self.prefix} {order.note} {call.key}"


def test_a_method_is_an_operation_of_its_object(on_sqlite: Desk) -> None:
    """It is handled as one of an object, and called as it was written."""
    shop = Shop("from")
    assert shop.note(PlaceOrder(note="me"), Call(Session(), key="k")) == "from me k"
    assert on_sqlite.handle(shop.note, PlaceOrder(note="me")).result == "from me k1"
    with pytest.raises(HandlerDefinitionError, match="a method"):
        on_sqlite.handle(Shop.note, PlaceOrder(note="me"))


def test_an_operation_goes_to_the_commands_of_its_kind(usual: Desk) -> None:
    """A coroutine that nobody awaits would be a command that nobody does."""
    declared: Any = command(name="x")
    wrong = declared(sync_one if usual.harness.asynchronous else async_one)
    with pytest.raises(HandlerDefinitionError, match=r"use (Async)?Commands for it"):
        usual.handle(wrong)
    with pytest.raises(HandlerDefinitionError, match="@command"):
        usual.handle(sync_one)


@pytest.mark.parametrize(
    "settings", [{"read_models": [int]}, {"key": "maybe"}, {"name": ""}, {"name": "x" * 256}, {"formerly": "one"}]
)
def test_wrong_settings_are_refused(settings: dict[str, object]) -> None:
    """At the decoration."""
    with pytest.raises(RefusedError):
        command(**settings)(sync_one)  # type: ignore[arg-type]


class Awaited:
    """An object that is called like an ``async def``."""

    async def __call__(self, order: PlaceOrder, call: Call) -> None:
        """Do nothing."""


@pytest.mark.parametrize(
    ("function", "default", "told"),
    [
        (sync_one, async_one, "plain def"),
        (sync_one, Awaited(), "plain def"),
        (async_one, sync_one, "async def"),
        (sync_one, lambda _self, _order, _call: None, r"\(command, call\)"),
        (sync_one, "present", r"\(command, call\)"),
        (sync_one, max, r"\(command, call\)"),
    ],
    ids=["async for sync", "async object for sync", "sync for async", "a method", "no function", "a builtin"],
)
def test_a_default_that_does_not_fit_is_refused(function: Any, default: Any, told: str) -> None:
    """At the decoration, and not when the first caller asks again."""
    with pytest.raises(HandlerDefinitionError, match=told):
        command(name="x", default=default)(function)


@pytest.mark.parametrize("misplaced", [sync_one, "accounts.credit"], ids=["no parentheses", "a name without name="])
def test_a_decorator_that_is_written_wrongly_says_how_to_write_it(misplaced: Any) -> None:
    """Type checkers say so, too."""
    with pytest.raises(HandlerDefinitionError, match=r"with parentheses and .*: @command\(\) or @command\(name="):
        command(misplaced)


def test_functions_that_cannot_be_called_so_are_refused() -> None:
    """Too few arguments, too many, a generator, a class, and one without an identity that lasts."""

    def local(order: PlaceOrder, call: Call) -> None:
        """Do nothing."""

    with pytest.raises(HandlerDefinitionError, match="give it a fixed name"):
        command()(local)
    declared: Any = command(name="x")
    for wrong in (lambda: None, lambda _a, _b, _c, _d: None):
        with pytest.raises(HandlerDefinitionError):
            declared(wrong)
    with pytest.raises(HandlerDefinitionError, match="a function"):
        declared(Shop)
    assert command()(sync_one).identity == f"{__name__}.sync_one"


@pytest.mark.parametrize("kind", [Commands, AsyncCommands])
def test_a_session_instead_of_a_factory_is_refused(kind: Any) -> None:
    """As by a dispatcher."""
    with pytest.raises(RefusedError):
        kind(Session())
    assert issubclass(InvalidKeyError, ValueError)
