"""Programs: the handlers that are drawn from a seed, their messages, and what the read models must hold afterwards."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from sqlalchemy.orm import Session

from . import locks, works  # noqa: F401  # they register themselves
from .tables import ACCOUNTS, INSERTED, Model, Slots, Worth
from .turn import BETWEEN, CHANGES, FREE, LOCKS, UNDER_LOCK, Event, Lock, Turn, Work

MESSAGES = 24
UNSORTED = "locks in an order that deadlocks"

T = TypeVar("T", Lock, Work)


@dataclass
class Open:
    """An event that may be changed."""

    number: int
    account: str
    other: str
    amount: int
    lines: list[dict[str, Any]]
    note: str

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self, name, value)


@dataclass(frozen=True)
class Frozen:
    """An event that may not be changed, but for the list inside."""

    number: int
    account: str
    other: str
    amount: int
    lines: list[dict[str, Any]]
    note: str

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


FORMS: dict[str, Callable[..., Event]] = {"dict": dict, "open": Open, "frozen": Frozen}


@dataclass(frozen=True)
class Part:
    """A work in a program: the slot of its rows, and the savepoint around it, if any."""

    work: Work
    slot: int
    around: str = ""  # "savepoint"; "undone": done in a savepoint that is rolled back, and then done again

    def __str__(self) -> str:
        return self.work.name + (f" ({self.around})" if self.around else "")


@dataclass(frozen=True)
class Group:
    """What a handler does behind one lock, or without one, with some of its messages."""

    parts: tuple[Part, ...]
    lock: Lock | None = None
    both: bool = False  # a transfer between two accounts
    unsorted: bool = False
    every: int = 1  # with each message whose number this divides

    def __str__(self) -> str:
        some = "" if self.every == 1 else f"every {self.every}: "
        accounts = " both" if self.both else ""
        taken = f"{self.lock.name}{accounts}{' unsorted' if self.unsorted else ''} > " if self.lock else ""
        return some + taken + ", ".join(map(str, self.parts))

    def takes(self, event: Event) -> bool:
        """True if the handler comes here with this message."""
        return bool(event["number"] % self.every == 0)


@dataclass(frozen=True)
class Program:
    """One handler or two, and the events that are delivered to them.

    `second` is the number of the group with which the second handler begins, 0 if there is none. If the program
    `listens`, a listener of its sessions reads before the handler does. The handlers fail at the messages in `poison`,
    after they have done everything else.
    """

    seed: int
    engine: str
    groups: tuple[Group, ...]
    form: str
    accounts: int
    second: int = 0
    listens: bool = False
    poison: tuple[int, ...] = ()

    def __str__(self) -> str:
        handlers = " | ".join("; ".join(map(str, groups)) for groups in self.handlers)
        more = ", listens" * self.listens + f", poison {self.poison}" * bool(self.poison)
        return f"{self.seed} ({self.form}, {self.accounts} accounts{more}): {handlers}"

    @property
    def handlers(self) -> list[tuple[Group, ...]]:
        """The groups of each handler."""
        return [self.groups[: self.second], self.groups[self.second :]] if self.second else [self.groups]

    @property
    def parts(self) -> list[Part]:
        """The works, in their order."""
        return [part for group in self.groups for part in group.parts]

    @property
    def changes_event(self) -> bool:
        """True if the handler changes its event in place."""
        return any(part.work.changes_event for part in self.parts)

    @property
    def remains(self) -> str | None:
        """Why the library does not promise that this handler is right, or None."""
        reasons = [group.lock.remains for group in self.groups if group.lock]
        reasons += [part.work.remains for part in self.parts]
        reasons += [UNSORTED for group in self.groups if group.unsorted]
        return next(filter(None, reasons), None)

    @property
    def slots(self) -> Slots:
        """The slots that have rows of each read model."""
        found: dict[Model, list[int]] = defaultdict(list)
        for slot, model in self._models():
            found[model].append(slot)
        return found

    def event(self, number: int) -> Event:
        """Return the event of a message, anew in each call."""
        dice = random.Random(f"event {self.seed} {number}")
        account, other = ACCOUNTS[:2]
        if self.accounts == 2:
            account, other = dice.sample((account, other), 2)
        elif self.accounts > 2:  # one after the other, so that rows are created all the time
            place = number * self.accounts // MESSAGES
            account, other = ACCOUNTS[place], ACCOUNTS[(place + 1) % self.accounts]
        amounts = [dice.choice((1, 2, 3, -1, None)) for _ in range(3)]
        return FORMS[self.form](
            number=number,
            account=account,
            other=other,
            amount=dice.randint(1, 9),
            lines=[{"amount": amount} for amount in amounts],
            note="n",
        )

    def run(self, handler: int, event: Event, session: Session, pause: Callable[[], None]) -> None:
        """Run a handler."""
        for group in self.handlers[handler]:
            if not group.takes(event):
                continue
            turns = [Turn(session, event, -1, pause, other) for other in (False, True)[: 1 + group.both]]
            if group.lock is not None:
                wanted = [turn.account for turn in turns]
                for account in wanted if group.unsorted else sorted(wanted):
                    group.lock.take(turns[0], account)
                pause()
            for part in group.parts:
                for turn in turns:
                    _run(part, replace(turn, slot=part.slot))
                    pause()

        if event["number"] in self.poison:
            raise PoisonError("as it is meant")

    def expected(self, numbers: Sequence[int]) -> dict[tuple[int, str], Any]:
        """Return what each read model must hold after the messages with these numbers, whatever their order.

        Those in `poison` are worth nothing.
        """
        worth: dict[int, list[tuple[str, int]]] = {part.slot: [] for part in self.parts}
        for number in set(numbers).difference(self.poison):
            for groups in self.handlers:
                for slot, own in _worth(groups, self.event(number)):
                    worth[slot].extend(own)
        return {(slot, model.name): model.expected(worth[slot]) for slot, model in self._models()}

    def found(self, session: Session) -> dict[tuple[int, str], Any]:
        """Return what each read model holds."""
        return {(slot, model.name): model.found(session, slot) for slot, model in self._models()}

    def _models(self) -> Iterator[tuple[int, Model]]:
        for part in self.parts:
            for model in part.work.models:
                yield part.slot, model


def _worth(groups: Sequence[Group], event: Event) -> Iterator[tuple[int, Worth]]:
    """Return what a message is worth to each slot of a handler, whose changes of the event the next works see."""
    for group in groups:
        for part in group.parts if group.takes(event) else ():
            own = part.work.worth(event)
            yield part.slot, own
            if group.both:
                yield part.slot, [(event["other"], -amount) for _, amount in own]


class PoisonError(Exception):
    """A handler fails at a message, whoever runs it."""


class _UndoneError(Exception):
    pass


def _run(part: Part, turn: Turn) -> None:
    if part.around == "undone":
        try:
            with turn.session.begin_nested():
                part.work.run(turn)
                turn.session.flush()
                raise _UndoneError
        except _UndoneError:
            pass
    if part.around == "savepoint":
        with turn.session.begin_nested():
            part.work.run(turn)
    else:
        part.work.run(turn)


# The draw -------------------------------------------------------------------------------------------------------------

SHAPES = {  # what the groups of a program are: behind a (l)ock, or (f)ree; and how often
    "postgresql": {"l": 6, "ll": 2, "lf": 5, "fl": 4, "f": 1, "ff": 5, "fff": 2},
    "mariadb": {"l": 9, "ll": 2, "lf": 7, "fl": 1, "f": 1, "ff": 4, "fff": 1},
    "sqlite": {"l": 9, "ll": 3, "lf": 6, "fl": 2, "f": 1, "ff": 3, "fff": 1},
}


def draw(engine: str, seed: int) -> Program:
    """Draw a program for a database."""
    return _Draw(engine, seed).program()


USUAL_LOCK = {"postgresql": "select_for_update", "mariadb": "select_for_update", "sqlite": "touch_by_bulk"}


def each(engine: str) -> list[Program]:
    """Return a small program for each lock, and for each work: alone, behind a lock, and undone and done again."""
    ledger = Part(next(work for work in UNDER_LOCK if work.name == "ledger"), 0)
    able = [lock for lock in LOCKS if engine in lock.engines]
    usual = next(lock for lock in able if lock.name == USUAL_LOCK[engine])
    groups = [Group((ledger,), lock, both) for lock in able for both in (False, True)]
    for work in (work for work in UNDER_LOCK if engine in work.engines):
        groups += [Group((Part(work, 0, around),), usual) for around in (("",) if work.splits else ("", "undone"))]
    groups += [Group((Part(work, 0),)) for work in FREE if engine in work.engines]
    return [Program(number, engine, (group,), "dict", 2 if group.lock else 4) for number, group in enumerate(groups)]


class _Draw:
    def __init__(self, engine: str, seed: int) -> None:
        self.engine, self.seed = engine, seed
        self.dice = random.Random(f"{engine} {seed}")
        self.slot = 0
        self.only_inserts = False
        self.once = False
        self.form = self.dice.choices(("dict", "open", "frozen"), (6, 2, 2))[0]

    def program(self) -> Program:
        shapes = SHAPES[self.engine]
        shape = self.dice.choices(list(shapes), list(shapes.values()))[0]
        self.only_inserts = "f" not in shape and self.dice.random() < 0.7
        groups = [self._locked(alone=shape == "l") if kind == "l" else self._free() for kind in shape]
        if self.dice.random() < 0.12:
            change = self._part(self._one([each for each in CHANGES if self.form in each.forms]))
            groups.insert(self.dice.randrange(len(groups)), Group((change,)))
        if self.engine == "postgresql" and "l" in shape and self.dice.random() < 0.1:
            groups.insert(0, Group((self._part(self._one(BETWEEN)),)))
        second = self.dice.randrange(1, len(groups)) if len(groups) > 1 and self.dice.random() < 0.15 else 0
        listens = self.engine == "postgresql" and self.dice.random() < 0.08
        accounts = self.dice.choice((1, 2, 4))
        poison = tuple(self.dice.sample(range(MESSAGES), 2)) if self.dice.random() < 0.12 else ()
        return Program(self.seed, self.engine, tuple(groups), self.form, accounts, second, listens, poison)

    def _locked(self, *, alone: bool) -> Group:
        lock = self._one(LOCKS)
        number = self.dice.choice((1, 2, 3)) if alone else self.dice.choice((1, 1, 2))
        both = self.dice.random() < 0.15
        parts = []
        for _ in range(number):
            if self.dice.random() < 0.2:
                parts.append(self._part(self._one(BETWEEN)))
            candidates = [each for each in UNDER_LOCK if not (each.splits and both)]
            if self.only_inserts:
                candidates = [each for each in candidates if set(each.models) <= set(INSERTED)]
            parts.append(self._part(self._one(candidates)))
        return Group(
            tuple(parts),
            lock,
            both,
            unsorted=both and self.dice.random() < 0.15,
            every=self.dice.choice((1, 1, 1, 1, 1, 2)),
        )

    def _free(self) -> Group:
        parts = [self._part(self._one(FREE))]
        if self.dice.random() < 0.2:
            parts.insert(self.dice.randrange(2), self._part(self._one(BETWEEN)))
        return Group(tuple(parts), every=self.dice.choice((1, 1, 1, 1, 1, 1, 2)))

    def _part(self, work: Work) -> Part:
        around = ""
        if work.models and not work.splits and self.dice.random() < 0.12:
            around = self.dice.choice(("savepoint", "undone"))
        self.slot += 1
        self.once |= work.once
        return Part(work, self.slot - 1, around)

    def _one(self, register: list[T]) -> T:
        able = [each for each in register if self.engine in each.engines]
        if self.once:
            able = [each for each in able if not getattr(each, "once", False)]
        return self.dice.choices(able, [each.weight for each in able])[0]
