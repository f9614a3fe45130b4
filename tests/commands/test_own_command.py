"""The function of a command gets a command that no earlier attempt has changed."""

from dataclasses import dataclass
from threading import Lock
from typing import Any

import pytest

from command_rig import USUAL_ONES, Desk, Placed, PlaceOrder, desks, place
from projector_dedup.commands import Call
from projector_dedup.errors import UncopyableError
from projector_dedup.options import RetryPolicy
from projector_dedup.verdict import Action, verdict_of

desk = desks(USUAL_ONES)


class Conflict(Exception):  # noqa: N818
    """A conflict on every database, by ``RetryPolicy(also=...)``."""


AGAIN = RetryPolicy(also=(Conflict,), base=0)


@dataclass
class Asked:
    """A command that its function can change."""

    amount: int


class Held(Asked):
    """A command that cannot be copied."""

    def __init__(self, amount: int) -> None:
        super().__init__(amount)
        self.lock = Lock()


class Fails:
    """A function that places an order in cents, converted in the command itself, and fails on its first run."""

    def __init__(self) -> None:
        self.failures = [Conflict()]

    def __call__(self, asked: Any, call: Call) -> Placed:
        """Change the command, and place the order."""
        asked.amount *= 100
        placed = place(PlaceOrder(asked.amount), call)
        if self.failures:
            raise self.failures.pop()
        return placed


def test_the_second_attempt_gets_the_command_as_it_was(desk: Desk) -> None:
    """After a conflict the function gets a copy of the caller's command, which nobody has changed."""
    asked = Asked(3)
    desk.handle(desk.operation(Fails()), asked, commands=desk.commands(retry=AGAIN))
    assert (desk.orders(), desk.spent()) == (["k1"], 300)
    assert asked == Asked(3)


def test_a_command_that_cannot_be_copied_is_not_run_again(desk: Desk) -> None:
    """An error says why, nothing is recorded, and a consumer lets the broker redeliver the command."""
    operation = desk.operation(Fails(), fingerprint=lambda asked: asked.amount)
    commands = desk.commands(retry=AGAIN)
    with pytest.raises(UncopyableError, match="the Held was not handed out again") as raised:
        desk.handle(operation, Held(3), commands=commands)
    assert (desk.orders(), desk.records()) == ([], [])
    assert verdict_of(raised.value).action is Action.RETRY_LATER
    desk.handle(operation, Held(3), commands=commands)
    assert (desk.orders(), desk.spent()) == (["k1"], 300)


def test_default_gets_the_command_as_it_was(desk: Desk) -> None:
    """A ``default=`` that changes the command, and runs again, begins with the command of the caller."""
    failures = [Conflict()]

    def present(asked: Asked, _call: Any) -> int:
        asked.amount *= 100
        if failures:
            raise failures.pop()
        return asked.amount

    async def present_later(asked: Asked, call: Any) -> int:
        return present(asked, call)

    default = present_later if desk.harness.asynchronous else present
    operation = desk.operation(lambda _asked, _call: 1, default=default)
    commands = desk.commands(retry=AGAIN)
    desk.handle(operation, Asked(3), commands=commands)
    assert desk.handle(operation, Asked(3), commands=commands).result == 300
