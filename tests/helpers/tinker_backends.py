"""A trainer and engines whose numbers a plain loop can give too: float64 vectors, and tokens that follow from seeds."""

from __future__ import annotations

import asyncio
import os
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from slime_like.errors import RunError
from slime_like.records import LossRow, PassResult, TenantPass
from slime_like.tinker.errors import BackendLost
from slime_like.tinker.records import AdamSettings, ModelSpec, SampledSequence, SampleJob, SampleResult

SIZE = 8


class VectorModel:
    """Weights [SIZE], each target's loss the squared distance of one of them from its token; AdamW as PyTorch's."""

    def __init__(self, seed: int):
        self.weights = np.random.default_rng(seed).normal(size=SIZE)
        self.first, self.second, self.gradient = np.zeros(SIZE), np.zeros(SIZE), np.zeros(SIZE)
        self.num_steps = 0

    def loss(self, row: LossRow, *, forward_only: bool) -> np.ndarray:
        """[T] minus the loss of each target; adds the gradient unless forward_only."""
        index = row.targets % SIZE
        distance = self.weights[index] - row.tokens / 100
        if not forward_only:
            np.add.at(self.gradient, index, row.inputs["weights"].astype(np.float64) * distance)
        return -0.5 * distance**2

    def step(self, adam: AdamSettings) -> float:
        """Apply the gradients and clear them; their norm."""
        norm = float(np.linalg.norm(self.gradient))
        self.num_steps += 1
        self.first = adam.beta1 * self.first + (1 - adam.beta1) * self.gradient
        self.second = adam.beta2 * self.second + (1 - adam.beta2) * self.gradient**2
        first = self.first / (1 - adam.beta1**self.num_steps)
        second = self.second / (1 - adam.beta2**self.num_steps)
        self.weights = self.weights * (1 - adam.learning_rate * adam.weight_decay)
        self.weights = self.weights - adam.learning_rate * first / (np.sqrt(second) + adam.eps)
        self.gradient = np.zeros(SIZE)
        return norm

    def run(self, work: TenantPass) -> PassResult:
        """A pass as the trainer answers it."""
        log_probs = [self.loss(row, forward_only=work.forward_only) for row in work.rows]
        total = -sum(float(row.inputs["weights"] @ values) for row, values in zip(work.rows, log_probs, strict=True))
        return PassResult(log_probs=[values.astype(np.float32) for values in log_probs], metrics={"loss": total})


class VectorTrainer:
    """TrainingBackend of VectorModels. log: every verb that was executed; seconds: how long each takes."""

    def __init__(self, *, seconds: float = 0.0, context_length: int = 4096):
        self.seconds, self.context_length = seconds, context_length
        self.base_model = "tiny"
        self.models: dict[str, VectorModel] = {}
        self.log: list[tuple] = []
        self.lose_at: set[int] = set()  # numbers of verbs at which the trainer dies
        self.refuse: set[str] = set()  # models whose passes fail
        self.num_verbs = self.most_models = self.most_whole_models = 0
        self.whole_models: set[str] = set()  # whose client trains all parameters

    async def _verb(self, *what: object) -> None:
        self.num_verbs += 1
        self.log.append(what)
        if self.seconds:
            await asyncio.sleep(self.seconds)
        if self.num_verbs in self.lose_at:
            self.models.clear()
            raise BackendLost(f"the trainer died at verb {self.num_verbs}")

    def _model(self, model_id: str) -> VectorModel:
        if model_id not in self.models:
            raise AssertionError(f"{model_id} is not in the trainer")
        return self.models[model_id]

    async def create(self, spec: ModelSpec) -> None:
        """A vector that follows from the seed."""
        if spec.lora_rank > 64:
            raise RunError(f"rank {spec.lora_rank} is more than 64")
        await self._verb("create", spec.model_id)
        self.models[spec.model_id] = VectorModel(spec.seed)
        self.most_models = max(self.most_models, len(self.models))
        if spec.lora_rank == 0:
            self.whole_models.add(spec.model_id)
        self.most_whole_models = max(self.most_whole_models, len(self.whole_models & set(self.models)))

    async def run_passes(self, passes: Sequence[TenantPass]) -> list[PassResult | str]:
        """One after the other."""
        assert len({work.weights for work in passes}) == len(passes), "one pass a model"
        await self._verb("passes", *(work.weights for work in passes))
        return [
            f"{work.weights} is refused" if work.weights in self.refuse else self._model(work.weights).run(work)
            for work in passes
        ]

    async def optim_step(self, model_id: str, adam: AdamSettings) -> dict[str, float]:
        """The gradients' norm."""
        await self._verb("step", model_id)
        return {"grad_norm": self._model(model_id).step(adam)}

    async def save_state(self, model_id: str, folder: str, *, optimizer: bool) -> None:
        """One file, on disk."""
        await self._verb("save", model_id)
        model = self._model(model_id)
        arrays = {"weights": model.weights}
        if optimizer:
            arrays |= {"first": model.first, "second": model.second, "num_steps": np.array(model.num_steps)}
        with Path(folder, "state.npz").open("wb") as file:
            np.savez(file, **arrays)
            file.flush()
            os.fsync(file.fileno())

    async def load_state(self, model_id: str, folder: str, *, optimizer: bool) -> None:
        """What save_state wrote."""
        await self._verb("load", model_id)
        model = self._model(model_id)
        with np.load(Path(folder, "state.npz"), allow_pickle=False) as arrays:
            model.weights, model.gradient = arrays["weights"], np.zeros(SIZE)
            model.first, model.second, model.num_steps = np.zeros(SIZE), np.zeros(SIZE), 0
            if optimizer:
                model.first, model.second = arrays["first"], arrays["second"]
                model.num_steps = int(arrays["num_steps"])

    async def save_sampler(self, model_id: str, folder: str) -> None:
        """The weights alone."""
        await self.save_state(model_id, folder, optimizer=False)

    async def release(self, model_id: str) -> None:
        """Forget it."""
        self.models.pop(model_id, None)

    async def close(self) -> None:
        """Nothing to end."""


class VectorEngines:
    """SamplingBackend: tokens follow from the weights, the prompt and the seed."""

    def __init__(self, *, seconds: float = 0.0):
        self.seconds = seconds
        self.opened: dict[str, np.ndarray] = {}
        self.lose_next = 0
        self.num_running = self.most_running = 0
        self.asked: list[str] = []  # samplers, in the order of their samples
        self.gate = asyncio.Event()  # cleared: samples wait until it is set
        self.gate.set()

    async def open(self, sampler_id: str, folder: str | None) -> None:
        """Read its weights."""
        if folder is None:
            self.opened[sampler_id] = np.zeros(SIZE)
            return
        with np.load(Path(folder, "state.npz"), allow_pickle=False) as arrays:
            self.opened[sampler_id] = arrays["weights"]

    async def sample(self, job: SampleJob) -> SampleResult:
        """max_tokens tokens."""
        self.asked.append(job.sampler_id)
        self.num_running += job.num_samples
        self.most_running = max(self.most_running, self.num_running)
        try:
            if self.seconds:
                await asyncio.sleep(self.seconds)
            await self.gate.wait()
            if self.lose_next:
                self.lose_next -= 1
                self.opened.clear()
                raise BackendLost("the engine died")
            weights = self.opened[job.sampler_id]
        finally:
            self.num_running -= job.num_samples
        source = np.random.default_rng(zlib.crc32(weights.tobytes() + job.prompt.tobytes()) + (job.seed or 0))
        count = job.max_tokens or 4
        sequences = tuple(
            SampledSequence(
                tokens=source.integers(0, 100, count).astype(np.int32),
                logprobs=source.normal(size=count).astype(np.float32),
                stop_reason="length",
            )
            for _ in range(job.num_samples)
        )
        return SampleResult(sequences=sequences, weights=job.sampler_id)

    async def release(self, sampler_id: str) -> None:
        """Forget it."""
        self.opened.pop(sampler_id, None)

    async def close(self) -> None:
        """Nothing to end."""
