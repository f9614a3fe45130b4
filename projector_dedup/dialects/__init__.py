"""The only place that names a database: what each does differently when a message is claimed and committed."""

from __future__ import annotations

from sqlalchemy.engine import Connection, Engine

from ..errors import UnsupportedDatabaseError
from .interface import Dialect, Failure, Status
from .postgresql import PostgreSQL
from .sqlite import SQLite, configure_sqlite

__all__ = ["Dialect", "Failure", "Status", "configure_sqlite", "dialect_of"]

_DIALECTS: dict[str, Dialect] = {dialect.name: dialect for dialect in (PostgreSQL(), SQLite())}


def dialect_of(bind: Engine | Connection) -> Dialect:
    """The dialect for a bind, or ``UnsupportedDatabaseError`` for a database or driver that was not tried."""
    try:
        dialect = _DIALECTS[bind.dialect.name]
    except KeyError:
        raise UnsupportedDatabaseError(
            f"{bind.dialect.name} is not supported; the promise was proved on {', '.join(sorted(_DIALECTS))} only"
        ) from None
    if bind.dialect.driver not in dialect.drivers:
        raise UnsupportedDatabaseError(
            f"the driver {bind.dialect.driver} is not supported for {dialect.name}; use one of "
            f"{', '.join(sorted(dialect.drivers))}"
        )
    return dialect
