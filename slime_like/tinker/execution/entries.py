"""A call under way."""

from __future__ import annotations

import asyncio
import dataclasses
import time

from slime_like.tinker.execution.settings import ServiceSettings
from slime_like.tinker.records import Call, CallFailure, CallResult, Kind

PASSES = frozenset({Kind.FORWARD, Kind.FORWARD_BACKWARD})
CREATIONS = frozenset({Kind.CREATE_MODEL, Kind.CREATE_FROM_STATE})
#: What changes a model, so that it is done again from the last snapshot on.
REPEATED = frozenset({Kind.FORWARD_BACKWARD, Kind.OPTIM_STEP})


@dataclasses.dataclass(kw_only=True, eq=False)
class Entry:
    """A call between its first write and its answer's. tokens: its cost in the tenant's share."""

    request_id: str
    call: Call
    tokens: int
    arrived: float = dataclasses.field(default_factory=time.monotonic)
    finished: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    outcome: CallResult | CallFailure | None = None
    running: bool = False
    attempts: int = 0  # in which the backend died
    alone: bool = False  # not beside other tenants' passes
    serving: str | None = None  # the sampler that a sample is asked of, where another stands for its own

    @property
    def kind(self) -> Kind:
        """Of the call."""
        return self.call.kind

    @property
    def tenant(self) -> str:
        """Of the call."""
        return self.call.tenant

    @property
    def model_id(self) -> str:
        """Of a training call."""
        assert self.call.model_id is not None, "a training call names its model"
        return self.call.model_id

    @property
    def seq_id(self) -> int:
        """Of a training call."""
        assert self.call.seq_id is not None, "a training call has its place"
        return self.call.seq_id

    @property
    def sampler_id(self) -> str | None:
        """Whose weights a sample needs."""
        return self.serving or self.call.sampler_id

    def failure(self, category: str, message: str) -> CallFailure:
        """That it has no answer, and why."""
        return CallFailure(kind=self.kind, category=category, message=message)


def cost_tokens(call: Call, settings: ServiceSettings) -> int:
    """What a call counts as: its rows' tokens; a sample's prompt and all that may follow; a fixed number else."""
    if call.kind in PASSES:
        return max(1, sum(len(row.tokens) for row in call.rows))
    if call.sample is not None:
        job = call.sample
        return max(1, len(job.prompt) + job.num_samples * (job.max_tokens or settings.step_cost_tokens))
    return settings.step_cost_tokens
