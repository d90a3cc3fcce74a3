"""Whose weights an ephemeral sampler has, and whether newer ones have taken its place."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Add the columns; of samplers that are there already it stays unknown, and they end with their session."""
    op.add_column("samplers", sa.Column("model_id", sa.String(128)))
    op.add_column("samplers", sa.Column("is_inflight", sa.Boolean(), nullable=False, server_default=sa.false()))
    op.add_column("samplers", sa.Column("superseded", sa.Float()))
    op.create_index("ix_samplers_model_id", "samplers", ["model_id"])


def downgrade() -> None:
    """Drop them."""
    op.drop_index("ix_samplers_model_id", "samplers")
    for column in ("superseded", "is_inflight", "model_id"):
        op.drop_column("samplers", column)
