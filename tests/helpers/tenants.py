"""Tenants of a trainer: their rows, and their whole gradients and weights as PEFT names them."""

from __future__ import annotations

import dataclasses

import numpy as np

from slime_like.records import LossRow, TenantPass, TrainSample
from tests.helpers.train_world import make_config


def loss_rows(samples: list[TrainSample]) -> tuple[LossRow, ...]:
    """Samples as clients send them: every token but the last is read, and scored on the next."""
    return tuple(
        LossRow(
            tokens=sample.tokens[:-1],
            targets=sample.tokens[1:].astype(np.int64),
            inputs={
                "weights": sample.weights[1:] * (sample.loss_mask[1:] != 0),
                "logprobs": sample.engine_logprobs[1:],
                "advantages": sample.advantages[1:],
            },
        )
        for sample in samples
    )


def one_pass(name: str, rows: tuple[LossRow, ...], loss: str = "cross_entropy", **options) -> TenantPass:
    """Of a tenant."""
    return TenantPass(weights=name, rows=rows, loss=loss, **options)


def trainer_of_tenants(place: dict, base: str, parallel: dict, *, num_ranks: int, port: int | None = None, **groups):
    """A started TrainWorker without tenants."""
    from slime_like.megatron_backend.worker import TrainWorker

    groups = {"batch": {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 40, "balance_data": True}} | groups
    config = dataclasses.replace(make_config(base, num_ranks=num_ranks, parallel=parallel, **groups), role="tenants")
    own = place | {"world_size": num_ranks} | ({} if port is None else {"master_port": port})
    worker = TrainWorker(config, **own)
    worker.start()
    return worker


def whole_numbers(worker, name: str, what: str = "master") -> dict[str, np.ndarray]:
    """A tenant's weights ("master"), or gradients as they were added, summed over the ranks ("gradient"): those of
    this pipeline stage's adapters, whole. Collective.
    """
    from slime_like.megatron_backend.lora.peft_files import adapter_tensors
    from slime_like.megatron_backend.lora.tenant_gradients import sum_gradients

    tenant = worker._tenants._tenants[name]
    numbers = tenant.memory.master
    if what == "gradient":
        before = tenant.memory.gradient.clone()
        sum_gradients(tenant.memory)
        numbers, tenant.memory.gradient = tenant.memory.gradient, before
    with tenant.memory.showing(numbers):
        return {key: x.float().numpy().copy() for key, x in adapter_tensors(tenant.files._shell).items()}
