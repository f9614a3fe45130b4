"""Make the tables: ``migrate`` runs the library's own Alembic revisions, ``ddl`` prints the SQL."""

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

_PATIENCE = 60.0  # seconds during which a change that had to wait for other transactions is tried again
_PAUSE = 1.0  # seconds between two tries at most, half as long on average: writers that queued get through

_one_at_a_time = Lock()  # env.py and revisions import `alembic.context` and `alembic.op`: globals of the process

_RIGHTS = "SELECT, INSERT, UPDATE, DELETE"


@dataclass(frozen=True)
class Migrated:
    """The schema versions before and after a run of ``migrate``; ``before`` is None where there were no tables."""

    before: int | None
    after: int
    adopted: bool = False  #: somebody else had made the tables; ``migrate`` takes care of them from now on


def migrate(engine: Engine, tables: DedupTables = default_tables) -> Migrated:
    """Bring one table set to the schema of this version: make the tables, change them, or leave them as they are.

    The revision that they are at is kept in ``<name>_alembic_version``. Tables that somebody else made, by
    ``create_all`` or a migration of their own, are adopted if ``check`` finds nothing fatal. Of two runs at the same
    time, the second waits for the first. A change that has to wait for another transaction gives up after a moment,
    so that other writers are not held up behind it, and is tried again for a minute.

    Raises ``MissingTableError`` for tables that are wrong, or a schema that does not exist, ``UnsafeSessionError`` for
    an engine in AUTOCOMMIT, and ``RetriesExhaustedError`` if another transaction held the table all that time: end
    that transaction, and run ``migrate`` again.
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
                    "transaction holds it; look for one that is open for long, end it, and run this again"
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
                raise MissingTableError(f"there is no schema {schema}: create it first, or name another")
            version = self._version(connection)  # first: a rival writes it last
            present = self._present(connection)
            if version is not None and len(present) < 2:
                name = f"{self._tables.marker.fullname}_alembic_version"
                raise MissingTableError(
                    f"{name} says that the tables are there, but somebody dropped them; drop {name} too and run this "
                    "again: it makes them anew, and what is redelivered then is applied again"
                )
            findings = [finding for table in present for finding in check_table(connection, table, self._tables)]
        if len(present) == 2:
            findings = check(engine, self._tables)
        for finding in findings:
            if finding.fatal:
                raise MissingTableError(f"{finding.problem}; nothing was changed; {finding.remedy}")

    def _present(self, connection: Connection) -> list[Table]:
        """Return those of the two tables that exist; only one, where a server that cannot roll DDL back died."""
        tables, inspector = (self._tables.marker, self._tables.state), inspect(connection)
        return [table for table in tables if inspector.has_table(table.name, schema=table.schema)]

    def _adopt(self, context: MigrationContext) -> None:
        """Note the schema version before the run, and take over tables that somebody else made.

        If there are such tables, the one that is missing is made, their version is written into the state table, and
        Alembic's own table is stamped with it. env.py calls this where no other migration can be under way.
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
        """Return the schema version by Alembic's own table; None if no revision has made tables of this kind here."""
        options = {
            "version_table": f"{self._tables.marker.name}_alembic_version",
            "version_table_schema": self._tables.marker.schema,
        }
        revision = MigrationContext.configure(connection, opts=options).get_current_revision()
        return sum(each <= (revision or "") for each in self._tables.revisions) or None


# The tables as SQL ------------------------------------------------------------------------------------------------


def ddl(database: str, tables: DedupTables = default_tables) -> str:
    """Return the SQL that makes the tables on ``database``: "postgresql", "mariadb", "mysql" or "sqlite".

    Each statement ends with ";". The last lines are comments: the GRANT statements for the application's user.

    Raises ``sqlalchemy.exc.NoSuchModuleError`` for a database that SQLAlchemy does not know.
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
    told = "-- Whoever delivers, checks and cleans up needs no more rights than these, where there are users:"
    return "\n".join([*(f"{str(statement).strip()};\n" for statement in statements), told, *grants, ""])
