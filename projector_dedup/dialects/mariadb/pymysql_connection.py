"""Make a PyMySQL connection close when it is interrupted, and send no ROLLBACK behind a COMMIT or a ROLLBACK.

PyMySQL takes whatever comes next on the line for the answer to its last command. When a signal handler raises after the
command was sent, SQLAlchemy discards the connection, but not for every exception and not wherever it talks to the
database; then each later statement gets the answer to the one before it (tests/delivery/test_interrupts.py).

Whenever a connection goes back to its pool, SQLAlchemy sends ROLLBACK. Right behind the end of a transaction that is a
round trip for nothing. psycopg knows that, PyMySQL does not (docs/adr/0019-what-a-message-costs.md).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

IN_TRANSACTION = 1  # SERVER_STATUS_IN_TRANS of the client-server protocol


def careful(dbapi_connection: Any, _record: object, _proxy: object) -> None:
    """Change the class of a PyMySQL connection to the careful one. This is a listener to ``checkout``."""
    connection_class: Any = type(dbapi_connection)
    dbapi_connection.__class__ = _careful(connection_class)


@cache
def _careful(connection_class: Any) -> Any:
    if hasattr(connection_class, "_to_its_answer"):
        return connection_class

    class Careful(connection_class):  # type: ignore[misc]  # of a driver that is perhaps not installed
        _ended = False  # the transaction, by the last command that was sent

        def query(self, *args: Any, **kwargs: Any) -> Any:
            self._ended = False
            return self._to_its_answer(super().query, *args, **kwargs)

        def commit(self) -> None:
            self._to_its_answer(super().commit)
            self._ended = True

        def rollback(self) -> None:
            if self._ended and self.open and not self.server_status & IN_TRANSACTION:
                return
            self._to_its_answer(super().rollback)
            self._ended = True

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

    return Careful
