"""Trainers that take their experts from elsewhere, over many layouts, against HF transformers with the same experts
forced on its routers.
"""
# Covers slime_like.megatron_backend.step.routing_replay too, which it does not import itself.

import dataclasses

import numpy as np
import pytest
import torch

from tests.helpers.hf_truth import load_model
from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.train_world import advantage_of, free_ports, make_config, make_samples, recipe_of, run_ranks

pytestmark = pytest.mark.multiprocess

LAYERS, EXPERTS, TOPK = 4, 4, 2
WORKERS = 4  # of one case at most, one after the other
TEMPERATURE = 0.7
DYNAMIC = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 40, "balance_data": True}
EP2, PP2, CP2 = (
    {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
    {"pipeline_model_parallel_size": 2},
    {"context_parallel_size": 2},
)
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@dataclasses.dataclass(frozen=True)
class Case:
    """One layout."""

    name: str
    ranks: int = 1
    parallel: dict = dataclasses.field(default_factory=dict)
    batch: dict = dataclasses.field(default_factory=lambda: DYNAMIC)
    recorded: bool = False  # whether replay of the pass before the first step is looked at, too


CASES = [
    Case("one rank", recorded=True),
    Case("one rank, recomputed", 1, RECOMPUTED),
    Case("one rank, padded", batch={"micro_batch_size": 2, "qkv_format": "bshd"}),
    Case("tp2 sp ep2", 2, TP2 | EP2),
    Case("cp2", 2, CP2, recorded=True),
    Case("tp2 sp pp2 ep2, recomputed", 4, TP2 | PP2 | EP2 | RECOMPUTED, recorded=True),
]
REPLAY, RECORD = {"use_rollout_routing_replay": True}, {"use_routing_replay": True}


def samples_with_experts(num_samples=8):
    """Samples whose experts nobody would choose: random ones; -1 for the last token, and for one sample's prompt."""
    generator = np.random.default_rng(7)
    recorded = []
    for number, sample in enumerate(make_samples(num_samples)):
        length = len(sample.tokens)
        experts = np.argsort(generator.random((length, LAYERS, EXPERTS)), axis=-1)[..., :TOPK].astype(np.int8)
        experts[-1] = -1
        if number == 2:
            experts[:3] = -1
        recorded.append(dataclasses.replace(sample, routed_experts=experts))
    return recorded


def started(place, case, folder, port, loss, num_steps=1):
    """A worker of one case with other experts' flags."""
    from slime_like.megatron_backend.worker import TrainWorker

    groups = {
        "parallel": case.parallel,
        "batch": case.batch,
        "loss": loss,
        "rollout": {"rollout_temperature": TEMPERATURE},
    }
    config = make_config(folder, num_ranks=case.ranks, num_steps=num_steps, **groups)
    worker = TrainWorker(config, **(place | {"world_size": case.ranks, "master_port": port}))
    worker.start()
    return worker


def refusal(worker, samples, experts):
    """What is said when the routers of layer 1 should have chosen `experts` for every token of the second sample."""
    from slime_like.errors import DataError

    wrong = samples[1].routed_experts.copy()
    wrong[:-1, 1] = experts
    try:
        recipe_of(worker).train(1, [samples[0], dataclasses.replace(samples[1], routed_experts=wrong), *samples[2:]])
    except DataError as error:
        return str(error)
    return "trained"


def run_cases(place, folder, chosen_by_hf, ports):
    """[result of each case]; None where this rank has no part in it. Each worker has a port of its own."""
    results = []
    for number, case in enumerate(CASES):
        if place["rank"] >= case.ranks:
            results.append(None)
            continue
        own_ports = ports[WORKERS * number :]
        worker, samples = started(place, case, folder, own_ports[0], REPLAY), samples_with_experts()
        result = {
            "log_probs": recipe_of(worker).log_probs(samples),
            "report": recipe_of(worker).train(0, samples).metrics,
        }
        if number == 0:
            result["refused"] = [refusal(worker, samples, experts) for experts in ([0, 0], [0, EXPERTS], [-1, 0])]
        worker.close()
        for port, (name, loss) in zip(
            own_ports[1:], (("recorded", RECORD), ("told", REPLAY), ("free", {})), strict=False
        ):
            if not case.recorded or (name != "recorded" and case.ranks > 1):
                continue
            # One pass before two steps; the second step's weights would choose otherwise.
            worker = started(place, case, folder, port, loss, num_steps=2)
            result[name] = recipe_of(worker).train(0, chosen_by_hf).metrics
            worker.close()
        results.append(result)
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(str(tmp_path_factory.mktemp("models") / "moe"), "qwen3_moe", num_layers=LAYERS)


@pytest.fixture(scope="module")
def outcomes(folder):
    """case -> [result of each of its ranks], all from one world of four processes."""
    by_rank = run_ranks(run_cases, 4, folder, chosen_by_hf(folder), free_ports(WORKERS * len(CASES)), timeout_s=180)
    return [[by_rank[rank][number] for rank in range(case.ranks)] for number, case in enumerate(CASES)]


class ForcedRouter(torch.nn.Module):
    """HF's Qwen3-MoE router, written out: the softmax's values at given experts, divided by their sum.

    Its own choice where they are -1.
    """

    def __init__(self, gate, layer):
        super().__init__()
        self.gate, self.layer, self.experts = gate, layer, None

    def forward(self, hidden):
        logits = torch.nn.functional.linear(hidden.reshape(-1, hidden.shape[-1]), self.gate.weight)
        probs = logits.float().softmax(-1)
        own = probs.topk(TOPK, -1).indices
        forced = torch.as_tensor(self.experts[:, self.layer].astype(np.int64))
        chosen = torch.where(forced < 0, own, forced)
        weights = probs.gather(-1, chosen)
        return logits, weights / weights.sum(-1, keepdim=True), chosen


def truth(folder, samples, *, forced):
    """(log-probs [T] of each sample, loss, gradient norm) of HF with the policy gradient at ratio 1."""
    model = load_model(folder)
    for layer, block in enumerate(model.model.layers):
        block.mlp.gate = ForcedRouter(block.mlp.gate, layer)
    rows, loss = [], torch.zeros(())
    for sample in samples:
        for block in model.model.layers:
            block.mlp.gate.experts = sample.routed_experts if forced else np.full_like(sample.routed_experts, -1)
        ids = torch.as_tensor(sample.tokens.astype(np.int64))
        log_softmax = torch.log_softmax(model(ids[None]).logits[0, :-1].float() / TEMPERATURE, -1)
        log_probs = log_softmax.gather(-1, ids[1:, None]).squeeze(-1)
        mask = torch.as_tensor(sample.loss_mask[1:].astype(bool))
        loss = loss - ((log_probs - log_probs.detach()).exp() * advantage_of(sample))[mask].mean() / len(samples)
        rows.append(np.concatenate([[0.0], log_probs.detach().numpy()]))
    loss.backward()
    norm = torch.sqrt(sum((p.grad.double() ** 2).sum() for p in model.parameters() if p.grad is not None)).item()
    return rows, loss.item(), norm


def chosen_by_hf(folder):
    """Samples with the experts that HF's routers choose for every token, the last too."""
    samples = samples_with_experts()
    with torch.no_grad():
        logits = [
            load_model(folder)(
                torch.as_tensor(s.tokens.astype(np.int64))[None], output_router_logits=True
            ).router_logits
            for s in samples
        ]
    experts = [np.stack([layer.topk(TOPK, -1).indices.numpy() for layer in layers], axis=1) for layers in logits]
    return [dataclasses.replace(s, routed_experts=e.astype(np.int8)) for s, e in zip(samples, experts, strict=True)]


@pytest.fixture(scope="module")
def forced(folder):
    return truth(folder, samples_with_experts(), forced=True)


@pytest.fixture(scope="module")
def free(folder):
    return truth(folder, samples_with_experts(), forced=False)


each_case = pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: CASES[number].name)


def test_the_experts_matter(forced, free):
    """What the comparisons below would miss if nothing were replayed."""
    assert max(np.abs(a - b).max() for a, b in zip(forced[0], free[0], strict=True)) > 0.1
    assert abs(forced[2] / free[2] - 1) > 1e-3


def test_what_no_router_chooses_is_refused_by_sample_and_layer(outcomes):
    """Layers of zeros, which a capture that failed leaves; an expert that the model does not have.

    A row that is said in part.
    """
    for message, experts in zip(outcomes[0][0]["refused"], ("[0, 0]", f"[0, {EXPERTS}]", "[-1, 0]"), strict=True):
        assert (
            message.startswith("prompt 0, sample 1: ")
            and f"layer 1, token 0 has the experts {experts}, not 2 different ones of 0 to 3" in message
        )


@each_case
def test_log_probs_equal_hf_with_these_experts(outcomes, forced, number):
    for result in outcomes[number]:
        for ours, theirs in zip(result["log_probs"], forced[0], strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=0)


@each_case
def test_loss_and_gradient_norm_equal_hf_with_these_experts(outcomes, forced, number):
    for result in outcomes[number]:
        assert result["report"]["train/loss"] == pytest.approx(forced[1], rel=1e-5)
        assert result["report"]["train/grad_norm"] == pytest.approx(forced[2], rel=1e-5)


@pytest.mark.parametrize(
    "number", [n for n, case in enumerate(CASES) if case.recorded], ids=lambda number: CASES[number].name
)
def test_recorded_experts_are_those_of_the_weights_before_the_first_step(outcomes, number):
    """Two steps replay one pass: the same as being told what HF chooses with the first weights."""
    replayed, free = outcomes[0][0]["told"], outcomes[0][0]["free"]
    moved = {name for name in replayed if abs(replayed[name] - free[name]) > 1e-2 * abs(replayed[name])}
    assert {"train/ppo_kl", "train/grad_norm"} <= moved, (replayed, free)
    for result in outcomes[number]:
        for name in moved:
            assert result["recorded"][name] == pytest.approx(replayed[name], rel=1e-3, abs=1e-5), name
