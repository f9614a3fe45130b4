"""The API of commands as type checkers see it: checked by `tests/core/test_types.py`, never imported."""

from dataclasses import dataclass
from typing import Any, assert_type

from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session, sessionmaker

from projector_dedup import Outcome
from projector_dedup.commands import (
    AsyncBegun,
    AsyncCall,
    AsyncCommand,
    AsyncCommands,
    Begun,
    Call,
    Command,
    Commands,
    Handled,
    Rejection,
    abegin_command,
    begin_command,
    command,
)


@dataclass
class Place:
    """A command."""

    amount: int


@dataclass
class Placed:
    """Its result."""

    number: int


@command(name="place")
def place(order: Place, call: Call) -> Placed:
    """An operation."""
    assert_type(call.session, Session)
    return Placed(order.amount)


@command(name="place-or-not")
def place_or_not(order: Place, call: Call) -> Placed | Rejection:
    """Another, which may refuse."""
    assert_type(call.key, str | None)
    return Placed(1) if order.amount else Rejection("nothing")


@command(name="later")
async def place_later(order: Place, call: AsyncCall) -> Placed | Rejection:
    """Another, which is awaited."""
    assert_type(call.session, AsyncSession)
    return Placed(1)


class Shop:
    """A class with operations."""

    @command(name="note")
    def note(self, order: Place, call: Call) -> str:
        """A method."""
        return "noted"

    @command(name="note-later")
    async def note_later(self, order: Place, call: AsyncCall) -> str:
        """Another."""
        return "noted"


def sync_api(factory: sessionmaker[Session], session: Session, order: Place) -> None:
    """Everything that is not awaited."""
    commands = Commands(factory)
    assert_type(place, Command[Place, Placed])
    answer = commands.handle(place, order, key="k", scope="t")
    assert_type(answer, Handled[Placed])
    assert_type(answer.result, Placed)
    assert_type(answer.outcome, Outcome)
    assert_type(commands.handle(place_or_not, order, key=None), Handled[Placed])
    assert_type(commands.handle(Shop().note, order, key="k"), Handled[str])
    begun = begin_command(session, place, order, key="k")
    assert_type(begun, Begun[Placed] | Handled[Placed])


async def async_api(factory: async_sessionmaker[AsyncSession], session: AsyncSession, order: Place) -> None:
    """Everything that is awaited."""
    commands = AsyncCommands(factory)
    assert_type(place_later, AsyncCommand[Place, Placed])
    assert_type(await commands.handle(place_later, order, key="k"), Handled[Placed])
    assert_type(await commands.handle(Shop().note_later, order, key="k"), Handled[str])
    begun = await abegin_command(session, place_later, order, key="k")
    assert_type(begun, AsyncBegun[Placed] | Handled[Placed])


def unused() -> Any:
    """Nothing."""
    return sync_api, async_api
