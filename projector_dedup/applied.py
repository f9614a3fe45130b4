"""Wait until handlers have applied a message, so that a client can read its own writes.

The markers answer: each look is one SELECT of the message's markers, in a session of its own. Between two looks the
waiter holds no connection.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol

from sqlalchemy import Select, Table, bindparam, select
from sqlalchemy.engine import Connection
from sqlalchemy.orm import Session

from .dialects import dialect_of
from .errors import HandlerDefinitionError, UnsafeSessionError
from .handler import Handler, may_share_messages, owner_of
from .markers import bind_of_marker, library_errors, refuse_shared_markers, translate_map
from .message import printable
from .opening import prepared
from .reentry import is_within_handler
from .tables import DedupTables
from .unit_of_work import close_session
from .waiting import Waiting

FIRST_PAUSE, LONGEST_PAUSE = 0.01, 0.25  # seconds


class OneFunction(Protocol):
    """A function projector, ``FunctionProjector``."""

    handler: Handler


Named = type[Any] | OneFunction | str
"""An entry of ``by``: a projector class, a function projector, the identity of a handler, or a projector's name."""


# The wait ---------------------------------------------------------------------------------------------------------


def wait_until_applied(
    factory: Any,
    tables: DedupTables,
    waiting: Waiting,
    message_id: str,
    wanted: Collection[frozenset[str]],
    wait: float,
) -> bool:
    """Return True as soon as the message has a marker under a name of each set in ``wanted``.

    Return False if that is not so ``wait`` seconds later, when the function looks for the last time.
    """
    deadline, pause = time.monotonic() + wait, FIRST_PAUSE
    while True:
        found = _handlers_that_applied(factory, tables, message_id, frozenset().union(*wanted))
        if all(names & found for names in wanted):
            return True
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        waiting.sleep(min(pause, left))
        pause = min(2 * pause, LONGEST_PAUSE)


def _handlers_that_applied(factory: Any, tables: DedupTables, message_id: str, names: frozenset[str]) -> set[str]:
    """Return those of ``names`` under which the message has a committed marker."""
    with _reading(factory, tables) as connection:
        refuse_shared_markers(translate_map(connection), tables)
        parameters = {"message_id": message_id, "handlers": sorted(names)}
        with library_errors(connection, dialect_of(connection), tables):
            return {*connection.scalars(_markers(tables.marker), parameters)}


@contextmanager
def _reading(factory: Any, tables: DedupTables) -> Iterator[Connection]:
    """Yield the connection of a new session, for one SELECT that waits for no lock. Close the session at the end."""
    made = factory()
    session: Session = made if isinstance(made, Session) else made.sync_session
    bind = bind_of_marker(session, tables)
    if is_within_handler(bind):
        raise UnsafeSessionError(
            "applied() was called inside a handler, on the handler's own engine: it would wait while the handler's "
            "transaction holds its locks, perhaps for a message that needs them; call it after the delivery"
        )
    if isinstance(bind, Connection):  # of a test, which sees its own transaction, and rolls it back
        yield bind
        return
    dialect = prepared(bind)
    session.begin()  # the factory may have autobegin=False
    taken: list[Connection] = []
    try:
        taken.append(session.connection(bind_arguments={"bind": bind}))  # after_begin may choose the tenant
        dialect.lock_nothing(taken[0])
        yield taken[0]
    finally:
        close_session(session, taken)  # what was read stays read


@cache
def _markers(marker: Table) -> Select[Any]:
    """Return the SELECT of those names in ``:handlers`` under which the message ``:message_id`` has a marker."""
    among = marker.c.handler.in_(bindparam("handlers", expanding=True))
    return select(marker.c.handler).where(marker.c.message_id == bindparam("message_id"), among)


# The arguments ----------------------------------------------------------------------------------------------------


def valid_timeout(timeout: object) -> float:
    """Return ``timeout``. Raise ``TypeError`` or ``ValueError`` unless it is a finite number of seconds from 0 on."""
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(f"timeout must be a number of seconds, not {timeout!r}")
    if not (math.isfinite(timeout) and timeout >= 0):
        raise ValueError(f"timeout must be a finite number of seconds, 0 or more, not {timeout!r}")
    return timeout


def names_to_find(handlers: Sequence[Handler], by: Named | Sequence[Named]) -> list[frozenset[str]]:
    """Return, for each entry of ``by``, the names of which one has a marker if the entry has applied a message.

    Raises ``HandlerDefinitionError`` if an entry is no handler of ``handlers``, or if markers cannot answer for it.
    """
    given: Any = by
    entries: Sequence[Named] = given if isinstance(given, (list, tuple)) else [given]
    if not entries:
        raise HandlerDefinitionError("by is empty; give the projectors to wait for, as in by=AccountTotals")
    return [_names(handlers, entry) for entry in entries]


def _names(handlers: Sequence[Handler], entry: Named) -> frozenset[str]:
    """Return the present and former names of all handlers of ``entry``, of which one takes a message."""
    its = [handler for handler in handlers if _is_of(handler, entry)]
    identities = [handler.identity for handler in its]
    if not its:
        raise HandlerDefinitionError(
            f"by={_shown(entry)}: this dispatcher has no such handler; it has "
            f"{', '.join(printable(handler.identity) for handler in handlers)}"
        )
    if not all(handler.idempotent for handler in its):
        raise HandlerDefinitionError(
            f"{identities[0]} is not idempotent, so it has no markers, and the library cannot find out which messages "
            "it has applied; write @projector(idempotent=True)"
        )
    if any(may_share_messages(one, other) for place, one in enumerate(its) for other in its[:place]):
        raise HandlerDefinitionError(
            f"several handlers of {_shown(entry)} may take the same message, and one of them may have applied it "
            f"before the others; name those to wait for by their identities: by={identities!r}"
        )
    return frozenset().union(*(handler.names for handler in its))


def _is_of(handler: Handler, entry: Named) -> bool:
    """True if ``entry`` names the handler, or its projector. Raises ``HandlerDefinitionError`` for what names none."""
    if isinstance(entry, str):
        return entry in (handler.identity, handler.owner)
    if isinstance(entry, type):
        return handler.owner == owner_of(entry)
    alone = getattr(entry, "handler", None)  # that of a FunctionProjector
    if isinstance(alone, Handler):
        return handler.identity == alone.identity
    raise HandlerDefinitionError(
        f"by takes projector classes, function projectors, and the names of handlers or projectors, not {entry!r}"
    )


def _shown(entry: Named) -> str:
    """Return the entry for an error message."""
    if isinstance(entry, str):
        return printable(repr(entry))
    return entry.__qualname__ if isinstance(entry, type) else entry.handler.identity
