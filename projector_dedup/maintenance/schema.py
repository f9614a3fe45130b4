"""Create the tables: ``migrate`` runs the library's own Alembic revisions, ``ddl`` returns the SQL."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.resources import files
from threading import Lock
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Dialect, MetaData, Table, insert, inspect, make_url
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.schema import CreateIndex, CreateTable

from ..dialects import Failure, dialect_of
from ..errors import MissingTableError, RetriesExhaustedError
from ..tables import DedupTables, default_tables
from .check import check, check_table
from .running import unlimited
from .state import SCHEMA_VERSION, read_state, write_state

_PATIENCE = 60.0  # seconds during which ``migrate`` retries a change that had to wait for other transactions
_PAUSE = 1.0  # the longest pause between two attempts in seconds, so that waiting writers can continue

_one_at_a_time = Lock()  # env.py and revisions import `alembic.context` and `alembic.op`: globals of the process

_RIGHTS = "SELECT, INSERT, UPDATE, DELETE"


@dataclass(frozen=True)
class Migrated:
    """The schema versions before and after a run of ``migrate``. ``before`` is None if there were no tables."""

    before: int | None
    after: int
    adopted: bool = False  #: True if the tables existed, and ``migrate`` manages them from now on


def migrate(engine: Engine, tables: DedupTables = default_tables) -> Migrated:
    """Create one set of tables, or upgrade it to the schema of this version.

    The table ``<name>_alembic_version`` stores the current revision. If tables exist that ``create_all`` or your own
    migration created, ``migrate`` adopts them, unless ``check`` finds a fatal problem. Of two concurrent runs, the
    second waits for the first. If a change must wait for another transaction, it soon gives up, so that other writers
    need not wait behind it, and ``migrate`` retries it for a minute.

    Raises ``MissingTableError`` for wrong tables and for a schema that does not exist, ``UnsafeSessionError`` for an
    engine in AUTOCOMMIT, and ``RetriesExhaustedError`` if another transaction locked the table all this time: end that
    transaction, and run ``migrate`` again.
    """
    dialect, deadline = dialect_of(engine), time.monotonic() + _PATIENCE
    while True:
        try:
            with _one_at_a_time:
                return _Owner(engine, tables).migrate()
        except DBAPIError as error:
            if dialect.classify(error) not in (Failure.LOCK_TIMEOUT, Failure.TRANSIENT):
                raise
            if time.monotonic() > deadline:
                raise RetriesExhaustedError(
                    f"{tables.marker.fullname} could not be changed for {_PATIENCE:g} seconds, because another "
                    "transaction locks it; end the transaction that has been open for long, and run this again"
                ) from error
        time.sleep(random.uniform(0, _PAUSE))  # noqa: S311  # no secret


class _Owner:
    """One run of Alembic on one table set, in the schema to which the engine's ``schema_translate_map`` leads."""

    def __init__(self, engine: Engine, tables: DedupTables) -> None:
        with engine.connect() as connection:
            dialect_of(connection).refuse_unsafe(connection)
            schema = connection.schema_for_object(tables.marker)
        checking = engine.execution_options(schema_translate_map=None)
        self._engine = unlimited(checking)  # a change of the tables has a shorter limit of its own
        self._tables = tables.make(MetaData(), tables.marker.name, schema)
        self._before: int | None = None
        self._adopted = False
        self._config = Config()
        self._config.set_main_option("script_location", str(files("projector_dedup.migrations")).replace("%", "%%"))
        self._config.attributes["projector_dedup_tables"] = self._tables
        self._refuse_wrong(checking)

    def migrate(self) -> Migrated:
        with self._engine.connect() as connection:
            self._config.attributes.update(connection=connection, adopt=self._adopt)
            command.upgrade(self._config, self._tables.revisions[-1])  # later ones are of other kinds
        with self._engine.connect() as connection:
            return Migrated(self._before, self._version(connection) or self._tables.version, self._adopted)

    def _refuse_wrong(self, engine: Engine) -> None:
        """Raise ``MissingTableError`` for a schema that does not exist, and for tables that ``check`` finds wrong.

        This comes before anything is locked, because ``check`` tries the tables out by writing to them.
        """
        schema = self._tables.marker.schema
        with engine.connect() as connection:
            if schema is not None and not inspect(connection).has_schema(schema):
                raise MissingTableError(f"there is no schema {schema}; create it first, or give another name")
            version = self._version(connection)  # first: a rival writes it last
            present = self._present(connection)
            if version is not None and len(present) < 2:
                name = f"{self._tables.marker.fullname}_alembic_version"
                raise MissingTableError(
                    f"{name} says that the tables exist, but they were dropped; drop {name} too, and run this again. "
                    "It creates empty tables, so every redelivery is applied again"
                )
            findings = [finding for table in present for finding in check_table(connection, table, self._tables)]
        if len(present) == 2:
            findings = check(engine, self._tables)
        for finding in findings:
            if finding.fatal:
                raise MissingTableError(f"{finding.problem}; nothing was changed; {finding.remedy}")

    def _present(self, connection: Connection) -> list[Table]:
        """Return those of the two tables that exist (one, if a server without transactional DDL crashed)."""
        tables, inspector = (self._tables.marker, self._tables.state), inspect(connection)
        return [table for table in tables if inspector.has_table(table.name, schema=table.schema)]

    def _adopt(self, context: MigrationContext) -> None:
        """Note the schema version before the run, and adopt tables that exist.

        If tables exist, create a missing one, write the version into the state table, and stamp Alembic's own table.
        env.py calls this method while no other migration can run.
        """
        connection = context.connection
        assert connection is not None  # noqa: S101  # env.py is not in offline mode
        begin: Callable[[], AbstractContextManager[Any]] = (
            connection.begin_nested if connection.in_transaction() else connection.begin
        )
        with begin():
            self._before = self._version(connection)
            present = self._present(connection)
            if self._before is not None or not present:
                return
            self._tables.marker.metadata.create_all(connection)
            state = read_state(connection, self._tables)
            self._before = int(state.get(SCHEMA_VERSION, self._tables.version))
            write_state(connection, self._tables, {SCHEMA_VERSION: str(self._before)})
            assert context.script is not None  # noqa: S101
            context.stamp(context.script, self._tables.revisions[self._before - 1])
            self._adopted = True

    def _version(self, connection: Connection) -> int | None:
        """Return the schema version by Alembic's own table, or None if no revision has created these tables."""
        options = {
            "version_table": f"{self._tables.marker.name}_alembic_version",
            "version_table_schema": self._tables.marker.schema,
        }
        revision = MigrationContext.configure(connection, opts=options).get_current_revision()
        return sum(each <= (revision or "") for each in self._tables.revisions) or None


# The tables as SQL ------------------------------------------------------------------------------------------------


def ddl(database: str, tables: DedupTables = default_tables) -> str:
    """Return the SQL that creates the tables on ``database``: "postgresql", "mariadb", "mysql" or "sqlite".

    Each statement ends with ";". The last lines are comments with the GRANT statements for the application's user.

    Raises ``sqlalchemy.exc.NoSuchModuleError`` for a database that SQLAlchemy does not support.
    """
    dialect_class: Any = make_url(f"{database}://").get_dialect()
    dialect: Dialect = dialect_class(paramstyle="named")  # a driver's own would double each % of a name
    both = (tables.marker, tables.state)
    version = insert(tables.state).values(key=SCHEMA_VERSION, value=str(tables.version))
    statements = [
        *(CreateTable(table).compile(dialect=dialect) for table in both),
        *(CreateIndex(index).compile(dialect=dialect) for table in both for index in table.indexes),
        version.compile(dialect=dialect, compile_kwargs={"literal_binds": True}),
    ]
    names = [dialect.identifier_preparer.format_table(table) for table in both]
    grants = [f"-- GRANT {_RIGHTS} ON {name} TO <application user>;" for name in names]
    rights = "-- The user that delivers, checks and cleans up needs these rights, and no others:"
    return "\n".join([*(f"{str(statement).strip()};\n" for statement in statements), rights, *grants, ""])
