"""Runs the revisions against PROJECTOR_DEDUP_DATABASE_URL, or the URL in the configuration's attributes."""

from __future__ import annotations

import os

from alembic import context
from sqlalchemy import create_engine, pool

from projector_dedup.tables import default_metadata

URL = "PROJECTOR_DEDUP_DATABASE_URL"


def _url() -> str:
    url: str | None = context.config.attributes.get("url") or os.environ.get(URL)
    if not url:
        raise SystemExit(f"no database: set {URL}, for example to postgresql+psycopg://user@host/database")
    return url


# Our own version table, so that the user's `alembic_version` in the same database stays theirs.
VERSION_TABLE = "processed_message_alembic_version"

if context.is_offline_mode():
    context.configure(url=_url(), literal_binds=True, target_metadata=default_metadata, version_table=VERSION_TABLE)
    with context.begin_transaction():
        context.run_migrations()
else:
    engine = create_engine(_url(), poolclass=pool.NullPool)
    with engine.connect() as connection:
        context.configure(connection=connection, target_metadata=default_metadata, version_table=VERSION_TABLE)
        with context.begin_transaction():
            context.run_migrations()
