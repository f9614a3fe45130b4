"""A connection to the tables: where one of them is missing, the error says how to create it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError

from ..dialects import Failure, dialect_of
from ..errors import MissingTableError
from ..tables import DedupTables


@contextmanager
def connected_to(engine: Engine, tables: DedupTables) -> Iterator[Connection]:
    """Yield a connection of ``engine``. What the block does not commit is rolled back.

    Raises ``MissingTableError`` where a statement of the block finds no table; any other error is raised as it is.
    """
    dialect = dialect_of(engine)
    dialect.prepare(engine)
    with engine.connect() as connection:
        try:
            yield connection
        except DBAPIError as error:
            if dialect.classify(error) is Failure.NO_TABLE:
                raise MissingTableError(tables.missing(connection)) from error
            raise
