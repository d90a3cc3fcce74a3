"""The tables. Times are seconds since the epoch; JSON columns hold what only clients read."""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    String,
    UniqueConstraint,
    false,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class Base(DeclarativeBase):
    """Of all tables."""

    type_annotation_map = {dict[str, Any]: JSON, list[str]: JSON}


class ApiKeyRow(Base):
    """A tenant's key: only its hash is here. revoked: when it ceased to count."""

    __tablename__ = "api_keys"
    id: Mapped[str] = mapped_column(String(64), primary_key=True)  # what the key begins with, to find it by
    tenant: Mapped[str] = mapped_column(String(128), index=True)
    key_hash: Mapped[str] = mapped_column(String(256))
    created: Mapped[float] = mapped_column(Float)
    revoked: Mapped[float | None] = mapped_column(Float)
    limits: Mapped[dict[str, Any]] = mapped_column(JSON, default=dict)


class TenantRow(Base):
    """What a tenant has of the server. None: what those have that are not named here (ServiceSettings)."""

    __tablename__ = "tenants"
    tenant: Mapped[str] = mapped_column(String(128), primary_key=True)
    weight: Mapped[float | None] = mapped_column(Float)  # its share beside others'
    max_requests: Mapped[int | None] = mapped_column(BigInteger)  # under way
    max_tokens: Mapped[int | None] = mapped_column(BigInteger)  # of these


class SessionRow(Base):
    """A client's process."""

    __tablename__ = "sessions"
    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    tenant: Mapped[str] = mapped_column(String(128), index=True)
    created: Mapped[float] = mapped_column(Float)
    last_heartbeat: Mapped[float] = mapped_column(Float)
    finished: Mapped[float | None] = mapped_column(Float)
    finish_reason: Mapped[str | None] = mapped_column(String(32))
    tags: Mapped[list[str]] = mapped_column(JSON, default=list)
    user_metadata: Mapped[dict[str, Any]] = mapped_column(JSON, default=dict)
    project_id: Mapped[str | None] = mapped_column(String(128))
    display_name: Mapped[str | None] = mapped_column(String(256))
    sdk_version: Mapped[str | None] = mapped_column(String(32))


class ModelRow(Base):
    """A training run. snapshot: the folder whose state has every call up to snapshot_seq in it; None: the start."""

    __tablename__ = "models"
    id: Mapped[str] = mapped_column(String(128), primary_key=True)
    session_id: Mapped[str] = mapped_column(ForeignKey("sessions.id"), index=True)
    tenant: Mapped[str] = mapped_column(String(128), index=True)
    base_model: Mapped[str] = mapped_column(String(512))
    lora_rank: Mapped[int] = mapped_column(Integer)
    spec: Mapped[dict[str, Any]] = mapped_column(JSON)  # ModelSpec
    created: Mapped[float] = mapped_column(Float)
    last_request: Mapped[float] = mapped_column(Float)
    released: Mapped[float | None] = mapped_column(Float)
    snapshot: Mapped[str | None] = mapped_column(String(1024))
    snapshot_seq: Mapped[int] = mapped_column(Integer, default=0)
    done_seq: Mapped[int] = mapped_column(Integer, default=-1)  # every call up to it has its answer; creation is call 0
    num_steps: Mapped[int] = mapped_column(Integer, default=0)
    user_metadata: Mapped[dict[str, Any]] = mapped_column(JSON, default=dict)


class RequestRow(Base):
    """A call and what became of it. state: queued, done, failed, cancelled."""

    __tablename__ = "requests"
    __table_args__ = (
        UniqueConstraint("model_id", "seq_id", name="one_request_a_seq_id"),
        UniqueConstraint("sampler_id", "seq_id", name="one_sample_a_seq_id"),
        Index("requests_of_a_model_by_state", "model_id", "state"),
    )
    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    tenant: Mapped[str] = mapped_column(String(128), index=True)
    session_id: Mapped[str] = mapped_column(String(64), index=True)
    kind: Mapped[str] = mapped_column(String(32))
    model_id: Mapped[str | None] = mapped_column(String(128))
    sampler_id: Mapped[str | None] = mapped_column(String(128))
    seq_id: Mapped[int | None] = mapped_column(BigInteger)  # of a cloned sampling client: from its number times 1e9
    state: Mapped[str] = mapped_column(String(16), index=True)
    created: Mapped[float] = mapped_column(Float)
    finished: Mapped[float | None] = mapped_column(Float, index=True)
    body: Mapped[bytes | None] = mapped_column(LargeBinary)  # until a snapshot has it, or it is done
    result: Mapped[bytes | None] = mapped_column(LargeBinary)
    category: Mapped[str | None] = mapped_column(String(16))
    error: Mapped[str | None] = mapped_column(String(4096))


class SamplerRow(Base):
    """What samples are asked of. folder None: the base model; "": its files are not kept any more."""

    __tablename__ = "samplers"
    id: Mapped[str] = mapped_column(String(128), primary_key=True)
    session_id: Mapped[str] = mapped_column(ForeignKey("sessions.id"), index=True)
    tenant: Mapped[str] = mapped_column(String(128), index=True)
    base_model: Mapped[str] = mapped_column(String(512))
    model_path: Mapped[str | None] = mapped_column(String(512))  # tinker://...
    folder: Mapped[str | None] = mapped_column(String(1024))
    created: Mapped[float] = mapped_column(Float)
    model_id: Mapped[str | None] = mapped_column(String(128), index=True)  # whose weights, of an ephemeral one
    is_inflight: Mapped[bool] = mapped_column(Boolean, default=False, server_default=false())  # it may serve newer ones
    superseded: Mapped[float | None] = mapped_column(Float)  # when newer ones of its model had taken its place


class CheckpointRow(Base):
    """Saved weights. kind: "training" (tinker://MODEL/weights/NAME), "sampler" (.../sampler_weights/NAME)."""

    __tablename__ = "checkpoints"
    path: Mapped[str] = mapped_column(String(512), primary_key=True)  # tinker://...
    model_id: Mapped[str] = mapped_column(ForeignKey("models.id"), index=True)
    tenant: Mapped[str] = mapped_column(String(128), index=True)
    kind: Mapped[str] = mapped_column(String(16))
    name: Mapped[str] = mapped_column(String(256))
    folder: Mapped[str] = mapped_column(String(1024))
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    created: Mapped[float] = mapped_column(Float)
    expires: Mapped[float | None] = mapped_column(Float, index=True)
    public: Mapped[bool] = mapped_column(Boolean, default=False)
    has_optimizer: Mapped[bool] = mapped_column(Boolean, default=False)
    user_metadata: Mapped[dict[str, Any]] = mapped_column(JSON, default=dict)
