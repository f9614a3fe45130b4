"""What is computed once for a class, and forgotten with it."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy.orm import Session

T = TypeVar("T")
C = TypeVar("C", bound=type[Session])
P = ParamSpec("P")


def kept_on_class(make: Callable[Concatenate[C, P], T]) -> Callable[Concatenate[C, P], T]:
    """As ``functools.cache`` for functions of a class, but forgotten with the class: every sessionmaker makes one."""
    attribute = f"_projector_dedup_{make.__name__}"

    @wraps(make)
    def find(target: C, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if attribute not in vars(target):
            setattr(target, attribute, {})
        kept: dict[tuple[Any, ...], T] = vars(target)[attribute]
        if args not in kept:
            kept[args] = make(target, *args, **kwargs)
        return kept[args]

    return find
