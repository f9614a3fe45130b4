"""Say what differs between the drivers of MariaDB: how each tells whether a transaction is open."""

from __future__ import annotations

from typing import Any

from sqlalchemy.engine import Engine

from ..answers import Status
from ..listeners import listen_once
from .dialect import MariaDB
from .pymysql_connection import IN_TRANSACTION, careful
from .snapshots import switching


class PyMySQL(MariaDB):
    """Uses MariaDB through PyMySQL, whose connections are changed to close when they are interrupted."""

    drivers = frozenset({"pymysql"})

    def prepare(self, engine: Engine) -> None:
        """Attach the listener of ``MariaDB.prepare``, behind one that changes PyMySQL's connections (``careful``)."""
        listen_once(engine, checkout=[careful, switching(engine.dialect)])

    def status(self, driver_connection: Any) -> Status:
        """Return OPEN or NONE by the server's last answer, or BUSY for a closed connection."""
        if not driver_connection.open:
            return Status.BUSY
        return Status.OPEN if driver_connection.server_status & IN_TRANSACTION else Status.NONE


class MySQLClient(MariaDB):
    """Uses MariaDB through mysqlclient, which does not tell the flags of the server's answers."""

    drivers = frozenset({"mysqldb"})
    modules = frozenset({"MySQLdb"})

    def status(self, driver_connection: Any) -> Status:
        """Return OPEN, which here means that the driver cannot tell, or BUSY for a closed connection."""
        return Status.OPEN if driver_connection.open else Status.BUSY


class Asyncmy(MariaDB):
    """Uses MariaDB through asyncmy."""

    drivers = frozenset({"asyncmy"})

    def status(self, driver_connection: Any) -> Status:
        """Return OPEN or NONE by the server's last answer, or BUSY for a closed connection."""
        if not driver_connection.connected:
            return Status.BUSY
        return Status.OPEN if driver_connection.get_transaction_status() else Status.NONE


class Aiomysql(MariaDB):
    """Uses MariaDB through aiomysql."""

    drivers = frozenset({"aiomysql"})

    def status(self, driver_connection: Any) -> Status:
        """Return OPEN or NONE by the server's last answer, or BUSY for a closed connection."""
        if driver_connection.closed:
            return Status.BUSY
        return Status.OPEN if driver_connection.get_transaction_status() else Status.NONE
