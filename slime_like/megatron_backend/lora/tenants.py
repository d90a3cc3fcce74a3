"""Clients' adapters, and some clients' whole models, over one frozen base: who is here, who is on the device, and what
each is asked to do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Iterator, Sequence

import torch

from slime_like.config.lora import LoraConfig
from slime_like.config.run import RunConfig
from slime_like.errors import ConfigError, RunError
from slime_like.megatron_backend.lora.build import start_adapters
from slime_like.megatron_backend.lora.segments import TenantAdapters
from slime_like.megatron_backend.lora.tenant_files import AdapterFiles, ModelFiles
from slime_like.megatron_backend.lora.tenant_gradients import (
    adapter_entries,
    gradient_norm,
    model_entries,
    sum_gradients,
    sum_shared_embedding,
)
from slime_like.megatron_backend.lora.tenant_memory import TenantMemory
from slime_like.megatron_backend.lora.tenant_rows import pass_problem
from slime_like.megatron_backend.lora.tenant_runner import TenantRunner, failure
from slime_like.megatron_backend.model.provider import unwrap
from slime_like.megatron_backend.reference import Weights, copy_weights, put_weights
from slime_like.megatron_backend.step.forward import device_of
from slime_like.megatron_backend.step.optimizer import AdamParams
from slime_like.records import PassResult, TenantPass

logger = logging.getLogger(__name__)


@dataclasses.dataclass
class Tenant:
    """A client's weights. lora: None where they are a whole model."""

    name: str
    lora: LoraConfig | None
    memory: TenantMemory
    files: AdapterFiles | ModelFiles


class Tenants:
    """All tenants of a trainer. Every method but the properties is collective.

    Most that are on the device at once, of those with adapters: `max_resident`, None: all of them. The one that was
    used longest ago makes way. A whole model is its own base: it takes the model's place for its passes, while the
    start weights, and other whole models, wait on the host.
    """

    def __init__(self, config: RunConfig, model: Sequence[torch.nn.Module]):
        self._config, self._stage = config, unwrap(model)
        self._device = device_of(self._stage)
        self._adapters = TenantAdapters(self._stage, config.model)
        self._runner = TenantRunner(config, model, self._adapters)
        self._tenants: dict[str, Tenant] = {}  # the least lately used first
        self._start: Weights | None = None  # the base on the host, where a whole model is trained
        self._in_model: str | None = None  # the tenant with a whole model that is in place; None: the base
        self._failing: set[str] = set()  # tenants whose last pass failed beside others: they share with nobody for now
        self.max_resident: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Of all tenants, sorted."""
        return tuple(sorted(self._tenants))

    @property
    def resident(self) -> tuple[str, ...]:
        """Of those whose numbers are on the device, sorted."""
        return tuple(name for name in self.names if self._tenants[name].memory.is_resident)

    # ------------------------------------------------------------------ come and go

    def add(self, name: str, lora: LoraConfig | None, seed: int) -> None:
        """A tenant that starts as PEFT's adapters start, or with the base's weights.

        Raises ConfigError for adapters that the model cannot have, RunError for a name that is here.
        """
        if name in self._tenants:
            raise RunError(f"tenant {name!r} is here already. Fix: another name, or drop it first.")
        if lora is None:
            self._add_model(name)
            return
        problems = lora.problems() + lora.target_problems(self._config.model)
        if problems or not lora.enabled:
            raise ConfigError(problems or [f"--lora-rank {lora.lora_rank}: adapters need a rank of at least 1."])
        shell = self._adapters.add(name, lora, self._device).shell
        start_adapters(shell, lora, seed=seed)
        memory = TenantMemory(
            adapter_entries(shell, lr_ratio_of_b=lora.lora_plus_lr_ratio), self._device, attached=True
        )
        files = AdapterFiles(self._config, lora, shell, memory)
        self._tenants[name] = Tenant(name, lora, memory, files)
        self._make_way([name])

    def _add_model(self, name: str) -> None:
        self.show_base()
        if self._start is None:
            self._start = copy_weights(self._stage)
        self._send_whole_models_home()
        memory = TenantMemory(model_entries(self._stage), self._device, attached=False)
        self._tenants[name] = Tenant(name, None, memory, ModelFiles(self._config, self._stage, memory))

    def drop(self, name: str) -> None:
        """Forget a tenant, and what is not saved of it."""
        tenant = self._get(name)
        if tenant.lora is None:
            self.show_base()
        else:
            self._adapters.remove(name)
        del self._tenants[name]
        if all(other.lora is not None for other in self._tenants.values()):
            self._start = None
        self._failing.discard(name)

    def limit(self, max_resident: int | None) -> None:
        """See the class. Raises ValueError below 1."""
        if max_resident is not None and max_resident < 1:
            raise ValueError(f"{max_resident} adapters on the device: there must be room for one.")
        self.max_resident = max_resident
        self._make_way([])

    # ------------------------------------------------------------------ passes and steps

    def run(self, passes: Sequence[TenantPass], *, together: bool = False) -> list[PassResult | str]:
        """Each pass's result, or what was wrong with it: then it has left no trace.

        together: rows of different tenants may share micro-batches, which is faster and rounds otherwise; else a
        tenant's numbers are those that it has alone, to the bit. A pass that fails among others is told so, and they
        are done again without it: their numbers are as if it had not come.
        """
        answers: dict[int, PassResult | str] = {}
        for number, order in enumerate(passes):
            problem = pass_problem(order, self._config.model)
            if order.weights not in self._tenants:
                problem = f"tenant {order.weights!r} is not here."
            if problem is not None:
                answers[number] = problem
        ready = [number for number in range(len(passes)) if number not in answers]
        for group in self._groups(passes, ready) if together else [[number] for number in ready]:
            answers.update(self._run_apart(passes, group))
        return [answers[number] for number in range(len(passes))]

    def _run_apart(self, passes: Sequence[TenantPass], group: Sequence[int]) -> dict[int, PassResult | str]:
        """The answers of passes that share micro-batches, which no failing one among them has touched."""
        answers: dict[int, PassResult | str] = {}
        left = list(group)
        while left:
            results = self._run_group([passes[number] for number in left])
            failed = [number for number, result in zip(left, results, strict=True) if isinstance(result, str)]
            self._failing.update(passes[number].weights for number in failed if len(left) > 1)
            self._failing.difference_update(passes[number].weights for number in left if number not in failed)
            if len(left) == 1 or not failed:
                return answers | dict(zip(left, results, strict=True))
            # Who has failed is asked alone, so that a neighbour's NaN is not taken for its own.
            for number in failed:
                answers |= self._run_apart(passes, [number])
            left = [number for number in left if number not in failed]
        return answers

    def _groups(self, passes: Sequence[TenantPass], ready: Sequence[int]) -> list[list[int]]:
        """Passes that share micro-batches, at most one of each tenant, each tenant's in their order."""
        groups: list[list[int]] = []
        last: dict[str, int] = {}  # the group of a tenant's last pass
        for number in ready:
            order = passes[number]
            at_least = last.get(order.weights, -1) + 1
            fitting = (
                place
                for place in range(at_least, len(groups))
                if self._fits(order, [passes[other] for other in groups[place]])
            )
            place = next(fitting, len(groups))
            groups[place:] = groups[place:] or [[]]
            groups[place].append(number)
            last[order.weights] = place
        return groups

    def _fits(self, order: TenantPass, others: Sequence[TenantPass]) -> bool:
        names = [order.weights, *(other.weights for other in others)]
        room = self.max_resident is None or len(names) <= self.max_resident
        adapters_only = all(self._tenants[name].lora is not None for name in names)
        same = all(other.forward_only == order.forward_only for other in others)
        if self._failing.intersection(names):
            return False
        return room and adapters_only and same and self._runner.can_share(names)

    def _run_group(self, passes: Sequence[TenantPass]) -> list[PassResult | str]:
        tenants = [self._present(order.weights) for order in passes]
        self._make_way([tenant.name for tenant in tenants])
        if passes[0].forward_only:
            results = self._runner.run(passes)
        else:
            with contextlib.ExitStack() as stack:
                for tenant in tenants:
                    stack.enter_context(tenant.memory.collecting())
                results = self._runner.run(passes)
        problems = [failure(order, result) for order, result in zip(passes, results, strict=True)]
        keeps = not any(problems)  # the others of one that fails are done again
        if not passes[0].forward_only:
            for tenant in tenants:
                (tenant.memory.keep if keeps else tenant.memory.drop)()
        return [result if problem is None else problem for result, problem in zip(results, problems, strict=True)]

    def step(self, name: str, adam: AdamParams, grad_clip: float) -> dict[str, float]:
        """AdamW with the gradients that were added since the last step; gives their norm, and the learning rate.

        grad_clip: largest norm that they may have, 0: any. Raises RunError if they are not finite: then they are
        cleared, and no step is taken.
        """
        memory = self._present(name).memory
        sum_gradients(memory)
        if self._tenants[name].lora is None:
            sum_shared_embedding(memory, self._stage)
        norm = gradient_norm(memory)
        if not math.isfinite(norm):
            memory.clear_gradient()
            raise RunError(f"tenant {name!r}: the gradients' norm is {norm}. They are cleared, and no step was taken.")
        if grad_clip > 0 and norm > grad_clip:
            assert memory.gradient is not None
            memory.gradient.mul_(grad_clip / (norm + 1e-6))  # as Megatron's and torch's clipping
        memory.step(adam)
        if self._in_model == name:
            memory.put()
        return {"train/grad_norm": norm, "train/lr": adam.lr}

    # ------------------------------------------------------------------ disk

    def save(self, name: str, folder: str, *, optimizer: bool) -> None:
        """See tenant_files. Gradients are not part of it. Raises SaveError."""
        self._present(name).files.save(folder, optimizer=optimizer)

    def export(self, name: str, folder: str) -> None:
        """For engines. Raises SaveError."""
        self._present(name).files.export(folder)

    def load(self, name: str, folder: str, *, optimizer: bool) -> None:
        """Take what a tenant of the same shape saved; gradients are cleared. Raises CheckpointError: the tenant then
        stays as it was, or holds a part of what could be read.
        """
        tenant = self._present(name)
        tenant.files.load(folder, optimizer=optimizer)
        tenant.memory.clear_gradient()
        if self._in_model == name:
            tenant.memory.put()

    # ------------------------------------------------------------------ place

    def show_base(self) -> None:
        """The model holds the start weights again."""
        if self._in_model is not None:
            assert self._start is not None, "it was kept when a whole model came"
            put_weights(self._stage, self._start)
            self._in_model = None

    def _get(self, name: str) -> Tenant:
        if name not in self._tenants:
            raise RunError(f"tenant {name!r} is not here. Known: {', '.join(self.names) or 'none'}.")
        return self._tenants[name]

    def _present(self, name: str) -> Tenant:
        """The tenant, on the device, with what it is trained over in the model; the last to make way now."""
        tenant = self._get(name)
        self._tenants[name] = self._tenants.pop(name)
        if tenant.lora is not None:
            self.show_base()
            with _timed("came to the device", name, coming=not tenant.memory.is_resident):
                self._make_way([name])
                tenant.memory.come()
        elif self._in_model != name:
            with _timed("took the model's place", name, coming=True):
                self._send_whole_models_home(but=name)
                tenant.memory.come()
                tenant.memory.put()
            self._in_model = name
        return tenant

    def _send_whole_models_home(self, but: str | None = None) -> None:
        for tenant in self._tenants.values():
            if tenant.lora is None and tenant.name != but:
                tenant.memory.leave()

    def _make_way(self, needed: Sequence[str]) -> None:
        """Send who was used longest ago to the host, until there is room for `needed`."""
        if self.max_resident is None:
            return
        here = [t for t in self._tenants.values() if t.lora is not None and t.memory.is_resident]
        coming = [name for name in needed if not self._tenants[name].memory.is_resident]
        for tenant in [tenant for tenant in here if tenant.name not in needed]:
            if len(here) + len(coming) <= self.max_resident:
                return
            with _timed("left for the host", tenant.name, coming=True):
                tenant.memory.leave()
            here.remove(tenant)


@contextlib.contextmanager
def _timed(what: str, name: str, *, coming: bool) -> Iterator[None]:
    started = time.monotonic()
    yield
    if coming:
        logger.debug("tenant %s %s in %.2f ms", name, what, 1e3 * (time.monotonic() - started))
