"""The trainer's verbs for many clients, as the service calls them: one at a time, none of them in the event loop."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from slime_like.config.lora import LoraConfig
from slime_like.config.lora_targets import expert_of, target_modules
from slime_like.config.model import ModelConfig
from slime_like.config.optimizer import AdamParams
from slime_like.errors import RunError, SlimeLikeError
from slime_like.records import PassResult, TenantPass
from slime_like.tinker.errors import BackendLost
from slime_like.tinker.records import AdamSettings, ModelSpec

logger = logging.getLogger(__name__)

#: HF modules whose names may end as others' with adapters do, and which have none.
_EXPERTS = r".*\.experts\..*"


class Group(Protocol):
    """The trainer's ranks, whose verbs block."""

    def tenants(self, method: str, *args: Any) -> Any:
        """What a verb of tenants gives."""

    def in_step(self) -> bool:
        """Whether every rank lives and has ended what it was asked for."""

    def close(self) -> None:
        """End them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainerOptions:
    """base_model: what clients name it by; lora_alpha: of adapters whose client gives none; max_resident: adapters on
    the device; shares_micro_batches: rows of several models may be in one.
    """

    base_model: str
    model: ModelConfig
    context_length: int
    lora_alpha: float
    max_rank: int
    max_resident: int
    shares_micro_batches: bool = False


class GroupTraining:
    """The TrainingBackend over a group of ranks. start: makes one and waits until it is up; first: one that is."""

    def __init__(self, start: Callable[[], Group], options: TrainerOptions, first: Group | None = None):
        self._start, self._options, self._first = start, options, first
        self._group: Group | None = None
        self._names: set[str] = set()
        self._turn = asyncio.Lock()  # ranks take part in a verb together: another must not come between

    @property
    def base_model(self) -> str:
        """What clients name it by."""
        return self._options.base_model

    @property
    def context_length(self) -> int:
        """Most tokens of a row."""
        return self._options.context_length

    async def begin(self) -> None:
        """Start the ranks, where none are up. Raises RunError."""
        async with self._turn:
            await self._begin()

    async def create(self, spec: ModelSpec) -> None:
        """A new model: the same numbers for the same spec. One of that id that is there already is begun anew."""
        options = self._options
        lora = lora_of(spec, options.model, default_alpha=options.lora_alpha, max_rank=options.max_rank)
        if spec.model_id in self._names:
            await self.release(spec.model_id)
        await self._call("add_tenant", spec.model_id, lora, spec.seed)
        self._names.add(spec.model_id)

    async def run_passes(self, passes: Sequence[TenantPass]) -> list[PassResult | str]:
        """Of several models at once; a str: what was wrong with that one."""
        return await self._call("run_passes", list(passes), self._options.shares_micro_batches)

    async def optim_step(self, model_id: str, adam: AdamSettings) -> dict[str, float]:
        """Metrics: train/grad_norm, train/lr."""
        try:
            params = AdamParams(
                lr=adam.learning_rate, betas=(adam.beta1, adam.beta2), eps=adam.eps, weight_decay=adam.weight_decay
            )
        except ValueError as error:
            raise RunError(f"AdamParams: {error}.") from error
        return await self._call("tenant_step", model_id, params, adam.grad_clip_norm)

    async def save_state(self, model_id: str, folder: str, *, optimizer: bool) -> None:
        """Weights and, if asked for, the optimizer's state; on disk when it returns."""
        await self._call("save_tenant", model_id, folder, optimizer)

    async def load_state(self, model_id: str, folder: str, *, optimizer: bool) -> None:
        """What save_state wrote, perhaps of another model of the same shape; gradients are cleared."""
        await self._call("load_tenant", model_id, folder, optimizer)

    async def save_sampler(self, model_id: str, folder: str) -> None:
        """What engines load: a PEFT folder, or HF's."""
        await self._call("export_tenant", model_id, folder)

    async def release(self, model_id: str) -> None:
        """Forget it; nothing to do where there is no such."""
        if model_id in self._names:
            self._names.discard(model_id)
            await self._call("drop_tenant", model_id)

    async def close(self) -> None:
        """End the ranks."""
        async with self._turn:
            group, self._group, self._first = self._group or self._first, None, None
            if group is not None:
                await asyncio.to_thread(group.close)

    async def _call(self, method: str, *args: Any) -> Any:
        # A verb that has begun ends: were its caller cancelled in between, the next verb would meet ranks that are not
        # free, and nobody would know what it did.
        return await asyncio.shield(asyncio.ensure_future(self._in_turn(method, *args)))

    async def _in_turn(self, method: str, *args: Any) -> Any:
        async with self._turn:
            if self._group is None:  # those before could not be started anew
                try:
                    await self._begin()
                except SlimeLikeError as error:
                    raise BackendLost(f"the trainer does not start: {error}") from error
                raise BackendLost("the trainer was started anew: nothing that was not saved is there.")
            group = self._group
            try:
                return await asyncio.to_thread(group.tenants, method, *args)
            except SlimeLikeError as error:
                if await asyncio.to_thread(group.in_step):
                    raise RunError(str(error)) from error
                raise await self._anew(method, error) from error

    async def _anew(self, method: str, error: SlimeLikeError) -> BackendLost:
        """Start other ranks in the place of those that died, or got out of step."""
        logger.warning("the trainer was lost during %s and is started anew: %s", method, error)
        group, self._group = self._group, None
        self._names.clear()
        if group is not None:
            await asyncio.to_thread(group.close)
        try:
            await self._begin()
        except SlimeLikeError as failure:
            return BackendLost(f"the trainer was lost during {method}, and did not start anew: {failure}")
        return BackendLost(f"the trainer was lost during {method}, and was started anew: {error}")

    async def _begin(self) -> None:
        group, self._first = self._first, None
        if group is None:
            group = await asyncio.to_thread(self._start)
        try:
            await asyncio.to_thread(group.tenants, "limit_tenants", self._options.max_resident)
        except BaseException:
            await asyncio.to_thread(group.close)
            raise
        self._group = group


def lora_of(spec: ModelSpec, model: ModelConfig, *, default_alpha: float, max_rank: int) -> LoraConfig | None:
    """The adapters that a client asked for; None: it trains all parameters. Raises RunError for none that can be."""
    if spec.lora_rank == 0:
        return None
    if not 1 <= spec.lora_rank <= max_rank:
        raise RunError(f"lora_rank {spec.lora_rank}: from 1 to --max-lora-rank {max_rank}, or 0 for all parameters.")
    targets = adapted_modules(model, attention=spec.train_attn, mlp=spec.train_mlp)
    if not targets:
        raise RunError(
            f"train_attn={spec.train_attn}, train_mlp={spec.train_mlp}, train_unembed={spec.train_unembed}: nothing is"
            " left with an adapter; the output layer has none here. Fix: train_attn or train_mlp."
        )
    alpha = default_alpha if spec.lora_alpha is None else spec.lora_alpha
    return LoraConfig(
        lora_rank=spec.lora_rank,
        lora_alpha=float(alpha),
        lora_target_modules=targets,
        lora_exclude_modules=[_EXPERTS] if _has_experts(model) else None,
    )


def adapted_modules(model: ModelConfig, *, attention: bool = True, mlp: bool = True) -> list[str]:
    """Ends of the names of HF modules with an adapter: every linear layer of these parts, but experts."""
    wanted = {".self_attn.": attention, ".mlp.": mlp}
    return sorted(
        {
            name.rsplit(".", 1)[-1]
            for name in target_modules(model)
            if expert_of(name) is None and any(part in name and is_wanted for part, is_wanted in wanted.items())
        }
    )


def _has_experts(model: ModelConfig) -> bool:
    return any(expert_of(name) is not None for name in target_modules(model))
