"""A client that trains the whole model, beside one with adapters, against HF and torch's AdamW in float64; and two such
clients, each as if it were alone.
"""

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from slime_like.config.lora import LoraConfig
from slime_like.megatron_backend.step.optimizer import AdamParams
from slime_like.records import BASE
from tests.helpers.hf_truth import load_model
from tests.helpers.peft_truth import cross_entropy, log_probs_of
from tests.helpers.tenants import loss_rows, one_pass, trainer_of_tenants
from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.train_world import free_ports, make_samples, run_ranks

pytestmark = pytest.mark.multiprocess

#: name -> (ranks, --… of the parallel group)
LAYOUTS = {
    "one rank": (1, {}),
    "tp2 with sequence parallelism": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "dp2": (2, {}),
    "experts, ep2": (2, {"expert_model_parallel_size": 2}),
}
MARKED = [name if name == "one rank" else pytest.param(name, marks=pytest.mark.long_run) for name in LAYOUTS]
LOG_PROB_BOUND = 1e-5

#: Steps that are a smooth function of the gradient, so that two ways to round it stay together.
SMOOTH = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1.0, "weight_decay": 0.1}


def whole_model(place, base, layout, port, saves):
    """A client that trains everything, beside one with adapters."""
    ranks, parallel = LAYOUTS[layout]
    worker = trainer_of_tenants(place, base, parallel, num_ranks=ranks, port=port)
    rows = loss_rows(make_samples(8))
    worker.add_tenant("all", None, 0)
    worker.add_tenant("ada", LoraConfig(lora_rank=4, lora_target_modules=["q_proj", "o_proj"]), 1)
    result = {"norms": [], "base": [], "ada": []}
    for _ in range(2):
        whole, adapters = worker.run_passes([one_pass("all", rows), one_pass("ada", rows, forward_only=True)])
        result["ada"].append(adapters.log_probs)
        result["norms"].append(worker.tenant_step("all", AdamParams(**SMOOTH), 0.0)["train/grad_norm"])
    result["after"] = worker.run_passes([one_pass("all", rows, forward_only=True)])[0].log_probs
    worker.save_tenant("all", f"{saves}/{layout}", True)
    worker.export_tenant("all", f"{saves}/engine's {layout}")

    def third():
        worker.run_passes([one_pass("all", rows)])
        worker.tenant_step("all", AdamParams(**SMOOTH), 0.0)
        return worker.run_passes([one_pass("all", rows, forward_only=True)])[0].log_probs

    result["third"] = third()
    result["base"] = {name: tensor.float().numpy().copy() for name, tensor in worker.export(BASE)}
    worker.drop_tenant("all")
    worker.add_tenant("all", None, 0)
    worker.load_tenant("all", f"{saves}/{layout}", True)
    result["resumed"] = third()
    worker.drop_tenant("all")
    result["alone"], result["in turns"] = two_in_turns(worker)
    result["ada"].append(worker.run_passes([one_pass("ada", rows, forward_only=True)])[0].log_probs)
    worker.close()
    return result


def two_in_turns(worker):
    """Losses and steps of two whole models, and log-probs after them: each alone, and both call by call."""
    rows = {name: loss_rows(make_samples(4, seed=seed)) for seed, name in enumerate(("one", "two"))}

    def trained(names):
        """Two passes a step, so that gradients wait while the other is in place."""
        for name in names:
            worker.add_tenant(name, None, 0)
        numbers = {name: [] for name in names}
        for _ in range(3):
            for part in (rows_of[:2] for rows_of in rows.values()), (rows_of[2:] for rows_of in rows.values()):
                for name, some in zip(rows, part, strict=True):
                    if name in names:
                        numbers[name].append(worker.run_passes([one_pass(name, some)])[0].metrics["loss"])
            for name in names:
                numbers[name].append(worker.tenant_step(name, AdamParams(**SMOOTH), 1.0)["train/grad_norm"])
        ends = {name: worker.run_passes([one_pass(name, rows[name], forward_only=True)])[0] for name in names}
        for name in names:
            worker.drop_tenant(name)
        return {name: (numbers[name], ends[name].log_probs) for name in names}

    return trained(["one"]) | trained(["two"]), trained(["one", "two"])


def whole_model_truth(base):
    """Gradient norms of two steps and log-probs afterwards, by HF's model and torch's AdamW in float64."""
    model, samples = oracle(base), make_samples(8)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [{"params": [p for p in model.parameters() if p.dim() == 1], **SMOOTH, "weight_decay": 0.0}]
    adam, norms = torch.optim.AdamW([{"params": matrices, **SMOOTH}, *others]), []
    for _ in range(2):
        adam.zero_grad()
        cross_entropy(log_probs_of(model, samples), samples).backward()
        norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])))
        adam.step()
    with torch.no_grad():
        return norms, [row.numpy() for row in log_probs_of(model, samples)]


def oracle(folder):
    """HF's model in float64; experts' kernel has float32 only."""
    model = load_model(folder)
    return model if "qwen3_moe" in model.config.model_type else model.double()


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Embedding and output layer are one matrix, on two stages of a pipeline."""
    root = tmp_path_factory.mktemp("models")
    return {
        family: make_tiny_model(str(root / family), family, num_layers=2, tied=True)
        for family in ("qwen3", "qwen3_moe")
    }


@pytest.mark.parametrize("layout", MARKED)
def test_a_client_may_train_the_whole_model(bases, tmp_path, layout):
    base = bases["qwen3_moe" if "experts" in layout else "qwen3"]
    norms, after = whole_model_truth(base)
    weights = load_file(f"{base}/model.safetensors")
    for of_rank in run_ranks(
        whole_model, LAYOUTS[layout][0], base, layout, free_ports(1)[0], str(tmp_path), timeout_s=120
    ):
        assert of_rank["norms"] == pytest.approx(norms, rel=1e-5)
        for mine, expected, third, resumed in zip(
            of_rank["after"], after, of_rank["third"], of_rank["resumed"], strict=True
        ):
            np.testing.assert_allclose(mine, expected, atol=LOG_PROB_BOUND, rtol=0)
            np.testing.assert_array_equal(resumed, third)
        for first, *later in zip(*of_rank["ada"], strict=True):  # the others' base is the start weights
            for log_probs in later:
                np.testing.assert_array_equal(log_probs, first)
        for name, tensor in of_rank["base"].items():
            np.testing.assert_array_equal(tensor, weights[name], err_msg=name)
        for name, (numbers, log_probs) in of_rank["alone"].items():
            assert of_rank["in turns"][name][0] == numbers
            for mine, expected in zip(of_rank["in turns"][name][1], log_probs, strict=True):
                np.testing.assert_array_equal(mine, expected)
    for folder in (layout, f"engine's {layout}"):
        with torch.no_grad():
            theirs = log_probs_of(oracle(str(tmp_path / folder)), make_samples(8))
        for mine, expected in zip(of_rank["after"], theirs, strict=True):
            np.testing.assert_allclose(mine, expected.numpy(), atol=LOG_PROB_BOUND, rtol=0)
