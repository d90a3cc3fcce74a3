"""Shared prompts against each sample by itself, where the parity table has no rows: critics, adapters, routing replay,
and the steps of a rollout. Same losses, same gradients of everything that is trained, same weights after the steps.

Covers slime_like.megatron_backend.step.shared_packing and slime_like.megatron_backend.model.attention too.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.helpers.parity import sharing_batch
from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.train_world import add_gradients, free_ports, make_config, recipe_of, run_ranks

pytestmark = pytest.mark.multiprocess

DYNAMIC = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 40}
PPO = {"advantage_estimator": "ppo", "gamma": 0.9, "lambd": 0.8, "value_clip": 0.2}
ADAPTERS = {"lora_rank": 4, "lora_init": "false"}  # with B drawn, too, both sides have gradients
SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
FULL = {"recompute_granularity": "full", "recompute_num_layers": 1, "recompute_method": "uniform"}
LAYERS, EXPERTS, TOPK = 2, 4, 2


@dataclasses.dataclass(frozen=True)
class Case:
    """Flags of a trainer, twice: with shared prompts and without."""

    model: str = "dense"
    ranks: int = 1
    role: str = "actor"
    num_steps: int = 1
    groups: dict = dataclasses.field(default_factory=dict)


CASES = {
    "critic": Case(role="critic", groups={"loss": PPO}),
    "critic, tp2 sp": Case(ranks=2, role="critic", groups={"loss": PPO, "parallel": SP}),
    "adapters": Case(groups={"lora": ADAPTERS}),
    "adapters, tp2 sp": Case(ranks=2, groups={"lora": ADAPTERS, "parallel": SP}),
    "engine's experts": Case("experts", groups={"loss": {"use_rollout_routing_replay": True}}),
    "engine's experts, recomputed": Case(
        "experts", groups={"loss": {"use_rollout_routing_replay": True}, "parallel": FULL}
    ),
    "recorded experts, 2 steps": Case("experts", num_steps=2, groups={"loss": {"use_routing_replay": True}}),
    "dp2, 2 steps": Case(ranks=2, num_steps=2),
}


def samples_of(case: Case):
    """sharing_batch; what an engine would say of a token's experts depends on the tokens up to it only."""
    samples = []
    for sample in sharing_batch():
        changes: dict = {"values": np.sin(np.arange(len(sample.tokens), dtype=np.float32)), "reward": 0.5}
        if case.groups.get("loss", {}).get("use_rollout_routing_replay"):
            changes["routed_experts"] = np.stack(
                [_experts(sample.tokens[: stop + 1].tolist()) for stop in range(len(sample.tokens))]
            )
        samples.append(dataclasses.replace(sample, **changes))
    return samples


def _experts(tokens: list[int]) -> np.ndarray:
    drawn = np.random.default_rng(tokens).random((LAYERS, EXPERTS))
    return np.argsort(drawn, axis=-1)[:, :TOPK].astype(np.int8)


def run_case(place, case: Case, folder: str, port: int, share_prompt: str, **loss) -> dict:
    """Gradients of one step over all samples, then the metrics of a rollout, and every trained weight after it."""
    from megatron.core.distributed import finalize_model_grads

    from slime_like.megatron_backend.step.critic import with_value_targets
    from slime_like.megatron_backend.step.loss_spec import LossSpec
    from slime_like.megatron_backend.worker import TrainWorker
    from slime_like.records import BASE

    groups = dict(case.groups) | {"batch": DYNAMIC | {"share_prompt": share_prompt}}
    groups["loss"] = groups.get("loss", {}) | loss
    config = make_config(folder, num_ranks=case.ranks, num_samples=10, num_steps=case.num_steps, **groups)
    config = dataclasses.replace(config, role=case.role)
    worker = TrainWorker(config, **place | {"world_size": case.ranks, "master_port": port})
    worker.start()
    samples = samples_of(case)
    prepared = worker.prepare(samples)
    if case.role == "critic":
        (batch,) = with_value_targets([samples], [prepared], config.loss)
        metrics = worker.forward_backward(batch, LossSpec(), weights=BASE).metrics
    else:
        metrics = add_gradients(worker, samples)
    finalize_model_grads(list(worker.model))
    trained = {n: p for chunk in worker.model for n, p in chunk.named_parameters() if p.requires_grad}
    gradients = {name: parameter.main_grad.float().numpy().copy() for name, parameter in trained.items()}
    worker._clear_gradients()
    report = recipe_of(worker).train(0, samples)
    weights = {name: parameter.detach().float().numpy().copy() for name, parameter in trained.items()}
    worker.close()
    return {
        "computed": prepared.num_computed_tokens, "tokens": prepared.num_tokens, "metrics": metrics,
        "gradients": gradients, "report": report.metrics, "weights": weights,
    }  # fmt: skip


def run_cases(place, folders: dict[str, str], ports: list[int]) -> dict:
    """(case, --share-prompt) -> run_case; "first step scored": the plain way of old log-probs, prompts not shared."""
    results, ports = {}, list(ports)
    for name, case in CASES.items():
        for way, options in (("off", {}), ("on", {}), ("scored", {"score_first_step": True})):
            port = ports.pop(0)
            if place["rank"] >= case.ranks or (way == "scored" and case.num_steps == 1):
                continue
            asked = "off" if way == "scored" else way
            results[name, way] = run_case(place, case, folders[case.model], port, asked, **options)
    return results


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    folders = {
        name: make_tiny_model(str(root / name), family=family, num_layers=LAYERS)
        for name, family in (("dense", "qwen3"), ("experts", "qwen3_moe"))
    }
    return run_ranks(run_cases, 2, folders, free_ports(3 * len(CASES)), timeout_s=300)


def of_ranks(outcomes, name: str, way: str) -> list[dict]:
    return [of_rank[name, way] for of_rank in outcomes if (name, way) in of_rank]


@pytest.mark.parametrize("name", CASES)
def test_the_same_gradients_from_fewer_tokens(outcomes, name):
    for plain, shared in zip(of_ranks(outcomes, name, "off"), of_ranks(outcomes, name, "on"), strict=True):
        assert plain["computed"] == plain["tokens"] > 1.2 * shared["computed"]
        largest = max(np.abs(gradient).max() for gradient in plain["gradients"].values())
        assert largest > 0 and set(plain["gradients"]) == set(shared["gradients"])
        if name != "dp2, 2 steps":  # which ranks hold other parts of, with their samples
            for key, gradient in plain["gradients"].items():
                assert np.abs(gradient - shared["gradients"][key]).max() <= 1e-5 * largest, key
        for key, value in plain["metrics"].items():
            assert shared["metrics"][key] == pytest.approx(value, rel=1e-5, abs=1e-6), key


@pytest.mark.parametrize("name", CASES)
def test_a_rollout_says_and_moves_the_same(outcomes, name):
    """Adam divides by its second moment, which blows rounding up: weights are held to 2 % of a step of 1e-2."""
    for plain, shared in zip(of_ranks(outcomes, name, "off"), of_ranks(outcomes, name, "on"), strict=True):
        for key, value in plain["report"].items():
            if not key.startswith("perf/"):
                assert shared["report"][key] == pytest.approx(value, rel=1e-4, abs=1e-5), key
        for key, weight in plain["weights"].items():
            assert np.abs(weight - shared["weights"][key]).max() <= 2e-4, key


def test_what_was_saved_is_a_metric(outcomes):
    for name, case in CASES.items():
        if case.role == "actor":
            plain, shared = (of_ranks(outcomes, name, way)[0]["report"] for way in ("off", "on"))
            assert plain["perf/shared_prompt_tokens_saved"] == 0
            assert shared["perf/shared_prompt_tokens_saved"] > 0
            assert plain["perf/computed_tokens"] == (
                shared["perf/computed_tokens"] + shared["perf/shared_prompt_tokens_saved"]
            )


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.num_steps > 1])
def test_the_first_step_scores_itself_to_the_last_bit(outcomes, name):
    """Later steps are held against log-probs from before the first, which a pass of their own gives."""
    for saved, plain in zip(of_ranks(outcomes, name, "off"), of_ranks(outcomes, name, "scored"), strict=True):
        assert saved["report"] == plain["report"]
        assert all(np.array_equal(saved["weights"][key], weight) for key, weight in plain["weights"].items())
        assert saved["report"]["train/ppo_kl"] != 0  # of the second step
