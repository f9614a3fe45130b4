"""Create the table of parked requests and its state table of each such table set; without any, change nothing."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from projector_dedup.migrations.table_sets import table_sets

from projector_dedup.dialects.columns import TABLE_OPTIONS, exact_bytes, exact_text, moment, utc_now
from projector_dedup.http.parked import ParkedTables

revision = "projector_dedup_0005"
down_revision = "projector_dedup_0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create both tables, and write the schema version into the state table. Tables of other kinds stay as they are."""
    for schema, name in table_sets(op.get_context().config, ParkedTables):
        op.create_table(
            name,
            sa.Column("message_id", exact_text(512), nullable=False),
            sa.Column("handler", exact_text(255), nullable=False),
            sa.Column("processed_at", moment(), nullable=False, server_default=utc_now()),
            sa.Column("occurred_at", moment(), nullable=True),
            sa.Column("reason", sa.Text(), nullable=False),
            sa.Column("headers", sa.Text(), nullable=False),
            sa.Column("body", exact_bytes(), nullable=False),
            sa.PrimaryKeyConstraint("message_id", "handler", name=f"pk_{name}"),
            schema=schema,
            **TABLE_OPTIONS,
        )
        op.create_index(f"ix_{name}_processed_at", name, ["processed_at"], schema=schema)
        state = op.create_table(
            f"{name}_state",
            sa.Column("key", exact_text(255), nullable=False),
            sa.Column("value", sa.Text(), nullable=False),
            sa.PrimaryKeyConstraint("key", name=f"pk_{name}_state"),
            schema=schema,
            **TABLE_OPTIONS,
        )
        op.execute(sa.insert(state).values(key="schema_version", value="1"))


def downgrade() -> None:
    """Drop both tables, with the requests in them."""
    for schema, name in table_sets(op.get_context().config, ParkedTables):
        op.drop_table(f"{name}_state", schema=schema)
        op.drop_index(f"ix_{name}_processed_at", name, schema=schema)
        op.drop_table(name, schema=schema)
