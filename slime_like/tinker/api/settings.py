"""What a server offers, and what it takes."""

from __future__ import annotations

import dataclasses

from slime_like.tinker.api.wire.bounds import BodyLimits


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A base model. name: what clients ask for it by; tokenizer: a folder, or what transformers loads one by."""

    name: str
    context_length: int
    tokenizer: str
    architecture: str = ""
    trainable: bool = True
    sampleable: bool = True
    max_lora_rank: int = 512


@dataclasses.dataclass(frozen=True, kw_only=True)
class TenantQuota:
    """Of one tenant at any moment, unless its key says otherwise; more is answered with 429 until some are done."""

    requests: int = 4096  # HTTP requests; a client waits in one for each answer that it has asked for
    body_bytes: int = 512 * 2**20  # of bodies that are being read


@dataclasses.dataclass(frozen=True, kw_only=True)
class ApiSettings:
    """Of one app."""

    models: tuple[ServedModel, ...]
    #: How long a client waits for an answer in one request: its own patience ends at 45 s.
    poll_s: float = 30.0
    #: How long a body may take to come.
    body_s: float = 120.0
    limits: BodyLimits = BodyLimits()
    quota: TenantQuota = TenantQuota()
    #: Whether clients before 0.25 send protobuf, as later ones always do, and whether any compress it.
    protobuf_passes: bool = True
    compress_passes: bool = True
    #: Samples that a client has under way at most.
    client_samples: int = 2000
    #: An answer larger than this is announced first, so that clients make room for it.
    announce_bytes: int = 4 * 2**20
    #: How long a verified key counts without asking the database: a revoked one ends after this.
    key_cache_s: float = 10.0
    #: How long an OpenAI client's answer may take.
    answer_s: float = 600.0
    #: How long a link to saved weights works.
    link_s: float = 3600.0

    def model(self, name: str) -> ServedModel | None:
        """The base model of a name."""
        return next((model for model in self.models if model.name == name), None)
