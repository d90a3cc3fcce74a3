"""What a trainer is asked to do beside plain steps: every verb, every way through a step, on the device as on the host.

Covers slime_like.megatron_backend.worker where torch.cuda.is_available().
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from slime_like.records import BASE, REFERENCE
from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.train_world import make_config, make_samples, recipe_of, run_ranks
from tests.pretend_gpu.training import numbers_of

EVERYTHING = {"use_kl_loss": True, "kl_loss_coef": 0.01, "entropy_coef": 0.003, "use_tis": True, "use_opsm": True}
EVERYTHING |= {"get_mismatch_metrics": True}
CRITIC = {"advantage_estimator": "ppo", "value_clip": 0.2, "gamma": 0.9, "lambd": 0.8, "normalize_advantages": True}
DYNAMIC = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 40, "log_probs_max_tokens_per_gpu": 80}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
INTERLEAVED = {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2}
EARLY = {"overlap_grad_reduce": True, "overlap_param_gather": True}
TENSOR = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
EXPERTS = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
#: Name -> (family, ranks, groups of flags, whether it is a critic).
WAYS: dict[str, tuple] = {
    "every loss": ("qwen3", 1, {"loss": EVERYTHING, "batch": DYNAMIC | {"log_probs_chunk_size": 7}}, False),
    "critic": ("qwen2", 1, {"loss": CRITIC, "batch": DYNAMIC}, True),
    "padded and recomputed": (
        "glm4",
        1,
        {"batch": {"qkv_format": "bshd", "micro_batch_size": 2}, "parallel": RECOMPUTED},
        False,
    ),
    "interleaved, early": ("qwen3", 2, {"parallel": INTERLEAVED | EARLY, "loss": EVERYTHING, "batch": DYNAMIC}, False),
    "experts replayed, tp2 ep2": (
        "qwen3_moe",
        2,
        {"parallel": TENSOR | EXPERTS, "loss": {"use_routing_replay": True}},
        False,
    ),
    "latent, cp2": ("deepseek_v3", 2, {"parallel": {"context_parallel_size": 2}, "batch": DYNAMIC}, False),
}


def use_verbs(place: dict, folder: str, saved: str, groups: dict, is_critic: bool) -> dict:
    """Two rollouts, then weights out, a checkpoint written and read back, the reference following the policy."""
    from slime_like.megatron_backend.hf.names_and_shards import joins_export
    from slime_like.megatron_backend.worker import TrainWorker

    groups = dict(groups)
    if groups.get("loss", {}).get("use_kl_loss"):
        groups["checkpoint"] = {"ref_load": folder}
    config = make_config(folder, num_ranks=place["world_size"], num_steps=2, **numbers_of(folder, **groups))
    worker = TrainWorker(dataclasses.replace(config, role="critic") if is_critic else config, **place)
    worker.start()
    recipe = recipe_of(worker)
    samples = [dataclasses.replace(s, reward=float(i % 3), values=None) for i, s in enumerate(make_samples(8))]
    answer: dict = {"before": recipe.values(samples) if is_critic else recipe.log_probs(samples)}
    if is_critic:
        samples = [dataclasses.replace(s, values=v) for s, v in zip(samples, answer["before"], strict=True)]
    answer["metrics"] = [recipe.train(number, samples).metrics for number in range(2)]
    score = recipe.values if is_critic else recipe.log_probs
    answer["after"] = score(samples)
    answer["weights"] = {n: t.float().cpu().numpy() for n, t in worker.export(BASE)} if joins_export() else {}
    worker.save_state(saved, weights=BASE, num_rollouts_done=2, client_state={"a": 1})
    recipe.train(2, samples)
    resumed = worker.load_state(saved, weights=BASE, optimizer=True, schedule=True, rng=True)
    answer["resumed"] = {name: resumed[name] for name in ("num_rollouts_done", "client_state")}
    answer["reloaded"] = score(samples)
    worker.copy_weights(BASE, REFERENCE)
    if not is_critic:
        answer["reference"] = recipe.log_probs(samples, weights=REFERENCE)
    worker.close()
    return answer


@pytest.mark.parametrize("way", WAYS)
def test_every_verb_on_the_device_as_on_the_host(pretend, tmp_path, way):
    family, num_ranks, groups, is_critic = WAYS[way]
    folder = make_tiny_model(str(tmp_path / "model"), family, num_layers=4 if "interleaved" in way else 2)
    saved = [str(tmp_path / name) for name in ("device", "host")]
    for name in saved:
        (tmp_path / name).mkdir()
    device = pretend(use_verbs, num_ranks, folder, saved[0], groups, is_critic)
    host = run_ranks(use_verbs, num_ranks, folder, saved[1], groups, is_critic)
    for ours, theirs in zip(device, host, strict=True):
        assert_close(ours["before"], theirs["before"], 1e-6)
        assert ours["metrics"][0] == pytest.approx(theirs["metrics"][0], rel=1e-5, abs=1e-6)
        for name in ("after", "reloaded", "reference"):
            assert_close(ours.get(name, ()), theirs.get(name, ()), 1e-5)
        assert_close(ours["reloaded"], ours["after"], 1e-6)
        assert ours["resumed"] == theirs["resumed"] == {"num_rollouts_done": 2, "client_state": {"a": 1}}
        assert set(ours["weights"]) == set(theirs["weights"])
        for name, weight in ours["weights"].items():
            assert np.abs(weight - theirs["weights"][name]).max() < 1e-5, name


def assert_close(ours, theirs, largest: float) -> None:
    """Rows of numbers, a sample each."""
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=largest * max(1.0, float(np.abs(other).max())))
