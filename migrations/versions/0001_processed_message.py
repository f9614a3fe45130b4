"""The marker table and the state table."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from projector_dedup.dialects.columns import TABLE_OPTIONS, exact_text, moment, utc_now

revision = "projector_dedup_0001"
down_revision = None
branch_labels = ("projector_dedup",)
depends_on = None


def upgrade() -> None:
    """Create both tables; the state table knows the schema version from the start."""
    op.create_table(
        "processed_message",
        sa.Column("message_id", exact_text(512), nullable=False),
        sa.Column("handler", exact_text(255), nullable=False),
        sa.Column("processed_at", moment(), server_default=utc_now(), nullable=False),
        sa.Column("occurred_at", moment(), nullable=True),
        sa.PrimaryKeyConstraint("message_id", "handler", name="pk_processed_message"),
        **TABLE_OPTIONS,
    )
    op.create_index("ix_processed_message_processed_at", "processed_message", ["processed_at"])
    state = op.create_table(
        "processed_message_state",
        sa.Column("key", exact_text(255), nullable=False),
        sa.Column("value", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("key", name="pk_processed_message_state"),
        **TABLE_OPTIONS,
    )
    op.execute(sa.insert(state).values(key="schema_version", value="1"))  # bulk_insert() forgets what types do


def downgrade() -> None:
    """Drop both. Whatever is redelivered afterwards is applied again."""
    op.drop_table("processed_message_state")
    op.drop_index("ix_processed_message_processed_at", "processed_message")
    op.drop_table("processed_message")
