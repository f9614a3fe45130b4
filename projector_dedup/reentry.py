"""Deliveries inside a handler: refused on the handler's own database, where the second waits for the first for ever.

Whoever delivers waits for the inner transaction, which waits for a row or a marker that the outer one has locked, and
no database can see that circle: half of it is in this process (docs/adr/0026-delivering-inside-a-handler.md).
"""

from __future__ import annotations

from contextlib import suppress
from contextvars import ContextVar, Token
from typing import Self, TypeVar

from sqlalchemy.engine import Connection, Engine
from sqlalchemy.orm import Session

from .dialects import dialect_of
from .errors import UnsafeSessionError
from .guards import GuardedSession

B = TypeVar("B", bound=Engine | Connection)


class Handling:
    """Entered while a handler has the session of a unit of work, until its COMMIT.

    A task or thread that was started meanwhile in a copy of the context finds it too, and finds out when it ends.
    """

    __slots__ = ("_outer", "_session", "_token")

    def __init__(self, session: GuardedSession) -> None:
        self._session: GuardedSession | None = session

    def __enter__(self) -> Self:
        self._outer = _innermost.get()
        self._token: Token[Handling | None] = _innermost.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._session = None
        with suppress(ValueError):  # a coroutine that was given up is closed in the context of whoever drops it
            _innermost.reset(self._token)

    def forbids(self, bind: Engine | Connection, session: Session | None) -> bool:
        """True if another transaction on ``bind`` could wait for the handler's; ``session`` may be the handler's."""
        handlers = self._session  # another thread may end the handler meanwhile
        guard = handlers.guard if handlers is not None else None
        if guard is None or not guard.connection.in_transaction():  # the latter in listeners that hear of the COMMIT
            return False
        if session is not None and (session is handlers or bind is guard.connection):
            return False
        return is_same_database(guard.connection.engine, bind.engine)

    def around(self) -> Handling | None:
        """The handler on another database that has delivered to this one's."""
        return self._outer


_innermost: ContextVar[Handling | None] = ContextVar("projector_dedup_handling", default=None)


def outside_handlers(bind: B, session: Session | None = None) -> B:
    """Return ``bind``, or raise if a handler runs in this context on the same database.

    ``session`` is that of a claim by hand: in the handler's own transaction it may be made.
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
    return bind


def is_same_database(one: Engine, other: Engine) -> bool:
    """True if two engines reach one database, as far as their URLs say."""
    if one.pool is other.pool:
        return True
    place = dialect_of(one).place_of(one.url)
    return place is not None and place == dialect_of(other).place_of(other.url)
