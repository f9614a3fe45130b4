"""Refuse deliveries inside a handler on the handler's own database: the inner one could wait for ever.

Whoever delivers waits for the inner transaction, which waits for a row or a marker that the outer one has locked, and
no database can see that circle: half of it is in this process (docs/adr/0026-delivering-inside-a-handler.md).
"""

from __future__ import annotations

from contextlib import suppress
from contextvars import ContextVar, Token
from typing import Self

from sqlalchemy.engine import Connection, Engine
from sqlalchemy.orm import Session

from .dialects import dialect_of
from .errors import UnsafeSessionError
from .guards import GuardedSession


class Handling:
    """A note in the context of a thread or task: a handler has the session of a unit of work now, until its COMMIT.

    A task or thread that the handler starts in a copy of the context finds the note too, and also sees when it ends.
    """

    __slots__ = ("_outer", "_session", "_token")

    def __init__(self, session: Session) -> None:
        self._session: Session | None = session

    def __enter__(self) -> Self:
        self._outer = _innermost.get()
        self._token: Token[Handling | None] = _innermost.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._session = None
        with suppress(ValueError):  # an abandoned coroutine may be closed in another context than its own
            _innermost.reset(self._token)

    def forbids(self, bind: Engine | Connection, session: Session | None) -> bool:
        """True if another transaction on ``bind`` could wait for the handler's; ``session`` may be the handler's."""
        handlers = self._session  # another thread may end the handler meanwhile
        guard = handlers.guard if isinstance(handlers, GuardedSession) else None
        if guard is None or not guard.connection.in_transaction():  # ended, in a listener that hears of the COMMIT
            return False
        if session is not None and (session is handlers or bind is guard.connection):
            return False
        return is_same_database(guard.connection.engine, bind.engine)

    def around(self) -> Handling | None:
        """Return the note of the handler, on another database, that delivered to this one; None if there is none."""
        return self._outer


_innermost: ContextVar[Handling | None] = ContextVar("projector_dedup_handling", default=None)


def refuse_within_handler(bind: Engine | Connection, session: Session | None = None) -> None:
    """Raise ``UnsafeSessionError`` if a handler runs in this context on the database of ``bind``.

    ``session`` is that of a ``claim()`` by hand, which is allowed in the handler's own transaction.
    """
    handling = _innermost.get()
    while handling is not None:
        if handling.forbids(bind, session):
            raise UnsafeSessionError(
                "a delivery, unit of work or claim inside a handler, on the handler's own database: it could wait for "
                "ever for what the handler's transaction has locked. Deliver after the handler has returned and the "
                "outer delivery is through; or write an outbox row in this handler, and deliver from that table"
            )
        handling = handling.around()


def is_same_database(one: Engine, other: Engine) -> bool:
    """True if two engines reach one database, as far as their URLs say."""
    if one.pool is other.pool:
        return True
    place = dialect_of(one).place_of(one.url)
    return place is not None and place == dialect_of(other).place_of(other.url)
