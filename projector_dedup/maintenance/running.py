"""The common parts of maintenance: the check of the tables' kind, and the retries."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import TypeVar

from sqlalchemy import inspect
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError

from ..closing import connected
from ..commands import CommandTables, default_command_tables
from ..dialects import Dialect, Failure, dialect_of
from ..effects import EffectTables, default_effect_tables
from ..errors import MissingTableError, RetriesExhaustedError
from ..message import printable
from ..options import RetryPolicy
from ..tables import DedupTables, default_tables, full_name
from .databases import Finding, database_of

T = TypeVar("T")

PASSING = (Failure.TRANSIENT, Failure.READ_ONLY, Failure.LOCK_TIMEOUT)  #: kinds of errors after which to retry

KINDS: tuple[type[DedupTables], ...] = (DedupTables, CommandTables, EffectTables)
"""The kinds of tables. Each has the columns of those before it, and some of its own."""
_COLUMNS = {
    DedupTables: {each.name for each in default_tables.marker.primary_key},
    CommandTables: {each.name for each in default_command_tables.marker.columns},
    EffectTables: {each.name for each in default_effect_tables.marker.columns},
}
_COLUMNS_OF_ALL = {each.name for each in default_tables.marker.columns}


# Which tables -----------------------------------------------------------------------------------------------------


@contextmanager
def connected_to(engine: Engine, tables: DedupTables) -> Iterator[Connection]:
    """Yield a connection of ``engine``, and roll back at the end.

    Raises ``MissingTableError`` if a statement of the block finds no table. Other errors are raised unchanged.
    """
    dialect = dialect_of(engine)
    dialect.prepare(engine)
    with connected(engine) as connection:
        try:
            yield connection
        except DBAPIError as error:
            if dialect.classify(error) is Failure.NO_TABLE:
                raise MissingTableError(tables.missing(connection)) from error
            raise


def other_kind(connection: Connection, tables: DedupTables, columns: Collection[str]) -> Finding | None:
    """Return a finding if the table with these ``columns`` is of another kind than ``tables``, else None.

    A table that lacks some columns of its kind is still of this kind.
    """
    has, wanted = set(columns), next(kind for kind in reversed(KINDS) if isinstance(tables, kind))
    found = next((kind for kind in reversed(KINDS) if _COLUMNS[kind] <= has), wanted)
    if found is wanted or (_COLUMNS[wanted] - _COLUMNS[found] - _COLUMNS_OF_ALL) & has:
        return None
    problem = f"{full_name(tables.marker, connection)} is a table of {found.subject}, not of {tables.subject}"
    if not found.option:
        return Finding(
            problem,
            f"give the name of a table of {tables.maker}(), such as {tables.default_name}; or, if you mean the table "
            f"of {found.subject}, leave out{tables.option}",
        )
    instead = f" instead of{tables.option}" if tables.option else ""
    return Finding(
        problem,
        f"add{found.option}{instead}, and use {found.maker}() in Python; or give the name of a table of "
        f"{tables.maker}()",
    )


def refuse_other_kind(connection: Connection, tables: DedupTables) -> None:
    """Raise ``MissingTableError`` if the table exists, and is of another kind than ``tables`` (``other_kind``)."""
    schema, inspector = connection.schema_for_object(tables.marker), inspect(connection)
    if not inspector.has_table(tables.marker.name, schema=schema):
        return
    columns = [column["name"] for column in inspector.get_columns(tables.marker.name, schema=schema)]
    finding = other_kind(connection, tables, columns)
    if finding is not None:
        raise MissingTableError(f"{finding.problem}; {finding.remedy}")


# Retries ----------------------------------------------------------------------------------------------------------


def run_with_retries(
    step: Callable[[Connection], T],
    engine: Engine,
    dialect: Dialect,
    policy: RetryPolicy,
    passing: Collection[Failure] = PASSING,
) -> T:
    """Run ``step`` in its own transaction, commit, and return the result of ``step``.

    After an error of the kinds ``passing``, or if no connection could be opened, the function retries ``step`` as often
    and as long as ``policy`` allows. So ``step`` must be safe to run twice. The transaction has the level
    ``cleanup_isolation`` of the database, at which a step locks only the rows that it writes.

    Raises ``RetriesExhaustedError`` if the policy permits no more attempts. Other errors are raised unchanged.
    """
    level = database_of(engine).cleanup_isolation
    bind = engine if level is None else engine.execution_options(isolation_level=level)
    deadline, attempt = None, 0
    errors = (DBAPIError, OSError, engine.dialect.loaded_dbapi.Error)  # the last: SQLAlchemy could not set the level
    while True:
        attempt, reached = attempt + 1, False
        try:
            with connected(bind) as connection:
                reached = True
                try:
                    result = step(connection)
                    connection.commit()
                except DBAPIError as error:
                    if dialect.classify(error) is Failure.READ_ONLY:
                        connection.invalidate()  # otherwise the pool would keep a server that is no primary
                    raise
                return result
        except errors as error:
            if reached and dialect.classify(error) not in passing:
                raise
            now, delay = time.monotonic(), policy.delay(attempt)
            deadline = deadline or now + policy.within
            if attempt >= policy.attempts or now + delay > deadline:
                words = printable(str(getattr(error, "orig", None) or error))[:300]
                raise RetriesExhaustedError(f"{attempt} attempts failed ({words}); try again later") from error
        time.sleep(delay)
