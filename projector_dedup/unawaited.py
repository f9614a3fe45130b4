"""Note the calls of an AsyncSession, to find those that nobody has awaited to their end.

The guard looks at them before COMMIT. A coroutine of the handler's own that nobody awaits is not seen.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from types import CoroutineType
from typing import Any

from .asyncio_names import AsyncSession
from .guard import GuardedSession

_NOTING = "_projector_dedup_noting"  # the attribute of an AsyncSession class that has its noting subclass


def noting_class(session_class: type[AsyncSession]) -> type[AsyncSession]:
    """Return a subclass of the user's AsyncSession class that notes the calls that nobody has awaited."""
    if _NOTING not in vars(session_class):
        members = {name: inspect.getattr_static(session_class, name) for name in dir(session_class)}
        methods = {
            name: _noted(method)
            for name, method in members.items()
            if inspect.iscoroutinefunction(method) and not name.startswith("__")
        }
        setattr(session_class, _NOTING, type(f"Noting{session_class.__name__}", (session_class,), methods))
    noting: type[AsyncSession] = vars(session_class)[_NOTING]
    return noting


def _noted(method: Callable[..., CoroutineType[Any, Any, Any]]) -> Callable[..., CoroutineType[Any, Any, Any]]:
    @functools.wraps(method)
    def call(self: AsyncSession, *args: Any, **kwargs: Any) -> CoroutineType[Any, Any, Any]:
        coroutine, inner = method(self, *args, **kwargs), self.sync_session
        if isinstance(inner, GuardedSession):
            inner.unawaited.append(coroutine)
            if len(inner.unawaited) >= inner.forgets_at:
                inner.unawaited = inner.unfinished()
                inner.forgets_at = 2 * len(inner.unawaited) + 16
        return coroutine

    if sys.version_info >= (3, 12):  # for libraries that ask inspect.iscoroutinefunction
        inspect.markcoroutinefunction(call)
    return call
