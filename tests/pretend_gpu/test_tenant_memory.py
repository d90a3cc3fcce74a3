"""What tenants take of the device is what the plan of a server says.

Covers slime_like.planning.memory.adapters and slime_like.megatron_backend.lora.tenant_memory where there is a device.
"""

from __future__ import annotations

import gc

import pytest

from slime_like.config.lora import LoraConfig
from slime_like.config.parallel import ParallelConfig
from slime_like.planning.memory.adapters import TenantRoom, adapter_chunks, whole_model_bytes
from tests.helpers.tenants import loss_rows, one_pass, trainer_of_tenants
from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.train_world import make_config, make_samples

#: name -> (ranks, --… of the parallel group, bf16)
ROWS = {
    "bf16": (1, {}, True),
    "fp32, tp2": (2, {"tensor_model_parallel_size": 2}, False),
    "bf16, pp2": (2, {"pipeline_model_parallel_size": 2}, True),
}
MARKED = [name if name == "bf16" else pytest.param(name, marks=pytest.mark.long_run) for name in ROWS]
LORA = LoraConfig(lora_rank=64)
ROOM = TenantRoom(lora=LORA, resident=2, held=3)


def measured(place: dict, base: str, row: str) -> dict:
    """Bytes on the device beside the base: of adapters between a pass and its step, and after all; and of one client
    with all parameters.
    """
    from slime_like.megatron_backend.step.optimizer import AdamParams
    from tests.pretend_gpu.device import live_bytes

    num_ranks, parallel, bf16 = ROWS[row]
    worker = trainer_of_tenants(place, base, parallel, num_ranks=num_ranks, optimizer={"bf16": bf16})
    worker.limit_tenants(ROOM.resident)
    rows = loss_rows(make_samples(2))

    def now() -> int:
        gc.collect()
        return live_bytes()

    before, names = now(), ("ada", "bob", "cyd")
    for name in names:
        worker.add_tenant(name, LORA, 1)
    for _ in range(2):  # whoever was away, too
        for name in names:
            worker.run_passes([one_pass(name, rows)])
            worker.tenant_step(name, AdamParams(lr=1e-3), 0.0)
    answer = {"stepped": now() - before}
    for name in names[:2]:
        worker.run_passes([one_pass(name, rows)])
    answer["with gradients"] = now() - before
    tenants = worker._tenants._tenants
    answer["host"] = sum(4 * tenant.memory.size * 4 for tenant in tenants.values() if tenant.memory._host is not None)
    for name in names:
        worker.drop_tenant(name)
    answer["dropped"] = now() - before
    worker.add_tenant("dan", None, 1)
    worker.run_passes([one_pass("dan", rows)])
    worker.tenant_step("dan", AdamParams(lr=1e-3), 0.0)
    worker.run_passes([one_pass("dan", rows)])
    answer["all parameters"] = now() - before
    worker.close()
    return answer


@pytest.mark.parametrize("row", MARKED)
def test_tenants_take_what_the_plan_says(pretend, tmp_path, row):
    num_ranks, flags, bf16 = ROWS[row]
    base = make_tiny_model(str(tmp_path / "model"), "qwen3", num_layers=2)
    config = make_config(base, num_ranks=num_ranks, parallel=flags, optimizer={"bf16": bf16})
    parallel, width = ParallelConfig(**flags), 2 if bf16 else 4
    for rank, answer in enumerate(pretend(measured, num_ranks, base, row)):
        stage = rank // (num_ranks // parallel.pipeline_model_parallel_size)
        elements = sum(p.numel for chunk in adapter_chunks(config.model, parallel, stage, LORA) for p in chunk)
        planned = ROOM.on_device(elements, width=width, passing=False)
        # beside them little: one zero for each who is away, what stages send each other
        assert answer["with gradients"] == pytest.approx(sum(planned.values()), rel=1e-2)
        assert answer["stepped"] == pytest.approx(sum(planned.values()) - planned["gradients"], rel=1e-2)
        assert answer["host"] <= ROOM.on_host(elements) == 3 * 16 * elements
        assert answer["dropped"] < 0.02 * answer["stepped"]
        # without the gradients that a pass collects, of 20 bytes an element, or 22 with a bf16 copy
        whole = whole_model_bytes(config) * (18 / 22 if bf16 else 16 / 20)
        assert answer["all parameters"] <= 1.02 * whole
        if parallel.pipeline_model_parallel_size == 1:
            assert answer["all parameters"] >= 0.98 * whole
