"""Give connections back to their pool, also where the server refuses even ROLLBACK.

SQLAlchemy's Session, and its Connection in older versions, sends ROLLBACK before it gives a connection back; if that
fails, the connection is never given back. A node that has lost the rest of its cluster refuses every statement (error
1047 of MariaDB): a few messages emptied a pool there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from sqlalchemy.engine import Connection, Engine


@contextmanager
def connected(engine: Engine) -> Iterator[Connection]:
    """Yield a connection of ``engine``; roll it back and give it back in the end. The first error is the one raised."""
    connection = engine.connect()
    try:
        yield connection
    except BaseException:
        with suppress(Exception):
            _close(connection)
        raise
    _close(connection)


def roll_back(connection: Connection) -> None:
    """Send ROLLBACK by the driver, past SQLAlchemy, which takes the transaction for ended.

    If that fails, the connection is dropped.
    """
    try:
        connection.connection.rollback()
    except Exception:  # noqa: BLE001  # closing the connection ends the transaction as well
        drop([connection])


def drop(connections: Iterable[Connection]) -> None:
    """Close the connections for good, so that their pool opens new ones; open transactions end with them."""
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
