"""A trainer of tenants on the device as on the host: passes alone and together, steps, room for one, a whole model, and
files.

Covers slime_like.megatron_backend.lora.tenants where torch.cuda.is_available().
"""

from __future__ import annotations

import numpy as np
import pytest

from slime_like.config.lora import LoraConfig
from slime_like.megatron_backend.step.optimizer import AdamParams
from tests.helpers.tenants import loss_rows, one_pass, trainer_of_tenants, whole_numbers
from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.train_world import make_samples, run_ranks

STEP = AdamParams(lr=1e-2, eps=1e-3)


def use_tenants(place: dict, folder: str, saved: str, parallel: dict) -> dict:
    """Two tenants and a whole model, three steps each."""
    import torch

    worker = trainer_of_tenants(place, folder, parallel, num_ranks=place["world_size"], optimizer={"bf16": False})
    rows = loss_rows(make_samples(8))
    worker.add_tenant("ada", LoraConfig(lora_rank=4), 1)
    worker.add_tenant("bob", LoraConfig(lora_rank=3, lora_target_modules=["q_proj", "down_proj"]), 2)
    worker.add_tenant("all", None, 0)
    answer: dict = {"losses": [], "norms": []}
    for number in range(3):
        worker.limit_tenants(1 if number == 2 else None)
        passes = [one_pass("ada", rows), one_pass("bob", rows), one_pass("all", rows)]
        answer["losses"] += [result.metrics["loss"] for result in worker.run_passes(passes, number == 1)]
        answer["norms"] += [worker.tenant_step(name, STEP, 1.0)["train/grad_norm"] for name in ("ada", "bob", "all")]
    on_host = worker._tenants._tenants["ada"].memory
    answer["resident"] = worker._tenants.resident
    answer["devices"] = on_host.master.device.type, worker._tenants._tenants["bob"].memory.master.device.type
    for name in ("ada", "all"):
        worker.save_tenant(name, f"{saved}/{name}", True)
        worker.load_tenant(name, f"{saved}/{name}", True)
    answer["weights"] = {name: whole_numbers(worker, name) for name in ("ada", "bob")}
    answer["whole"] = worker.run_passes([one_pass("all", rows, forward_only=True)])[0].log_probs
    answer["cuda"] = torch.cuda.is_available()
    worker.close()
    return answer


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long_run)])
def test_tenants_on_the_device_are_those_on_the_host(pretend, tmp_path, ranks):
    base = make_tiny_model(str(tmp_path / "model"), "qwen3", num_layers=2)
    parallel = {"tensor_model_parallel_size": ranks, "sequence_parallel": ranks > 1}
    on_device = pretend(use_tenants, ranks, base, str(tmp_path / "device"), parallel)
    on_host = run_ranks(use_tenants, ranks, base, str(tmp_path / "host"), parallel)
    for ours, theirs in zip(on_device, on_host, strict=True):
        assert ours["cuda"] and not theirs["cuda"]
        assert ours["resident"] == theirs["resident"] == ("all", "bob")
        assert ours["devices"] == ("cpu", "cuda")
        np.testing.assert_allclose(ours["losses"], theirs["losses"], rtol=1e-5)
        np.testing.assert_allclose(ours["norms"], theirs["norms"], rtol=1e-4)
        for name, matrices in theirs["weights"].items():
            for key, matrix in matrices.items():
                np.testing.assert_allclose(ours["weights"][name][key], matrix, atol=1e-4, rtol=0, err_msg=key)
        for mine, expected in zip(ours["whole"], theirs["whole"], strict=True):
            np.testing.assert_allclose(mine, expected, atol=1e-3, rtol=0)
