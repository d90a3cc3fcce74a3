"""GLM-4, GLM-4.5 and DeepSeek-V3 over layouts: the trainer agrees with HF transformers, and every weight comes out as
it went in.
"""

import dataclasses
import os

import numpy as np
import pytest
from safetensors.numpy import load_file

from slime_like.config.sync import SyncConfig
from slime_like.records import BASE, REFERENCE
from tests.helpers.hf_truth import first_step_truth
from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.train_world import disk_order, free_ports, make_config, make_samples, recipe_of, run_ranks

pytestmark = pytest.mark.multiprocess

TEMPERATURE, KL_COEF, ENTROPY_COEF = 0.7, 0.1, 0.01
LOSS = {"use_kl_loss": True, "kl_loss_type": "k2", "kl_loss_coef": KL_COEF, "entropy_coef": ENTROPY_COEF}
DYNAMIC = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 40, "balance_data": True}
BIAS_RATE = 0.01
LAYOUTS = {
    "one rank": {},
    "tp2 sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
    "cp2": {"context_parallel_size": 2},
    "ep2": {"expert_model_parallel_size": 2},
    "tp2 sp ep2 etp1": {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
    },
    "dp2": {},
}
#: Model -> layouts.
FAMILIES = {
    "glm4": ("tp2 sp", "pp2", "cp2"),
    "glm4_moe": ("one rank", "tp2 sp", "ep2"),
    "glm4_moe without norms and biases": ("dp2",),
    "deepseek_v3": ("one rank", "tp2 sp ep2 etp1", "pp2", "cp2"),
    "moonlight": ("tp2 sp",),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One layout of one model."""

    model: str
    layout: str

    @property
    def ranks(self) -> int:
        return 1 if self.layout == "one rank" else 2


CASES = [Case(model, layout) for model, layouts in FAMILIES.items() for layout in layouts]


def run_cases(place, folders, root, ports):
    """[result of each case]; None where this rank has no part in it."""
    from slime_like.megatron_backend.model.stage_weights import named_weights
    from slime_like.megatron_backend.worker import TrainWorker

    results = []
    for number, (case, port) in enumerate(zip(CASES, ports, strict=True)):
        if place["rank"] >= case.ranks:
            results.append(None)
            continue
        groups = {
            "parallel": LAYOUTS[case.layout],
            "batch": DYNAMIC,
            "loss": LOSS,
            "rollout": {"rollout_temperature": TEMPERATURE},
        }
        groups["checkpoint"] = {"ref_load": folders["reference of " + case.model], "load": folders[case.model]}
        config = make_config(folders[case.model], num_ranks=case.ranks, **groups)
        if config.model.num_experts:
            config = dataclasses.replace(
                config, model=dataclasses.replace(config.model, moe_router_bias_update_rate=BIAS_RATE)
            )
        directory = os.path.join(root, str(number))
        config = dataclasses.replace(
            config, sync=SyncConfig(update_weight_transport="disk", update_weight_disk_dir=directory)
        )
        worker = TrainWorker(config, **(place | {"world_size": case.ranks, "master_port": port}))
        started = worker.start()
        samples = make_samples()
        result = {
            "log_probs": recipe_of(worker).log_probs(samples),
            "reference": recipe_of(worker).log_probs(samples, weights=REFERENCE),
        }
        result["num_parameters"] = started["num_parameters"]
        result["exported"] = {name: tensor.numpy().copy() for name, tensor in worker.export(BASE)}
        result["report"] = recipe_of(worker).train(0, samples)
        result["after"] = recipe_of(worker).log_probs(samples)
        result["trained"] = {name: tensor.numpy().copy() for name, tensor in worker.export(BASE)}
        worker.publish(disk_order(directory, 1))
        assert any(name.endswith("expert_bias") for name, _ in named_weights(worker.stage)) == bool(
            config.model.num_experts
        )
        worker.close()
        results.append(result)
    return results


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    paths = {}
    for prefix, seed in (("", 0), ("reference of ", 1)):
        for model in FAMILIES:
            family, _, bare = model.partition(" without")
            more = {"use_qk_norm": False, "attention_bias": False} if bare else {}
            paths[prefix + model] = make_tiny_model(str(root / f"{model}-{seed}"), family, seed=seed, **more)
    return paths


@pytest.fixture(scope="module")
def truths(folders):
    options = {"temperature": TEMPERATURE, "kl_coef": KL_COEF, "entropy_coef": ENTROPY_COEF}
    return {
        model: first_step_truth(folders[model], make_samples(), reference=folders["reference of " + model], **options)
        for model in FAMILIES
    }


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return str(tmp_path_factory.mktemp("published"))


@pytest.fixture(scope="module")
def outcomes(folders, root):
    """case -> [result of each of its ranks], all from one world of two processes."""
    by_rank = run_ranks(run_cases, 2, folders, root, free_ports(len(CASES)), timeout_s=240)
    return [[by_rank[rank][number] for rank in range(case.ranks)] for number, case in enumerate(CASES)]


each_case = pytest.mark.parametrize(
    "number", range(len(CASES)), ids=lambda number: f"{CASES[number].model}, {CASES[number].layout}"
)


def stored(folder):
    """Every tensor in the files of an HF folder."""
    files = (entry.path for entry in os.scandir(folder) if entry.name.endswith(".safetensors"))
    return {name: tensor for path in files for name, tensor in load_file(path).items()}


@each_case
def test_log_probs_equal_hf(outcomes, truths, number):
    truth = truths[CASES[number].model]
    for result in outcomes[number]:
        for ours, theirs in zip(
            result["log_probs"] + result["reference"], truth.log_probs + truth.reference_log_probs, strict=True
        ):
            np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=0)


@each_case
def test_loss_and_gradient_norm_equal_hf(outcomes, truths, number):
    truth = truths[CASES[number].model]
    for result in outcomes[number]:
        metrics = result["report"].metrics
        assert metrics["train/loss"] == pytest.approx(truth.loss, rel=1e-5)
        assert metrics["train/grad_norm"] == pytest.approx(truth.grad_norm, rel=1e-5)
        assert metrics["train/kl_loss"] == pytest.approx(truth.kl, rel=1e-5)


@each_case
def test_every_weight_comes_out_as_it_went_in(outcomes, folders, number):
    expected, gathered = stored(folders[CASES[number].model]), {}
    for result in outcomes[number]:
        gathered.update(result["exported"])
    assert set(gathered) == set(expected)
    for name, tensor in expected.items():
        np.testing.assert_array_equal(gathered[name], tensor, err_msg=name)
    biases = sum(tensor.size for name, tensor in expected.items() if name.endswith("e_score_correction_bias"))
    assert outcomes[number][0]["num_parameters"] == sum(tensor.size for tensor in expected.values()) - biases


@each_case
def test_what_was_trained_is_published_with_the_routers_biases(outcomes, root, number):
    trained: dict = {}
    for result in outcomes[number]:
        trained.update(result["trained"])
    published = stored(os.path.join(root, str(number), "version-00000001"))
    assert set(published) == set(trained)
    for name, tensor in trained.items():
        np.testing.assert_array_equal(published[name], tensor, err_msg=name)


@each_case
def test_a_step_moves_each_bias_by_its_rate_towards_the_mean_load(outcomes, number):
    """Up for experts with fewer tokens than the mean, down for those with more (arXiv:2408.15664, algorithm 1)."""
    moved = {}
    for result in outcomes[number]:
        for name, tensor in result["trained"].items():
            if name.endswith("e_score_correction_bias"):
                moved[name] = tensor - result["exported"][name]
    assert len(moved) == (0 if CASES[number].model == "glm4" else 3)
    for name, steps in moved.items():
        np.testing.assert_allclose(np.abs(steps[steps != 0]), BIAS_RATE, rtol=1e-4, err_msg=name)
        assert (steps > 0).any() and (steps < 0).any()


def test_a_step_moves_every_layout_to_the_same_weights(outcomes):
    """Adam divides by its second moment, which blows rounding up.

    A bias step from padding tokens would move whole sequences.
    """
    for model in FAMILIES:
        numbers = [n for n, case in enumerate(CASES) if case.model == model]
        first = outcomes[numbers[0]][0]
        moved = max(np.abs(a - b).max() for a, b in zip(first["after"], first["log_probs"], strict=True))
        assert moved > 0.1
        for number in numbers[1:]:
            for ours, theirs in zip(outcomes[number][0]["after"], first["after"], strict=True):
                np.testing.assert_allclose(ours, theirs, atol=2e-2 * moved, rtol=0, err_msg=str(CASES[number]))
