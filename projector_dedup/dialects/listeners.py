"""Listeners on an engine's connections: ours, attached once and together, before any unit of work; and the user's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from threading import Lock
from typing import Any
from weakref import WeakSet

from sqlalchemy import event
from sqlalchemy.engine import Engine
from sqlalchemy.engine.interfaces import Dialect as EngineDialect

_PACKAGE = f"{__package__.partition('.')[0]}."

_lock = Lock()
_listened_to: WeakSet[EngineDialect] = WeakSet()  # which an engine's execution_options() clones share


def listen_once(engine: Engine, **listeners: Sequence[Callable[..., Any]]) -> None:
    """Attach ``listeners`` by the name of their event, unless they are.

    SQLAlchemy fails where it calls its listeners while another thread adds one: "deque mutated during iteration". So
    whoever comes second waits here until the first has added all, and connects only then.
    """
    with _lock:
        if engine.dialect not in _listened_to:
            for name, functions in listeners.items():
                for function in functions:
                    event.listen(engine, name, function)
            _listened_to.add(engine.dialect)


def are_of_others(events: Iterable[Iterable[object]]) -> bool:
    """Whether there are listeners but ours."""
    for listeners in events:
        for listener in listeners:
            if not (getattr(listener, "__module__", None) or "").startswith(_PACKAGE):
                return True
    return False
