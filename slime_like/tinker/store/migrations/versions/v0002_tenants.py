"""What each tenant has of the server."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Create the tenants' table."""
    op.create_table(
        "tenants",
        sa.Column("tenant", sa.String(128), primary_key=True),
        sa.Column("weight", sa.Float()),
        sa.Column("max_requests", sa.BigInteger()),
        sa.Column("max_tokens", sa.BigInteger()),
    )


def downgrade() -> None:
    """Drop it."""
    op.drop_table("tenants")
