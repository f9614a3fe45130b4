"""Give each handler, at each attempt, an event that nobody has changed: a copy of the object that the caller passed."""

from __future__ import annotations

import copy
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import EnumMeta
from fractions import Fraction
from functools import cached_property, lru_cache
from types import NoneType
from typing import Any, TypeVar
from uuid import UUID
from zoneinfo import ZoneInfo

from .errors import UncopyableError
from .message import Message, printable

T = TypeVar("T")

_ATOMS = frozenset(
    {str, bytes, int, float, bool, complex, NoneType, Decimal, Fraction, UUID, date, timedelta, timezone, ZoneInfo}
)
"""The exact types of values that nobody can change. A subclass may have attributes, so it is not one of them."""


class Originals:
    """The objects that a caller passed to one call of the library. Handlers get copies of them.

    An object that cannot be copied is handed out itself, once.
    """

    def __init__(self) -> None:
        self._handed_out: dict[int, Exception] = {}  # by the id of an object: why it could not be copied

    def event_of(self, message: Message, *, envelope: bool) -> Any:
        """Return a body of its own for a handler, or with ``envelope`` a message with such a body."""
        return self._own(message if envelope else message.body, message.body)

    def copy_of(self, given: T) -> T:
        """Return a copy of the object, or the object itself if everything inside it is immutable.

        Raises ``UncopyableError`` if the object cannot be copied, and was handed out before.
        """
        return self._own(given, given)

    def _own(self, given: T, changeable: object) -> T:
        """Return a copy of ``given``. Handlers may change ``changeable``, which is ``given`` or the body inside it."""
        if (reason := self._handed_out.get(id(changeable))) is None:
            try:
                return given if is_immutable(given) else copy.deepcopy(given, _sentinels(given))
            except Exception as error:  # noqa: BLE001  # a class of the user's may raise anything
                self._handed_out[id(changeable)] = error
                return given
        raise UncopyableError(
            f"the {type(changeable).__name__} was not handed out again: a handler got it before and may have changed "
            f"it, and it cannot be copied (copy.deepcopy raised {type(reason).__name__}: "
            f"{printable(str(reason))[:200]}). Let the broker redeliver the message, or call again with a new object. "
            "To let the library run handlers again by itself, define __deepcopy__ in the class, or pass plain data"
        ) from reason


def _sentinels(given: object) -> dict[int, Any]:
    """Return the sentinels inside ``given`` by their ids, which a handler recognises by ``is``: deepcopy keeps them.

    A sentinel is a bare ``object()``, or a default of a class that has no attributes, such as ``UNSET`` in
    ``name: object = UNSET``.
    """
    found: dict[int, Any] = {}
    seen: set[int] = set()
    left: list[Any] = [given]
    while left:
        value = left.pop()
        kind = type(value)
        if kind in _ATOMS or id(value) in seen:
            continue
        seen.add(id(value))
        if kind is object:
            found[id(value)] = value
        elif isinstance(value, dict):
            left += value.values()
        elif isinstance(value, (list, tuple, set, frozenset)):
            left += value
        elif not hasattr(kind, "__deepcopy__"):  # otherwise its class decides what a copy shares
            for name, inner in getattr(value, "__dict__", {}).items():
                is_default = any(vars(base).get(name) is inner for base in kind.__mro__)
                if is_default and not isinstance(inner, (list, dict, set)) and not getattr(inner, "__dict__", True):
                    found[id(inner)] = inner
                else:
                    left.append(inner)
    return found


def is_immutable(value: object) -> bool:
    """True if nobody can change the value, or anything inside it."""
    kind: Any = type(value)
    if kind in _ATOMS:
        return True
    if kind is tuple or kind is frozenset:
        return all(map(is_immutable, value))  # type: ignore[call-overload]  # it is a tuple or a frozenset
    if isinstance(value, (datetime, time)):
        return kind in (datetime, time) and type(value.tzinfo) in _ATOMS
    if _is_frozen(kind):
        state = object.__getstate__(value)  # attributes that are no fields, too
        parts = state if type(state) is tuple else (state,)
        return all(is_immutable(each) for part in parts if part for each in part.values())
    return isinstance(kind, EnumMeta)


@lru_cache(maxsize=1024)
def _is_frozen(kind: type[Any]) -> bool:
    """True if instances of the class never get another attribute: it and its bases are frozen dataclasses.

    A ``cached_property`` adds an attribute on its first use.
    """
    bases = kind.__mro__[:-1]
    return bool(bases) and all(
        getattr(vars(base).get("__dataclass_params__"), "frozen", False)
        and not any(isinstance(member, cached_property) for member in vars(base).values())
        for base in bases
    )
