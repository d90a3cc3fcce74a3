"""Tenants on transformer-engine's layers, which are pretended, have the numbers that they have on ours.

Covers slime_like.megatron_backend.lora.segments where there is one.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.tenants import loss_rows, one_pass, trainer_of_tenants, whole_numbers
from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.train_world import make_samples, run_ranks
from tests.pretend_gpu.test_transformer_engine import GROUPED

SEQUENCE = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
#: name -> (family, ranks, --… of the parallel group, of the model with its layers)
ROWS = {
    "dense, tp2 with sequence parallelism": ("qwen3", 2, SEQUENCE, {}),
    "experts": ("qwen3_moe", 1, {}, GROUPED["model"]),
}
#: In every run; the other with scripts/test_long.sh.
MARKED = [row if row == "experts" else pytest.param(row, marks=pytest.mark.long_run) for row in ROWS]


def numbers(place: dict, base: str, row: str, model: dict) -> dict:
    """Log-probs and gradients of two tenants, in turns and together, and of one without the other."""
    from slime_like.config.lora import LoraConfig

    _, num_ranks, parallel, _ = ROWS[row]
    worker = trainer_of_tenants(place, base, parallel, num_ranks=num_ranks, port=place["master_port"], model=model)
    worker.add_tenant("ada", LoraConfig(lora_rank=4, lora_init="false"), 1)
    worker.add_tenant("bob", LoraConfig(lora_rank=3, lora_init="false", lora_target_modules=["q_proj", "o_proj"]), 2)
    rows = loss_rows(make_samples(6))
    answer = {}
    for together in (False, True):
        passes = worker.run_passes([one_pass(name, rows) for name in ("ada", "bob")], together=together)
        for name, result in zip(("ada", "bob"), passes, strict=True):
            answer[f"{name} {together}"] = np.concatenate(result.log_probs)
    for name in ("ada", "bob"):
        answer |= {f"{name}: {key}": value for key, value in whole_numbers(worker, name, "gradient").items()}
    worker.drop_tenant("ada")
    (result,) = worker.run_passes([one_pass("bob", rows, forward_only=True)])
    answer["bob alone"] = np.concatenate(result.log_probs)
    worker.close()
    return answer


@pytest.mark.parametrize("row", MARKED)
def test_tenants_on_its_layers_have_the_numbers_of_ours(pretend_te, tmp_path, row):
    family, num_ranks, _, model = ROWS[row]
    base = make_tiny_model(str(tmp_path / "model"), family, num_layers=2)
    theirs = pretend_te(numbers, num_ranks, base, row, model)
    ours = run_ranks(numbers, num_ranks, base, row, {})
    assert len(ours[0]) > 20
    for mine, others in zip(ours, theirs, strict=True):
        assert set(mine) == set(others)
        for name, value in mine.items():
            np.testing.assert_allclose(
                others[name], value, atol=2e-5 * max(1, np.abs(value).max()), rtol=0, err_msg=name
            )
        assert np.abs(mine["ada False"] - mine["bob False"]).max() > 0.01
        np.testing.assert_allclose(mine["bob alone"], mine["bob False"], atol=1e-5, rtol=0)
