"""The three sides that the server is made of, as each sees the next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from slime_like.records import PassResult, TenantPass
from slime_like.tinker.records import (
    AdamSettings,
    Call,
    CallFailure,
    CallResult,
    ModelSpec,
    SampleJob,
    SampleResult,
    StillWaiting,
)


class Service(Protocol):
    """Calls in, answers out. What `submit` has returned an id for survives the process."""

    async def submit(self, call: Call) -> str:
        """The request's id; the same one for the same (model_id, seq_id), or (sampler_id, seq_id).

        Raises Refused (errors.py): the tenant has too much under way, or the model is not there.
        """

    async def result(
        self, request_id: str, *, tenant: str, timeout_s: float
    ) -> CallResult | CallFailure | StillWaiting | None:
        """What became of it, waited for up to timeout_s; None: no such request of this tenant's."""

    async def cancel(self, request_id: str, *, tenant: str) -> None:
        """A sample that nobody wants any more; one that is done, or unknown, stays as it is."""

    def stats(self) -> dict[str, Any]:
        """Numbers for metrics; keys: service.py."""


class TrainingBackend(Protocol):
    """The trainer. Models are known by their ids; nothing here is durable but what was saved.

    Raises BackendLost (errors.py) when the trainer died and was built anew: nothing is resident then. Raises RunError
    for what the client did wrong.
    """

    @property
    def base_model(self) -> str:
        """What clients name it by."""

    @property
    def context_length(self) -> int:
        """Most tokens of a row."""

    async def create(self, spec: ModelSpec) -> None:
        """A new model: the same numbers for the same spec. One of that id that is there already is begun anew."""

    async def run_passes(self, passes: Sequence[TenantPass]) -> list[PassResult | str]:
        """Of several models at once (one pass of each), where it can; a str: what was wrong with that one, whose
        gradients are as they were before.
        """

    async def optim_step(self, model_id: str, adam: AdamSettings) -> dict[str, float]:
        """Metrics."""

    async def save_state(self, model_id: str, folder: str, *, optimizer: bool) -> None:
        """Weights (a PEFT folder, or HF's) and, if asked for, the optimizer's state; on disk when it returns."""

    async def load_state(self, model_id: str, folder: str, *, optimizer: bool) -> None:
        """What save_state wrote, perhaps of another of its shape; gradients are cleared. Only after create."""

    async def save_sampler(self, model_id: str, folder: str) -> None:
        """What engines load: a PEFT folder, or HF's."""

    async def release(self, model_id: str) -> None:
        """Forget it; nothing to do where there is no such."""

    async def close(self) -> None:
        """End the trainer."""


class SamplingBackend(Protocol):
    """The engines."""

    async def open(self, sampler_id: str, folder: str | None) -> None:
        """Serve a folder of save_sampler's (None: the base) under this id; nothing to do where it is served."""

    async def sample(self, job: SampleJob) -> SampleResult:
        """Generate. A sampler that was pushed out comes back by itself. Raises RunError for the client's mistakes,
        BackendLost when the engine died meanwhile.
        """

    async def release(self, sampler_id: str) -> None:
        """Forget it once its last request has ended."""

    async def close(self) -> None:
        """End the engines."""
