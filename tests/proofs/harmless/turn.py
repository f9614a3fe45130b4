"""What a step of a program gets, and the registers of locks and works, which say what each of them is good for."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy.orm import Session
from sqlalchemy.util import await_only

from databases import ENGINES

from .tables import Model, Worth

PATIENCE = 150  # rounds of a loop that ends soon in a plain session

Event = Any
"""A dictionary, or a dataclass whose fields are read by `event["amount"]`, too."""


class EndlessError(Exception):
    """A loop of a handler, which ends in a plain session, does not end."""


def pause() -> None:
    """Let the others run, in a thread."""
    time.sleep(random.choice((0, random.random() / 1000)))


def pause_on_the_loop() -> None:
    """Let the others run, under asyncio."""
    await_only(asyncio.sleep(random.choice((0, random.random() / 1000))))


@dataclass(frozen=True)
class Turn:
    """One step of one message: its session and its event, the slot of the step, and how it lets others run."""

    session: Session
    event: Event
    slot: int
    pause: Callable[[], None]
    other: bool = False  # the second account of a transfer, from which the amount is taken

    @property
    def account(self) -> str:
        """The account that the step changes."""
        account: str = self.event["other" if self.other else "account"]
        return account

    @property
    def amount(self) -> int:
        """What the step adds to the account."""
        amount: int = self.event["amount"]
        return -amount if self.other else amount

    @property
    def key(self) -> tuple[int, str]:
        """The primary key of the step's row."""
        return self.slot, self.account

    def of(self, kind: Any) -> tuple[Any, Any]:
        """Return the conditions that find the step's rows in a table."""
        return kind.slot == self.slot, kind.account == self.account

    def until_done(self) -> Iterator[int]:
        """Count the rounds of a loop. Raises `EndlessError` for a loop that a plain session would have ended."""
        yield from range(PATIENCE)
        raise EndlessError(f"a loop of a handler has run {PATIENCE} times")


@dataclass(frozen=True)
class Lock:
    """A way to lock an account until the transaction ends."""

    name: str
    take: Callable[[Turn, str], object]
    engines: tuple[str, ...]
    weight: int = 4
    remains: str | None = None  # why the library cannot see the lock


def _own_worth(event: Event) -> Worth:
    return [(event["account"], event["amount"])]


@dataclass(frozen=True)
class Work:
    """Something that a handler does, the read models that it changes, and what a message is worth to them."""

    name: str
    run: Callable[[Turn], object]
    models: tuple[Model, ...]
    engines: tuple[str, ...] = ENGINES
    weight: int = 4
    worth: Callable[[Event], Worth] = _own_worth  # of one that changes its event: changes it in the same way
    once: bool = False  # its rows have no slot
    splits: bool = False  # has savepoints of its own, which are not put into another one
    changes_event: bool = False
    remains: str | None = None
    forms: tuple[str, ...] = field(default=("dict", "open", "frozen"))  # of events


LOCKS: list[Lock] = []
UNDER_LOCK: list[Work] = []  # right only if the account is locked
FREE: list[Work] = []  # right without a lock of the account
BETWEEN: list[Work] = []  # change nothing
CHANGES: list[Work] = []  # change the event in place


def lock(*engines: str, **settings: Any) -> Callable[[Callable[[Turn, str], object]], Callable[[Turn, str], object]]:
    """Register a way to lock an account."""

    def register(function: Callable[[Turn, str], object]) -> Callable[[Turn, str], object]:
        LOCKS.append(Lock(function.__name__, function, engines or ENGINES, **settings))
        return function

    return register


def work(register: list[Work], *models: Model, **settings: Any) -> Callable[[Callable[[Turn], object]], Any]:
    """Register something that a handler does."""

    def registered(function: Callable[[Turn], object]) -> Callable[[Turn], object]:
        register.append(Work(function.__name__, function, models, **settings))
        return function

    return registered
