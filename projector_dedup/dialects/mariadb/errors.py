"""Classify errors of MariaDB and MySQL by number (MariaDB documentation, "MariaDB Error Code Reference")."""

from __future__ import annotations

from sqlalchemy.exc import DBAPIError

from ..answers import Failure

_DEADLOCK, _RECORD_CHANGED, _LOCK_WAIT_TIMEOUT, _STATEMENT_TIMEOUT, _NO_SAVEPOINT = 1213, 1020, 1205, 1969, 1305
_LOCK_TABLE_FULL = 1206
_TRANSIENT = {
    _DEADLOCK,
    _LOCK_TABLE_FULL,
    _RECORD_CHANGED,  # since this transaction's snapshot was taken
    *(1412, 1684),  # somebody has changed the table since the snapshot, or is about to
    1040,  # too many connections
    1203,  # too many connections of this user
    1047,  # this node of a cluster is not ready
    1053,  # server shutdown in progress
    1927,  # connection was killed
    *(1243, 1615),  # a prepared statement is gone, or is outdated
    *(2002, 2003, 2005, 2006, 2012, 2013, 2026, 2055),  # no connection, or lost
    4031,  # disconnected for inactivity
}
_READ_ONLY = {1290, 1792, 1836}  # an option that prevents the statement; tx_read_only; read-only mode
_LOCK_TIMEOUT = {_LOCK_WAIT_TIMEOUT, _STATEMENT_TIMEOUT, 3572}  # the last: NOWAIT
_LATER = {
    *(1021, 1114, 1026, 3),  # disk full, table full, error writing a file
    *(1016, 1023, 1024, 1028, 1030, 1296, 1297),  # a file cannot be opened or read, the storage engine reports an error
    *(1034, 1194, 1195, 1712, 1877),  # a corrupted index or table
    *(1037, 1038, 1041),  # out of memory
    *(1135, 1461, 1637),  # no more threads, prepared statements, concurrent transactions
    *(1158, 1159, 1160, 1161, 1429),  # the network failed, or a foreign server cannot be reached
    1815,  # internal error
    *(1317, 3024),  # the statement was killed; it took longer than it may, on MySQL
    *(1044, 1045, 1129, 1130, 1226, 1698),  # login refused, too many errors of the host, over a limit of the user
}
_UNIQUE = {1062, 1169, 1586}
_NO_TABLE = {
    *(1049, 1054, 1146),  # unknown database, column, table
    *(1048, 1364, 1406),  # a column that takes no NULL, has no default, is too short
}

_OUT_OF_SYNC = 2014  # a result of mysqlclient's was left unread: the command was not sent


def classify(error: Exception) -> Failure:
    """Return what an error means for the unit of work: the implementation of ``Dialect.classify``."""
    number = _number(error)
    if number in _READ_ONLY:
        return Failure.READ_ONLY
    if number in _LOCK_TIMEOUT:
        return Failure.LOCK_TIMEOUT
    if number == _OUT_OF_SYNC:
        return Failure.PERMANENT  # SQLAlchemy takes the connection for lost
    if getattr(error, "connection_invalidated", False) or number in _TRANSIENT:
        return Failure.TRANSIENT
    if number in _UNIQUE:
        return Failure.UNIQUE
    if number in _LATER:
        return Failure.LATER
    return Failure.NO_TABLE if number in _NO_TABLE else Failure.PERMANENT


def aborts(error: DBAPIError) -> bool:
    """True if the error ended the transaction, or perhaps did: the implementation of ``Dialect.aborts``."""
    return _number(error) in (_DEADLOCK, _RECORD_CHANGED, _LOCK_TABLE_FULL, _LOCK_WAIT_TIMEOUT, _NO_SAVEPOINT)


def commit_refused(error: DBAPIError) -> bool:
    """True if an error of COMMIT says that nothing was committed: the implementation of ``Dialect.commit_refused``."""
    number = _number(error)
    return number == _OUT_OF_SYNC or (number == _DEADLOCK and not error.connection_invalidated)


def _number(error: Exception) -> int | None:
    original = getattr(error, "orig", error)
    if type(original).__module__.partition(".")[0] not in ("pymysql", "MySQLdb", "asyncmy", "aiomysql"):
        return None
    number = original.args[0] if original.args else None
    return number if isinstance(number, int) else None
