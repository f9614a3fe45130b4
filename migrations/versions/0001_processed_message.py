"""The marker table and the state table."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "projector_dedup_0001"
down_revision = None
branch_labels = ("projector_dedup",)
depends_on = None


def upgrade() -> None:
    """Create both tables; the state table knows the schema version from the start."""
    exact = sa.Text(collation="C")
    op.create_table(
        "processed_message",
        sa.Column("message_id", sa.String(512).with_variant(exact, "postgresql"), nullable=False),
        sa.Column("handler", sa.String(255).with_variant(exact, "postgresql"), nullable=False),
        sa.Column(
            "processed_at", sa.DateTime(timezone=True), server_default=sa.func.current_timestamp(), nullable=False
        ),
        sa.Column("occurred_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("message_id", "handler", name="pk_processed_message"),
    )
    op.create_index("ix_processed_message_processed_at", "processed_message", ["processed_at"])
    state = op.create_table(
        "processed_message_state",
        sa.Column("key", sa.String(255).with_variant(exact, "postgresql"), nullable=False),
        sa.Column("value", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("key", name="pk_processed_message_state"),
    )
    op.bulk_insert(state, [{"key": "schema_version", "value": "1"}])


def downgrade() -> None:
    """Drop both. Whatever is redelivered afterwards is applied again."""
    op.drop_table("processed_message_state")
    op.drop_index("ix_processed_message_processed_at", "processed_message")
    op.drop_table("processed_message")
