"""Give connections back to their pool, so that none stays out of it where the server refuses ROLLBACK too.

SQLAlchemy's Session, and its Connection in older versions, sends ROLLBACK before it gives a connection back; if that
fails, the connection is never given back. A node of a cluster that has lost the others refuses every statement, by
MariaDB's error 1047: a few messages emptied a pool.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session


@contextmanager
def connected(engine: Engine) -> Iterator[Connection]:
    """A connection of the engine, rolled back in the end and given back; the first error is the one that is raised."""
    connection = engine.connect()
    try:
        yield connection
    except BaseException:
        with suppress(Exception):
            _close(connection)
        raise
    _close(connection)


def close_session(session: Session, connections: Iterable[Connection]) -> Exception | None:
    """Close the session. If that fails its ``connections`` are dropped, and the error is returned."""
    try:
        session.close()
    except BaseException as error:
        drop(connections)
        if not isinstance(error, Exception):
            raise
        return error
    return None


def is_loss(failure: Exception, error: BaseException) -> bool:
    """True if closing found that the connection was lost, of which ``error`` may be no more than a consequence."""
    return isinstance(failure, DBAPIError) and failure.connection_invalidated and isinstance(error, Exception)


def roll_back(connection: Connection) -> None:
    """Roll back below SQLAlchemy, which takes the transaction for ended; or drop the connection."""
    try:
        connection.connection.rollback()
    except Exception:  # noqa: BLE001  # what is open ends with the connection as well
        drop([connection])


def drop(connections: Iterable[Connection]) -> None:
    """Close the connections, and have their pool connect anew: what is open on them ends with them."""
    for connection in connections:
        with suppress(Exception):  # closed already, or its driver fails to hang up
            connection.invalidate()
        with suppress(Exception):
            connection.close()


def _close(connection: Connection) -> None:
    try:
        connection.close()
    except BaseException:
        drop([connection])
        raise
