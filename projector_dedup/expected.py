"""Claiming a message that is as those before it, by what is expected of it: that it is a duplicate, or asks for a row.

Where duplicates come close together, one looks for the marker first: on a connection for just that, which begins
nothing, in one round trip. What is committed is a duplicate for good; whatever else is there, the claim meets it. What
is likely to be new is claimed together with the row that its handler asks for (``first_row.py``).
"""

from __future__ import annotations

from functools import partial
from typing import Any

from sqlalchemy import NullPool
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.orm import Session

from .dialects import Dialect, Status
from .first_row import Learning, expected_row
from .guards import Guard
from .markers import insert_marker, insert_marker_and_read, is_known, refuse_shared_markers, translate_map
from .message import Message
from .plain import begins_unheard, has_options
from .sessions import UnitOptions, is_begun_by_claims


def may_look(session: Session, bind: object, options: UnitOptions) -> bool:
    """Whether a look is likely to spare a claim, and finds just what that would find."""
    return (
        isinstance(bind, Engine)
        and options.habits.on(bind).duplicates_follow
        and is_begun_by_claims(bind)
        and not isinstance(bind.pool, NullPool)  # which would connect for the look, and again for the claim
        and not bind.dispatch.set_connection_execution_options  # a look has none to set
        and not (session.in_transaction() or has_options(session))
        and begins_unheard(session)
    )


def look(connection: Connection, dialect: Dialect, options: UnitOptions, key: dict[str, Any]) -> bool:
    """Whether the message was applied. False too if a listener has begun a transaction, or sent something."""
    try:
        if not connection.in_transaction():
            connection.begin()
        refuse_shared_markers(translate_map(connection), options.tables)
        known = is_known(connection, dialect, options.tables, key) is True
    except BaseException:
        if not connection.invalidated and dialect.status(connection.connection.driver_connection) is Status.BUSY:
            connection.invalidate()  # interrupted: it could not be given back, and the error would be about that
        raise
    if known:
        options.habits.on(connection.engine).claimed(new=False)
    return known


def claim(guard: Guard, options: UnitOptions, key: dict[str, Any], message: Message, *, looked: bool) -> bool:
    """Claim the message, with the row that its handler will ask for, if it is likely to be new."""
    connection, dialect, tables = guard.connection, guard.dialect, options.tables
    habits = options.habits.on(connection.engine)
    likely_new = looked or not habits.duplicates_follow
    if likely_new and (row := expected_row(guard, habits, message)) is not None:
        new = row.claim(partial(insert_marker_and_read, connection, dialect, tables), key)
        guard.rows = row if new else None
    else:
        new = insert_marker(connection, dialect, tables, key)
        if new and habits.may_learn(message):
            guard.rows = Learning(guard, habits, message, tables.marker)
    habits.claimed(new=new)
    return new
