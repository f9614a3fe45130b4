"""A PyMySQL connection that closes when it is interrupted between a command and its answer.

PyMySQL takes whatever comes next on the line for the answer to its last command. When a signal handler raises after the
command was sent, SQLAlchemy discards the connection, but not for every exception and not wherever it talks to the
database; then each later statement is told the outcome of the one before it (tests/test_interrupts.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any


def close_when_interrupted(dbapi_connection: Any, _record: object, _proxy: object) -> None:
    """A listener: from here on, this connection is not used on with an answer unread."""
    connection_class: Any = type(dbapi_connection)
    dbapi_connection.__class__ = _closing(connection_class)


@cache
def _closing(connection_class: Any) -> Any:
    if hasattr(connection_class, "_to_its_answer"):
        return connection_class

    class Closing(connection_class):  # type: ignore[misc]  # of a driver that is perhaps not installed
        def query(self, *args: Any, **kwargs: Any) -> Any:
            return self._to_its_answer(super().query, *args, **kwargs)

        def commit(self) -> Any:
            return self._to_its_answer(super().commit)

        def rollback(self) -> Any:
            return self._to_its_answer(super().rollback)

        def ping(self, *args: Any, **kwargs: Any) -> Any:
            return self._to_its_answer(super().ping, *args, **kwargs)

        def _to_its_answer(self, talk: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            try:
                return talk(*args, **kwargs)
            except self.Error:  # an answer, or the loss of the connection
                raise
            except BaseException:
                self._force_close()  # as PyMySQL itself does when it is interrupted while it reads; close() would talk
                raise

    return Closing
