"""Schedules: the order in which workers deliver messages, more than once, at the same time, and with faults.

A message is named by its position in the list of messages. `schedules` generates schedules from a seed, `is_allowed`
checks the order that the user's broker keeps, and `smaller` proposes simpler schedules that may fail in the same way.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Literal, NamedTuple

How = Literal["deliver", "burst", "batch", "beside"]
HOWS: tuple[How, ...] = ("deliver", "burst", "batch", "beside")
_AT_ONCE = ("burst", "beside")
_BURST = 4
_SIZES: dict[How, tuple[int, int]] = {"deliver": (1, 1), "burst": (2, _BURST), "batch": (2, 6), "beside": (3, 6)}


class Turn(NamedTuple):
    """One step of a schedule: messages that are delivered at the same time, some or all of them as one batch."""

    how: How
    messages: tuple[int, ...]
    fault: str | None = None  #: the fault in the first of these deliveries that comes to its step, once


Schedule = tuple[Turn, ...]


def split(how: How, messages: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    """Return the messages that are delivered as one batch, and those that are delivered alone at the same time."""
    if how == "beside":
        return messages[::2], messages[1::2]
    return (messages, ()) if how == "batch" else ((), messages)


def in_order(size: int) -> Schedule:
    """Return the schedule that delivers each message once, in the order of the list."""
    return tuple(Turn("deliver", (number,)) for number in range(size))


def schedules(
    size: int, keys: Sequence[Hashable] | None, hows: Sequence[How], faults: Sequence[str], seed: int, count: int
) -> Iterator[Schedule]:
    """Yield ``count`` generated schedules, after those that every check begins with.

    The first ones deliver each message once, each message twice, all messages in bursts, the second half of them in
    bursts, all messages as one batch, the second half of them as a batch beside others, and each message once with each
    fault in turn. ``keys`` has the key of each message whose order the broker keeps, or is None.
    """
    dice = random.Random(seed)  # noqa: S311  # repeatable; no secret
    plain = in_order(size)
    yield plain
    yield tuple(turn for turn in plain for _ in range(2))
    yield _bursts([*range(size)], keys)
    yield (*plain[: size // 2], *_bursts([*range(size // 2, size)], keys))  # the rows may be there by now
    if "batch" in hows:
        yield (Turn("batch", tuple(range(size))),)
    if "beside" in hows:
        yield (*plain[: size // 2], *_bursts([*range(size // 2, size)], keys, "beside"))
    for fault in faults:
        at = dice.randrange(size)
        yield tuple(Turn(turn.how, turn.messages, fault) if turn is plain[at] else turn for turn in plain)
    for _ in range(count):
        yield _generated(size, keys, hows, faults, dice)


def _bursts(stream: list[int], keys: Sequence[Hashable] | None, how: How = "burst") -> Schedule:
    turns = []
    while stream:
        length = _without_repeated_keys(stream[:_BURST], keys)
        turns.append(_of(Turn(how, ()), tuple(stream[:length])))
        stream = stream[length:]
    return tuple(turns)


def _generated(
    size: int, keys: Sequence[Hashable] | None, hows: Sequence[How], faults: Sequence[str], dice: random.Random
) -> Schedule:
    stream = _shuffled(size, dice) if keys is None else _replayed(keys, dice)
    turns = []
    while stream:
        how = dice.choice(("deliver", *hows))
        length = dice.randint(*_SIZES[how])
        if how in _AT_ONCE:
            length = _without_repeated_keys(stream[:length], keys)
        fault = dice.choice(faults) if dice.random() < 0.25 else None
        turns.append(_of(Turn(how, (), fault), tuple(stream[:length])))
        stream = stream[length:]
    return tuple(turns)


def _shuffled(size: int, dice: random.Random) -> list[int]:
    """Return each message one to three times, in any order."""
    stream = [number for number in range(size) for _ in range(dice.randint(1, 3))]
    dice.shuffle(stream)
    return stream


def _replayed(keys: Sequence[Hashable], dice: random.Random) -> list[int]:
    """Return the messages of each key in their order; at times the broker goes back and repeats some of them."""
    left = {key: list(numbers) for key, numbers in _by_key(keys).items()}
    done: dict[Hashable, list[int]] = defaultdict(list)
    stream = []
    while left:
        key = dice.choice(list(left))
        if done[key] and dice.random() < 0.3:
            back = dice.randint(1, len(done[key]))
            left[key] = done[key][-back:] + left[key]
            del done[key][-back:]
        stream.append(left[key].pop(0))
        done[key].append(stream[-1])
        if not left[key]:
            del left[key]
    return stream


def _by_key(keys: Sequence[Hashable]) -> dict[Hashable, list[int]]:
    found: dict[Hashable, list[int]] = defaultdict(list)
    for number, key in enumerate(keys):
        found[key].append(number)
    return found


def _without_repeated_keys(numbers: Sequence[int], keys: Sequence[Hashable] | None) -> int:
    """Return how many of the first messages have different keys; all of them, if no order is kept."""
    if keys is None:
        return len(numbers)
    seen: set[Hashable] = set()
    for length, number in enumerate(numbers):
        if keys[number] in seen:
            return length
        seen.add(keys[number])
    return len(numbers)


def is_allowed(schedule: Schedule, keys: Sequence[Hashable] | None) -> bool:
    """True if a broker that keeps the order of each key can deliver so: it may go back, and skips no message.

    The last messages of a key may be missing: they come later.
    """
    if keys is None:
        return True
    for turn in schedule:
        if turn.how in _AT_ONCE and _without_repeated_keys(turn.messages, keys) < len(turn.messages):
            return False
    stream = [number for turn in schedule for number in turn.messages]
    for numbers in _by_key(keys).values():
        rank = {number: at for at, number in enumerate(numbers)}
        last = furthest = -1
        for number in (each for each in stream if each in rank):
            if rank[number] > last + 1:
                return False
            last = rank[number]
            furthest = max(furthest, last)
        if last != furthest:
            return False
    return True


def is_reordered(schedule: Schedule) -> bool:
    """True if a message may come for the first time after one that is behind it in the list, or at the same time."""
    first = list(dict.fromkeys(number for turn in schedule for number in turn.messages))
    return first != sorted(first) or any(turn.how in _AT_ONCE and len({*turn.messages}) > 1 for turn in schedule)


def smaller(schedule: Schedule, *, may_drop: bool) -> Iterator[Schedule]:
    """Yield schedules that are one step simpler. With ``may_drop``, some of them leave out a message altogether."""
    numbers = sorted({number for turn in schedule for number in turn.messages})
    half = len(numbers) // 2
    for dropped in (numbers[:half], numbers[half:], *([each] for each in numbers)) if may_drop and half else ():
        yield tuple(left for turn in schedule if (left := _leave_out(turn, dropped)).messages)
    for at, turn in enumerate(schedule):
        before, after = schedule[:at], schedule[at + 1 :]
        simpler: list[Schedule] = [()]
        if turn.fault is not None:
            simpler.append((Turn(turn.how, turn.messages),))
        if len(turn.messages) > 1:
            simpler.append(tuple(Turn("deliver", (number,)) for number in turn.messages))
            simpler += [
                (_of(turn, turn.messages[:index] + turn.messages[index + 1 :]),) for index in range(len(turn.messages))
            ]
        for instead in simpler:
            found = (*before, *instead, *after)
            if may_drop or {number for each in found for number in each.messages} == set(numbers):
                yield found


def _leave_out(turn: Turn, dropped: Sequence[int]) -> Turn:
    return _of(turn, tuple(number for number in turn.messages if number not in dropped))


def _of(turn: Turn, messages: tuple[int, ...]) -> Turn:
    return Turn(turn.how if len(messages) > 1 else "deliver", messages, turn.fault)


def smallest(
    schedule: Schedule, candidates: Callable[[Schedule], Iterator[Schedule]], fails: Callable[[Schedule], bool]
) -> Schedule:
    """Return a schedule that fails, and of which no candidate fails."""
    at, since = 0, 0  # the next candidate, and how many candidates did not fail since the last one that did
    while since < len(found := [*candidates(schedule)]):
        at %= len(found)
        if found[at] and fails(found[at]):
            schedule, since = found[at], 0
        else:
            at, since = at + 1, since + 1
    return schedule
