"""Tenants' adapters on one trainer against PEFT on the HF model in float64, under each layout; apart from each other,
to the bit; and on disk.
"""

# Covers slime_like.megatron_backend.lora.tenants, tenant_files, tenant_gradients, tenant_runner and segments too.

import numpy as np
import pytest
import torch

from slime_like.config.lora import LoraConfig
from slime_like.megatron_backend.step.optimizer import AdamParams
from tests.helpers.peft_truth import STEPS, load_peft, log_probs_of, make_peft_folder, peft_truth
from tests.helpers.tenants import loss_rows, one_pass, trainer_of_tenants, whole_numbers
from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.train_world import free_ports, make_samples, run_ranks

pytestmark = pytest.mark.multiprocess

SEQUENCE = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
#: name -> (ranks, --… of the parallel group)
LAYOUTS = {
    "one rank": (1, {}),
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "tp2 with sequence parallelism": (2, SEQUENCE),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "dp2": (2, {}),
    "cp2": (2, {"context_parallel_size": 2}),
    "recomputed": (1, RECOMPUTED),
}
QUICK = ("one rank", "tp2 with sequence parallelism", "dp2")
MARKED = [name if name in QUICK else pytest.param(name, marks=pytest.mark.long_run) for name in LAYOUTS]
#: tenant -> PEFT's options
TENANTS = {
    "ada": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"},
    "bob": {"r": 3, "lora_alpha": 7, "use_rslora": True, "target_modules": ["q_proj", "v_proj", "up_proj", "o_proj"]},
}
GRADIENT_BOUND, LOG_PROB_BOUND = 2e-5, 1e-5


def lora_of(name):
    options = TENANTS[name]
    targets = options["target_modules"]
    return LoraConfig(
        lora_rank=options["r"],
        lora_alpha=float(options["lora_alpha"]),
        lora_use_rslora=options.get("use_rslora", False),
        lora_target_modules=[targets] if isinstance(targets, str) else targets,
    )


def samples_of(name):
    return make_samples(8, seed=list(TENANTS).index(name))


def one_layout(worker, folders, saves):
    """What this rank says of each tenant: both train in turns."""
    result = {name: {} for name in TENANTS}
    rows = {name: loss_rows(samples_of(name)) for name in TENANTS}
    for name in TENANTS:
        worker.add_tenant(name, lora_of(name), 1)
        worker.load_tenant(name, folders["adapters of " + name], False)
    answers = worker.run_passes([one_pass(name, rows[name], forward_only=True) for name in TENANTS])
    for name, answer in zip(TENANTS, answers, strict=True):
        result[name]["log_probs"], result[name]["loss"] = answer.log_probs, answer.metrics["loss"]
    for number, params in enumerate(STEPS):
        # in two calls, the second of both tenants
        worker.run_passes([one_pass(name, rows[name][:3]) for name in TENANTS])
        answers = worker.run_passes([one_pass(name, rows[name][3:]) for name in TENANTS])
        for name in TENANTS:
            if not number:
                result[name]["gradients"] = whole_numbers(worker, name, "gradient")
            report = worker.tenant_step(name, AdamParams(**params), 0.0)
            if not number:
                result[name]["grad_norm"] = report["train/grad_norm"]
    for name in TENANTS:
        result[name]["stepped"] = whole_numbers(worker, name)
        (answer,) = worker.run_passes([one_pass(name, rows[name], forward_only=True)])
        result[name]["after"] = answer.log_probs
        worker.save_tenant(name, f"{saves}/{name}", True)
        worker.export_tenant(name, f"{saves}/engine's {name}")
    return result


def in_world(place, layouts, base, folders, ports, saves):
    results = {}
    for layout, port in zip(layouts, ports, strict=True):
        ranks, parallel = LAYOUTS[layout]
        if place["rank"] >= ranks:
            continue
        worker = trainer_of_tenants(place, base, parallel, num_ranks=ranks, port=port)
        try:
            results[layout] = one_layout(worker, folders, f"{saves}/{layout}")
        except Exception as error:
            raise RuntimeError(f"{layout}: {error}") from error
        worker.close()
    return results


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_tiny_model(str(tmp_path_factory.mktemp("model") / "qwen3"), "qwen3", num_layers=2)


@pytest.fixture(scope="module")
def folders(tmp_path_factory, base):
    root = tmp_path_factory.mktemp("adapters")
    return {"adapters of " + name: make_peft_folder(base, str(root / name), **TENANTS[name]) for name in TENANTS}


@pytest.fixture(scope="module")
def saves(tmp_path_factory):
    return str(tmp_path_factory.mktemp("saves"))


@pytest.fixture(scope="module")
def outcomes(request, base, folders, saves):
    items = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    wanted = [name for name in LAYOUTS if any(item is not None and item.params.get("layout") == name for item in items)]
    return run_ranks(in_world, 2, wanted, base, folders, free_ports(len(wanted)), saves, timeout_s=200)


@pytest.fixture(scope="module")
def truths(base, folders):
    return {name: peft_truth(base, folders["adapters of " + name], samples_of(name)) for name in TENANTS}


def largest(arrays):
    return max(float(np.abs(array).max()) for array in arrays)


def ranks_of(outcomes, layout):
    return [of_rank[layout] for of_rank in outcomes[: LAYOUTS[layout][0]]]


each_layout = pytest.mark.parametrize("layout", MARKED)


@each_layout
def test_log_probs_and_losses_are_pefts(outcomes, truths, layout):
    for of_rank in ranks_of(outcomes, layout):
        for name, truth in truths.items():
            weights = [row.inputs["weights"] for row in loss_rows(samples_of(name))]
            for mine, expected in zip(of_rank[name]["log_probs"], truth.log_probs, strict=True):
                np.testing.assert_allclose(mine, expected, atol=LOG_PROB_BOUND, rtol=0)
            loss = -sum(float((w * row).sum()) for w, row in zip(weights, truth.log_probs, strict=True))
            assert of_rank[name]["loss"] == pytest.approx(loss, rel=1e-5)


@each_layout
def test_every_gradient_is_pefts(outcomes, truths, layout):
    for name, truth in truths.items():
        most, seen = largest(truth.gradients.values()), set()
        norm = np.sqrt(sum((gradient**2).sum() for gradient in truth.gradients.values()))
        for of_rank in ranks_of(outcomes, layout):
            for key, gradient in of_rank[name]["gradients"].items():
                np.testing.assert_allclose(gradient, truth.gradients[key], atol=GRADIENT_BOUND * most, rtol=0)
            seen |= set(of_rank[name]["gradients"])
            assert of_rank[name]["grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert seen == set(truth.gradients)


@each_layout
def test_two_steps_lead_where_torchs_adamw_leads(outcomes, truths, layout):
    for name, truth in truths.items():
        for of_rank in ranks_of(outcomes, layout):
            for key, matrix in of_rank[name]["stepped"].items():
                clear = np.abs(truth.gradients[key]) > 1e-3 * np.abs(truth.gradients[key]).max()
                assert clear.mean() > 0.9
                np.testing.assert_allclose(matrix[clear], truth.stepped[key][clear], atol=1e-4, rtol=0, err_msg=key)


@each_layout
def test_peft_loads_what_was_saved_and_what_engines_get(outcomes, base, saves, layout):
    for name in TENANTS:
        for folder in (f"{saves}/{layout}/{name}", f"{saves}/{layout}/engine's {name}"):
            with torch.no_grad():
                theirs = log_probs_of(load_peft(base, folder), samples_of(name))
            for mine, expected in zip(outcomes[0][layout][name]["after"], theirs, strict=True):
                np.testing.assert_allclose(mine, expected.numpy(), atol=LOG_PROB_BOUND, rtol=0)
