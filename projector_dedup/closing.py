"""Return connections to their pool, even if the server refuses ROLLBACK.

SQLAlchemy's Session, and its Connection in older versions, sends ROLLBACK before it returns a connection to the pool.
If ROLLBACK fails, the connection is never returned. A MariaDB node that has lost the rest of its cluster refuses every
statement (error 1047), and a few messages then used up the whole pool.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from sqlalchemy.engine import Connection, Engine

from .inherited import leave_to_parent


@contextmanager
def connected(engine: Engine) -> Iterator[Connection]:
    """Yield a connection of ``engine``. At the end, roll back and return the connection to the pool.

    If that fails, drop the connection, and raise nothing: what the block has committed is committed.
    """
    leave_to_parent(engine)
    connection = engine.connect()
    try:
        yield connection
    finally:
        try:
            connection.close()
        except Exception:  # noqa: BLE001  # also a driver's own error, if SQLAlchemy cannot reset the isolation level
            drop([connection])
        except BaseException:
            drop([connection])
            raise


def roll_back(connection: Connection) -> None:
    """Send ROLLBACK directly by the driver, because SQLAlchemy considers the transaction ended.

    If ROLLBACK fails, drop the connection.
    """
    try:
        connection.connection.rollback()
    except Exception:  # noqa: BLE001  # closing the connection ends the transaction as well
        drop([connection])


def drop(connections: Iterable[Connection]) -> None:
    """Close the connections and their open transactions. The pool opens new connections."""
    for connection in connections:
        with suppress(Exception):  # closed already, or the driver fails to close it
            connection.invalidate()
        with suppress(Exception):
            connection.close()
