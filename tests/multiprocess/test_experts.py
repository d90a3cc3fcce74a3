"""Mixture of experts (Qwen3-MoE) over many layouts: the trainer agrees with HF transformers, every expert comes out,
checkpoints fit other layouts.
"""
# Covers slime_like.megatron_backend.compat.experts too, which it does not import itself.

import dataclasses
import os
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from slime_like.config.sync import SyncConfig
from slime_like.records import BASE, REFERENCE
from tests.helpers.hf_truth import first_step_truth
from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.train_world import (
    advantage_of,
    disk_order,
    free_ports,
    make_config,
    make_samples,
    recipe_of,
    run_ranks,
)

pytestmark = pytest.mark.multiprocess

TEMPERATURE, KL_COEF, ENTROPY_COEF = 0.7, 0.1, 0.01
LOSS = {"use_kl_loss": True, "kl_loss_type": "k2", "kl_loss_coef": KL_COEF, "entropy_coef": ENTROPY_COEF}
DYNAMIC = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 40, "balance_data": True}
EXPERTS, PIPELINE = {"expert_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
TENSOR = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
BALANCING_COEF = 0.3


@dataclasses.dataclass(frozen=True)
class Case:
    """One layout of one model."""

    name: str
    ranks: int = 1
    parallel: dict = dataclasses.field(default_factory=dict)
    batch: dict = dataclasses.field(default_factory=lambda: DYNAMIC)
    model: str = "qwen3_moe"
    balanced: bool = False


CASES = [
    Case("one rank"),
    Case("one rank, weights not divided by their sum", model="not normalized"),
    Case("one rank, balancing loss", batch={"micro_batch_size": 8}, balanced=True),
    Case(
        "tp2 sp, padding, balancing loss",
        2,
        TENSOR,
        batch={"micro_batch_size": 8, "data_pad_size_multiplier": 16},
        balanced=True,
    ),
    Case(
        "cp2 ep2, balancing loss",
        2,
        EXPERTS | {"context_parallel_size": 2},
        batch={"micro_batch_size": 8},
        balanced=True,
    ),
    Case("padded rows, balancing loss", 1, {}, batch={"micro_batch_size": 8, "qkv_format": "bshd"}, balanced=True),
    Case("interleaved pp2 ep2", 4, EXPERTS | PIPELINE | {"num_virtual_stages_per_pipeline_rank": 2}),
    Case("ep2", 2, EXPERTS),
    Case("tp2 sp ep2 etp1", 2, TENSOR | EXPERTS | {"expert_tensor_parallel_size": 1}),
    Case("cp2 ep2 edp1", 2, EXPERTS | {"context_parallel_size": 2}),
    Case("ep2 pp2", 4, EXPERTS | PIPELINE),
    Case("tp2 sp ep2 etp2", 4, TENSOR | EXPERTS),
    Case("ep2, weights not divided by their sum", 2, EXPERTS, model="not normalized"),
]


def worker_for(place, folder, ranks, port, *, sync=None, **groups):
    from slime_like.megatron_backend.worker import TrainWorker

    config = make_config(folder, num_ranks=ranks, **groups)
    if groups.get("balanced"):
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, moe_aux_loss_coeff=BALANCING_COEF))
    if sync:
        config = dataclasses.replace(config, sync=sync)
    return TrainWorker(config, **(place | {"world_size": ranks, "master_port": port}))


def run_cases(place, folders, root, ports):
    """[result of each case]; None where this rank has no part in it."""
    results = []
    for number, (case, port) in enumerate(zip(CASES, ports, strict=True)):
        if place["rank"] >= case.ranks:
            results.append(None)
            continue
        worker = worker_for(
            place,
            folders[case.model],
            case.ranks,
            port,
            parallel=case.parallel,
            batch=case.batch,
            loss=LOSS,
            rollout={"rollout_temperature": TEMPERATURE},
            checkpoint={"ref_load": folders["reference of " + case.model], "load": folders[case.model]},
            sync=SyncConfig(
                update_weight_transport="disk",
                update_weight_disk_dir=os.path.join(root, str(number)),
                update_weight_buffer_size=10_000,
            ),
            balanced=case.balanced,
        )
        worker.start()
        samples = make_samples()
        result = {
            "log_probs": recipe_of(worker).log_probs(samples),
            "reference": recipe_of(worker).log_probs(samples, weights=REFERENCE),
        }
        result["exported"] = {name: tensor.numpy().copy() for name, tensor in worker.export(BASE)}
        result["receipt"] = worker.publish(disk_order(os.path.join(root, str(number)), 1))
        recipe_of(worker).save_hf(os.path.join(root, f"hf-{number}"))
        result["report"] = recipe_of(worker).train(0, samples)
        result["after"] = recipe_of(worker).log_probs(samples)
        # the other ranks have no token of their own, and experts for this one's
        result["lone"] = recipe_of(worker).train(1, samples[:1])
        worker.close()
        results.append(result)
    return results


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    paths = {}
    for prefix, seed in (("", 0), ("reference of ", 1)):
        paths[prefix + "qwen3_moe"] = make_tiny_model(str(root / f"plain-{seed}"), "qwen3_moe", seed=seed)
        paths[prefix + "not normalized"] = make_tiny_model(
            str(root / f"other-{seed}"), "qwen3_moe", seed=seed, norm_topk_prob=False
        )
    return paths


@pytest.fixture(scope="module")
def truths(folders):
    return {
        (model, balanced): truth_of(folders[model], folders["reference of " + model], balanced)
        for model, balanced in {(c.model, c.balanced) for c in CASES}
    }


def truth_of(folder, reference, balanced=False):
    options = {
        "temperature": TEMPERATURE,
        "kl_coef": KL_COEF,
        "entropy_coef": ENTROPY_COEF,
        "balancing_coef": BALANCING_COEF if balanced else 0.0,
    }
    return first_step_truth(folder, make_samples(), reference=reference, **options)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return str(tmp_path_factory.mktemp("written"))


@pytest.fixture(scope="module")
def outcomes(folders, root):
    """case -> [result of each of its ranks], all from one world of four processes."""
    by_rank = run_ranks(run_cases, 4, folders, root, free_ports(len(CASES)), timeout_s=240)
    return [[by_rank[rank][number] for rank in range(case.ranks)] for number, case in enumerate(CASES)]


each_case = pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: CASES[number].name)


@each_case
def test_log_probs_equal_hf(outcomes, truths, number):
    truth = truths[CASES[number].model, CASES[number].balanced]
    for result in outcomes[number]:
        for ours, theirs in zip(
            result["log_probs"] + result["reference"], truth.log_probs + truth.reference_log_probs, strict=True
        ):
            np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=0)


@each_case
def test_loss_and_gradient_norm_equal_hf(outcomes, truths, number):
    truth = truths[CASES[number].model, CASES[number].balanced]
    for result in outcomes[number]:
        metrics = result["report"].metrics
        assert metrics["train/loss"] == pytest.approx(truth.loss, rel=1e-5)
        assert metrics["train/grad_norm"] == pytest.approx(truth.grad_norm, rel=1e-5)
        assert metrics["train/kl_loss"] == pytest.approx(truth.kl, rel=1e-5)
        if CASES[number].balanced:
            assert metrics["train/moe_aux_loss"] == pytest.approx(truth.balancing / 4, rel=1e-5)  # 4 layers
        assert ("train/moe_aux_loss" in metrics) == CASES[number].balanced
        assert result["report"] == outcomes[number][0]["report"]


def test_the_balancing_loss_is_in_the_gradients(truths):
    """What the case above would miss if the flag did nothing."""
    assert abs(truths["qwen3_moe", True].grad_norm / truths["qwen3_moe", False].grad_norm - 1) > 1e-3


@each_case
def test_a_rank_without_samples_takes_part(outcomes, number):
    metrics = outcomes[number][0]["lone"].metrics
    assert metrics["train/pg_loss"] == pytest.approx(-advantage_of(make_samples()[0]), rel=1e-5)
    assert metrics["train/grad_norm"] > 0


def stored(folder):
    """Every tensor in the files of an HF folder."""
    files = (entry.path for entry in os.scandir(folder) if entry.name.endswith(".safetensors"))
    return {name: tensor for path in files for name, tensor in load_file(path).items()}


@each_case
def test_every_expert_comes_out_as_it_went_in(outcomes, folders, root, number):
    """From the weights of all ranks that gather, the published version, and the saved HF folder."""
    expected = stored(folders[CASES[number].model])
    assert "model.layers.3.mlp.experts.3.down_proj.weight" in expected
    gathered: dict = {}
    for result in outcomes[number]:
        gathered.update(result["exported"])
    published = stored(os.path.join(root, str(number), "version-00000001"))
    for tensors in (gathered, published, stored(os.path.join(root, f"hf-{number}"))):
        assert set(tensors) == set(expected)
        for name, tensor in expected.items():
            np.testing.assert_array_equal(tensors[name], tensor, err_msg=name)
    assert outcomes[number][0]["receipt"].num_tensors == len(expected)


def test_one_rank_alone_brings_all_experts_of_its_stage(outcomes):
    """Rank 0 is the only source: what it does not yield reaches no engine."""
    for case, results in zip(CASES, outcomes, strict=True):
        names = {name for name in results[0]["exported"] if ".experts." in name}
        layers = 4 // case.parallel.get("pipeline_model_parallel_size", 1)
        assert len(names) == layers * 4 * 3


def test_a_step_moves_every_layout_to_the_same_weights(outcomes):
    """Adam divides by its second moment, which blows rounding up."""
    numbers = [n for n, case in enumerate(CASES) if case.model == "qwen3_moe" and not case.balanced]
    first = outcomes[numbers[0]][0]
    moved = max(np.abs(a - b).max() for a, b in zip(first["after"], first["log_probs"], strict=True))
    assert moved > 0.1
    for number in numbers[1:]:
        for ours, theirs in zip(outcomes[number][0]["after"], first["after"], strict=True):
            np.testing.assert_allclose(ours, theirs, atol=2e-2 * moved, rtol=0, err_msg=CASES[number].name)


@pytest.mark.parametrize("fault", ["swapped", "dropped"])
def test_a_swapped_or_dropped_expert_would_be_seen(folders, truths, tmp_path, fault):
    """The comparisons above allow 1e-5; these faults of one expert in one layer are far outside."""
    folder = str(tmp_path / "faulty")
    shutil.copytree(folders["qwen3_moe"], folder)
    tensors = load_file(os.path.join(folder, "model.safetensors"))
    for part in ("gate_proj", "up_proj", "down_proj"):
        one, other = (f"model.layers.1.mlp.experts.{expert}.{part}.weight" for expert in (1, 2))
        if fault == "swapped":
            tensors[one], tensors[other] = tensors[other], tensors[one]
        else:
            tensors[one] = np.zeros_like(tensors[one])
    save_file(tensors, os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})
    faulty, truth = truth_of(folder, folders["reference of qwen3_moe"]), truths["qwen3_moe", False]
    assert max(np.abs(a - b).max() for a, b in zip(faulty.log_probs, truth.log_probs, strict=True)) > 1e-2
    assert abs(faulty.grad_norm / truth.grad_norm - 1) > 1e-4


ROLLOUTS = [make_samples(8, seed=seed) for seed in range(3)]
LAYOUTS = {
    "experts": (2, EXPERTS),
    "one rank": (1, {}),
    "tensor": (2, TENSOR | EXPERTS | {"expert_tensor_parallel_size": 1}),
    "pipeline": (2, PIPELINE),
}


def save_and_resume(place, folder, root, ports):
    """metrics of two rollouts after a save, straight on and resumed under each layout: {(saved under, resumed under):
    metrics}.
    """
    metrics: dict = {}
    ports = list(ports)
    for saved_under in ("experts", "one rank"):
        saves = os.path.join(root, "saves " + saved_under)
        for resumed_under in (None, *LAYOUTS):
            ranks, parallel = LAYOUTS[resumed_under or saved_under]
            port = ports.pop(0)
            if place["rank"] >= ranks:
                continue
            checkpoint = {"load": saves} if resumed_under else {"save": saves}
            worker = worker_for(
                place, folder, ranks, port, parallel=parallel, checkpoint=checkpoint, optimizer={"lr": 5e-3}
            )
            worker.start()
            if not resumed_under:
                recipe_of(worker).train(0, ROLLOUTS[0])
                recipe_of(worker).save(1, {})
            metrics[saved_under, resumed_under] = [
                recipe_of(worker).train(step, ROLLOUTS[step]).metrics for step in (1, 2)
            ]
            worker.close()
        _wait_for_all(place, os.path.join(root, "done " + saved_under))
    return metrics


def _wait_for_all(place, path):
    """A one-rank layout leaves the other rank idle: it waits for the files that the next layout reads."""
    import time

    if place["rank"] == 0:
        open(path, "w").close()
    end = time.monotonic() + 60
    while not os.path.exists(path):
        assert time.monotonic() < end, path
        time.sleep(0.05)


@pytest.fixture(scope="module")
def resumed(folders, tmp_path_factory):
    root = str(tmp_path_factory.mktemp("checkpoints"))
    return run_ranks(save_and_resume, 2, folders["qwen3_moe"], root, free_ports(2 * (len(LAYOUTS) + 1)), timeout_s=150)[
        0
    ]


@pytest.mark.parametrize("resumed_under", LAYOUTS)
@pytest.mark.parametrize("saved_under", ["experts", "one rank"])
def test_a_checkpoint_continues_under_another_expert_parallel_size(resumed, saved_under, resumed_under):
    ours, straight = resumed[saved_under, resumed_under], resumed[saved_under, None]
    if saved_under == resumed_under:
        assert ours == straight
    for mine, theirs in zip(ours, straight, strict=True):
        for name in theirs:
            assert mine[name] == pytest.approx(theirs[name], rel=2e-4, abs=1e-6), name
