"""Create the table of effects and the state table of each table set of effects; without any, change nothing."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from projector_dedup.migrations.table_sets import table_sets

from projector_dedup.dialects.columns import TABLE_OPTIONS, exact_bytes, exact_text, moment
from projector_dedup.effects import EffectTables

revision = "projector_dedup_0003"
down_revision = "projector_dedup_0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create both tables, and write the schema version into the state table. Tables of other kinds stay as they are."""
    for schema, name in table_sets(op.get_context().config, EffectTables):
        op.create_table(
            name,
            sa.Column("message_id", exact_text(512), nullable=False),
            sa.Column("handler", exact_text(255), nullable=False),
            sa.Column("processed_at", moment(), nullable=True),  # no default: NULL until the effect has an outcome
            sa.Column("occurred_at", moment(), nullable=True),
            sa.Column("fingerprint", exact_bytes(), nullable=False),
            sa.Column("request", exact_bytes(), nullable=False),
            sa.Column("provider_key", exact_text(36), nullable=False),
            sa.Column("armed", sa.Boolean(), nullable=False),
            sa.Column("armed_at", sa.BigInteger(), nullable=False),
            sa.Column("attempt", sa.Integer(), nullable=False),
            sa.Column("token", exact_text(32), nullable=False),
            sa.Column("lease_until", sa.BigInteger(), nullable=True),
            sa.Column("first_sent_at", sa.BigInteger(), nullable=True),
            sa.Column("ended_at", sa.BigInteger(), nullable=True),
            sa.Column("next_at", sa.BigInteger(), nullable=True),
            sa.Column("stopped_at", sa.BigInteger(), nullable=True),
            sa.Column("decision", sa.Text(), nullable=True),
            sa.Column("evidence_attempt", sa.Integer(), nullable=True),
            sa.Column("evidence_outcome", sa.SmallInteger(), nullable=True),
            sa.Column("evidence", exact_bytes(), nullable=True),
            sa.Column("error", sa.Text(), nullable=True),
            sa.Column("outcome", sa.SmallInteger(), nullable=True),
            sa.Column("decided_by", exact_text(10), nullable=True),
            sa.Column("codec", exact_text(64), nullable=True),
            sa.Column("result", exact_bytes(), nullable=True),
            sa.PrimaryKeyConstraint("message_id", "handler", name=f"pk_{name}"),
            schema=schema,
            **TABLE_OPTIONS,
        )
        for column in ("processed_at", "next_at"):
            op.create_index(f"ix_{name}_{column}", name, [column], schema=schema)
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
    """Drop both tables. Unfinished effects are lost, and an effect that is armed again is sent again."""
    for schema, name in table_sets(op.get_context().config, EffectTables):
        op.drop_table(f"{name}_state", schema=schema)
        for column in ("processed_at", "next_at"):
            op.drop_index(f"ix_{name}_{column}", name, schema=schema)
        op.drop_table(name, schema=schema)
