"""Run the revisions for one table set; Alembic executes this file.

The table set is that of ``migrate()``, or the default one in the database of PROJECTOR_DEDUP_DATABASE_URL.
"""

from __future__ import annotations

import os
from typing import Any

from alembic import context
from projector_dedup.migrations.table_sets import OPTION
from sqlalchemy import create_engine, pool
from sqlalchemy.engine import Connection

from projector_dedup.maintenance.databases import database_of
from projector_dedup.tables import default_tables

URL = "PROJECTOR_DEDUP_DATABASE_URL"

attributes = context.config.attributes
tables = attributes.get(OPTION, default_tables)
settings: dict[str, Any] = {
    "target_metadata": tables.marker.metadata,
    # A version table of its own, so that the user's `alembic_version` in the same database is left alone.
    "version_table": f"{tables.marker.name}_alembic_version",
    "version_table_schema": tables.marker.schema,
}


def _url() -> str:
    url = os.environ.get(URL)
    if not url:
        raise SystemExit(f"no database: set {URL}, for example to postgresql+psycopg://user@host/database")
    return url


def _run(connection: Connection) -> None:
    database = database_of(connection)
    context.configure(connection=connection, transactional_ddl=database.transactional_ddl, **settings)
    with context.begin_transaction(), database.migrating(connection, tables.marker.fullname):
        if "adopt" in attributes:
            attributes["adopt"](context.get_context())
        context.run_migrations()


if context.is_offline_mode():
    context.configure(url=_url(), literal_binds=True, **settings)
    with context.begin_transaction():
        context.run_migrations()
elif "connection" in attributes:
    _run(attributes["connection"])
else:
    with create_engine(_url(), poolclass=pool.NullPool).connect() as connection:
        _run(connection)
