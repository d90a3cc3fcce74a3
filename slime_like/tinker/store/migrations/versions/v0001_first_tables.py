"""The tables, as they began."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def _create_api_keys() -> None:
    op.create_table(
        "api_keys",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("tenant", sa.String(128), nullable=False),
        sa.Column("key_hash", sa.String(256), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.Column("revoked", sa.Float()),
        sa.Column("limits", sa.JSON(), nullable=False),
    )
    op.create_index("ix_api_keys_tenant", "api_keys", ["tenant"])


def _create_requests() -> None:
    op.create_table(
        "requests",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("tenant", sa.String(128), nullable=False),
        sa.Column("session_id", sa.String(64), nullable=False),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("model_id", sa.String(128)),
        sa.Column("sampler_id", sa.String(128)),
        sa.Column("seq_id", sa.BigInteger()),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.Column("finished", sa.Float()),
        sa.Column("body", sa.LargeBinary()),
        sa.Column("result", sa.LargeBinary()),
        sa.Column("category", sa.String(16)),
        sa.Column("error", sa.String(4096)),
        sa.UniqueConstraint("model_id", "seq_id", name="one_request_a_seq_id"),
        sa.UniqueConstraint("sampler_id", "seq_id", name="one_sample_a_seq_id"),
    )
    op.create_index("ix_requests_finished", "requests", ["finished"])
    op.create_index("ix_requests_session_id", "requests", ["session_id"])
    op.create_index("ix_requests_state", "requests", ["state"])
    op.create_index("ix_requests_tenant", "requests", ["tenant"])
    op.create_index("requests_of_a_model_by_state", "requests", ["model_id", "state"])


def _create_sessions() -> None:
    op.create_table(
        "sessions",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("tenant", sa.String(128), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.Column("last_heartbeat", sa.Float(), nullable=False),
        sa.Column("finished", sa.Float()),
        sa.Column("finish_reason", sa.String(32)),
        sa.Column("tags", sa.JSON(), nullable=False),
        sa.Column("user_metadata", sa.JSON(), nullable=False),
        sa.Column("project_id", sa.String(128)),
        sa.Column("display_name", sa.String(256)),
        sa.Column("sdk_version", sa.String(32)),
    )
    op.create_index("ix_sessions_tenant", "sessions", ["tenant"])


def _create_models() -> None:
    op.create_table(
        "models",
        sa.Column("id", sa.String(128), primary_key=True),
        sa.Column("session_id", sa.String(64), sa.ForeignKey("sessions.id"), nullable=False),
        sa.Column("tenant", sa.String(128), nullable=False),
        sa.Column("base_model", sa.String(512), nullable=False),
        sa.Column("lora_rank", sa.Integer(), nullable=False),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.Column("last_request", sa.Float(), nullable=False),
        sa.Column("released", sa.Float()),
        sa.Column("snapshot", sa.String(1024)),
        sa.Column("snapshot_seq", sa.Integer(), nullable=False),
        sa.Column("done_seq", sa.Integer(), nullable=False),
        sa.Column("num_steps", sa.Integer(), nullable=False),
        sa.Column("user_metadata", sa.JSON(), nullable=False),
    )
    op.create_index("ix_models_session_id", "models", ["session_id"])
    op.create_index("ix_models_tenant", "models", ["tenant"])


def _create_samplers() -> None:
    op.create_table(
        "samplers",
        sa.Column("id", sa.String(128), primary_key=True),
        sa.Column("session_id", sa.String(64), sa.ForeignKey("sessions.id"), nullable=False),
        sa.Column("tenant", sa.String(128), nullable=False),
        sa.Column("base_model", sa.String(512), nullable=False),
        sa.Column("model_path", sa.String(512)),
        sa.Column("folder", sa.String(1024)),
        sa.Column("created", sa.Float(), nullable=False),
    )
    op.create_index("ix_samplers_session_id", "samplers", ["session_id"])
    op.create_index("ix_samplers_tenant", "samplers", ["tenant"])


def _create_checkpoints() -> None:
    op.create_table(
        "checkpoints",
        sa.Column("path", sa.String(512), primary_key=True),
        sa.Column("model_id", sa.String(128), sa.ForeignKey("models.id"), nullable=False),
        sa.Column("tenant", sa.String(128), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("name", sa.String(256), nullable=False),
        sa.Column("folder", sa.String(1024), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.Column("expires", sa.Float()),
        sa.Column("public", sa.Boolean(), nullable=False),
        sa.Column("has_optimizer", sa.Boolean(), nullable=False),
        sa.Column("user_metadata", sa.JSON(), nullable=False),
    )
    op.create_index("ix_checkpoints_expires", "checkpoints", ["expires"])
    op.create_index("ix_checkpoints_model_id", "checkpoints", ["model_id"])
    op.create_index("ix_checkpoints_tenant", "checkpoints", ["tenant"])


def upgrade() -> None:
    """Create all of them; those that others refer to first."""
    _create_api_keys()
    _create_requests()
    _create_sessions()
    _create_models()
    _create_samplers()
    _create_checkpoints()


def downgrade() -> None:
    """Drop all of them."""
    for table in ("checkpoints", "samplers", "models", "sessions", "requests", "api_keys"):
        op.drop_table(table)
