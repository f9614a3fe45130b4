"""Classify errors of PostgreSQL by SQLSTATE (PostgreSQL documentation, appendix A)."""

from __future__ import annotations

from sqlalchemy.exc import DBAPIError

from ..answers import Failure, is_operational, routine_of, sqlstate_of

_READ_ONLY = "25006"  # read_only_sql_transaction: this server is a standby, perhaps it was the primary before
_TRANSIENT = {
    "40001",  # serialization_failure: another transaction changed what this one had read
    "40P01",  # deadlock_detected
    "40003",  # statement_completion_unknown
    "57P01",  # admin_shutdown
    "57P02",  # crash_shutdown
    "57P03",  # cannot_connect_now
    "53300",  # too_many_connections
    *("25P03", "57P05"),  # idle_in_transaction_session_timeout, idle_session_timeout
    *("26000", "42P05"),  # a prepared statement is gone, or is there already: DISCARD ALL, or a pooler, was in between
    "72000",  # snapshot_too_old
}
_LOCK_TIMEOUT = "55P03"
_UNIQUE = {"23505", "23P01"}  # unique_violation, exclusion_violation
_NO_TABLE = {
    *("42P01", "42703", "42P10", "3F000"),  # undefined table, column, unique index, schema
    *("22001", "23502"),  # a column that is too short, that takes no NULL and has no default
}
_LATER = {
    "25P04",  # transaction_timeout
    "3D000",  # there is no such database, yet
    "55006",  # object_in_use
    "HV00N",  # a foreign server cannot be reached
}
# Login refused; no disk, memory or other resource; an operator; errors of the system, of a configuration file, and
# internal ones, a corrupted index among them.
_LATER_CLASSES = ("28", "53", "57", "58", "F0", "XX")
_MAYBE_COMMITTED = {"40003", "57P01", "57P02"}  # a shutdown may come after a local commit, before its answer
_NOT_SUPPORTED = "0A000"

# The server's function that finds a prepared statement outdated, because the type of a column was changed. If a handler
# does something that is not supported, the SQLSTATE is the same and comes from another function. pgjdbc tells the two
# apart in this way too, in willHealViaReparse.
_REPLANNING = "RevalidateCachedQuery"


def classify(error: Exception) -> Failure:
    """Return what an error means for the unit of work: the implementation of ``Dialect.classify``."""
    sqlstate = sqlstate_of(error) or ""
    if sqlstate == _READ_ONLY:
        return Failure.READ_ONLY
    if sqlstate == _LOCK_TIMEOUT:
        return Failure.LOCK_TIMEOUT
    if getattr(error, "connection_invalidated", False) or sqlstate in _TRANSIENT or sqlstate.startswith("08"):
        return Failure.TRANSIENT
    if sqlstate == _NOT_SUPPORTED and routine_of(error) == _REPLANNING:
        return Failure.TRANSIENT  # the ROLLBACK makes the drivers forget what they had prepared
    if sqlstate in _UNIQUE:
        return Failure.UNIQUE
    if sqlstate in _LATER or sqlstate.startswith(_LATER_CLASSES) or (not sqlstate and is_operational(error)):
        return Failure.LATER  # psycopg's errors of connecting have no SQLSTATE
    return Failure.NO_TABLE if sqlstate in _NO_TABLE else Failure.PERMANENT


def commit_refused(error: DBAPIError) -> bool:
    """True if an error of COMMIT says that nothing was committed: the implementation of ``Dialect.commit_refused``."""
    sqlstate = sqlstate_of(error)
    return (
        sqlstate is not None
        and not error.connection_invalidated
        and not sqlstate.startswith("08")
        and sqlstate not in _MAYBE_COMMITTED
    )
