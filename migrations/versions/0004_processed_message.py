"""Add the column for the digest of a message's body to the marker table of each table set."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from projector_dedup.migrations.table_sets import table_sets

from projector_dedup.dialects.columns import exact_bytes, exact_text

revision = "projector_dedup_0004"
down_revision = "projector_dedup_0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column, which is empty in the markers that are there, and write the schema version. May run again."""
    for schema, name in table_sets(op.get_context().config):
        if not _has_digest(schema, name):
            op.add_column(name, sa.Column("digest", exact_bytes(), nullable=True), schema=schema)
        _write_version(schema, name, "2")


def downgrade() -> None:
    """Drop the column. Another message with a known id is then a duplicate without any notice."""
    for schema, name in table_sets(op.get_context().config):
        op.drop_column(name, "digest", schema=schema)
        _write_version(schema, name, "1")


def _has_digest(schema: str | None, name: str) -> bool:
    if op.get_context().as_sql:  # there is no database to ask
        return False
    return "digest" in {column["name"] for column in sa.inspect(op.get_bind()).get_columns(name, schema=schema)}


def _write_version(schema: str | None, name: str, version: str) -> None:
    state = sa.table(f"{name}_state", sa.column("key", exact_text(255)), sa.column("value", sa.Text()), schema=schema)
    op.execute(sa.update(state).where(state.c.key == "schema_version").values(value=version))
