"""Listeners on an engine's connections: attached once, all of them together, before any unit of work connects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any
from weakref import WeakSet

from sqlalchemy import event
from sqlalchemy.engine import Engine
from sqlalchemy.engine.interfaces import Dialect as EngineDialect

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
