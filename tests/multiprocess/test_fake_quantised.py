"""Training with weights rounded to int4: the trainer is transformers with the rounded weights, whose gradients go to
the weights in full precision; engines are sent the rounded ones (slime_like.megatron_backend.model.fake_quantised).
"""

import dataclasses
import os

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from slime_like.config.sync import SyncConfig
from slime_like.errors import ConfigError
from slime_like.records import BASE, REFERENCE
from slime_like.weight_sync.fake_quantise import over_linear
from tests.helpers.hf_truth import first_step_truth
from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.train_world import disk_order, free_ports, make_config, make_samples, recipe_of, run_ranks

pytestmark = [pytest.mark.multiprocess, pytest.mark.long_run]

GROUP = 8
TEMPERATURE, KL_COEF, ENTROPY_COEF = 0.7, 0.1, 0.01
LOSS = {"use_kl_loss": True, "kl_loss_type": "k2", "kl_loss_coef": KL_COEF, "entropy_coef": ENTROPY_COEF}
QAT = {"fake_quantization": "int4", "fake_quantization_group_size": GROUP}
#: Name -> (family, layout, ranks).
CASES = {
    "dense, one rank, layers computed again": (
        "qwen3",
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        1,
    ),
    "dense, tp2 sp": ("qwen3", {"tensor_model_parallel_size": 2, "sequence_parallel": True}, 2),
    "experts, ep2": ("qwen3_moe", {"expert_model_parallel_size": 2}, 2),
}


def run_cases(place, folders, root, ports):
    """[result of each case]; None where this rank has no part in it. Last: what another group size says."""
    from slime_like.megatron_backend.worker import TrainWorker

    results = []
    for number, (family, parallel, ranks) in enumerate(CASES.values()):
        if place["rank"] >= ranks:
            results.append(None)
            continue
        checkpoint = {"ref_load": folders["reference of " + family], "load": folders[family]}
        config = make_config(
            folders[family], num_ranks=ranks, parallel=parallel, loss=LOSS, checkpoint=checkpoint, optimizer=QAT,
            rollout={"rollout_temperature": TEMPERATURE},
        )  # fmt: skip
        directory = os.path.join(root, str(number))
        sync = SyncConfig(update_weight_transport="disk", update_weight_disk_dir=directory)
        config = dataclasses.replace(config, sync=sync)
        worker = TrainWorker(config, **(place | {"world_size": ranks, "master_port": ports[number]}))
        worker.start()
        samples = make_samples()
        result = {
            "log_probs": recipe_of(worker).log_probs(samples),
            "reference": recipe_of(worker).log_probs(samples, weights=REFERENCE),
            "metrics": recipe_of(worker).train(0, samples).metrics,
            "trained": {name: tensor.numpy().copy() for name, tensor in worker.export(BASE)},
        }
        worker.publish(disk_order(directory, 1))
        worker.close()
        results.append(result)
    if place["rank"] == 0:
        odd = {"fake_quantization": "int4", "fake_quantization_group_size": 7}
        config = make_config(folders["qwen3"], checkpoint={"load": folders["qwen3"]}, optimizer=odd)
        with pytest.raises(ConfigError) as refusal:
            TrainWorker(config, **(place | {"world_size": 1, "master_port": ports[-1]})).start()
        results.append(str(refusal.value))
    return results


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Plain models, and the same with rounded weights."""
    root, paths = tmp_path_factory.mktemp("models"), {}
    for prefix, seed in (("", 0), ("reference of ", 1)):
        for family in ("qwen3", "qwen3_moe"):
            plain = make_tiny_model(str(root / f"{family}-{seed}"), family, seed=seed)
            rounded = make_tiny_model(str(root / f"{family}-{seed}-rounded"), family, seed=seed)
            path = os.path.join(rounded, "model.safetensors")
            save_file(dict(over_linear(load_file(path).items(), GROUP)), path, metadata={"format": "pt"})
            paths |= {prefix + family: plain, f"rounded {prefix}{family}": rounded}
    return paths


@pytest.fixture(scope="module")
def outcome(folders, tmp_path_factory):
    root = str(tmp_path_factory.mktemp("published"))
    by_rank = run_ranks(run_cases, 2, folders, root, free_ports(len(CASES) + 1), timeout_s=200)
    truths = {
        family: first_step_truth(
            folders[f"rounded {family}"], make_samples(), reference=folders[f"rounded reference of {family}"],
            temperature=TEMPERATURE, kl_coef=KL_COEF, entropy_coef=ENTROPY_COEF,
        )
        for family in ("qwen3", "qwen3_moe")
    }  # fmt: skip
    return by_rank, truths, root


@pytest.mark.parametrize("number", range(len(CASES)), ids=list(CASES))
def test_a_step_is_transformers_with_rounded_weights(outcome, folders, number):
    by_rank, truths, _ = outcome
    family, _, ranks = list(CASES.values())[number]
    truth = truths[family]
    for rank in range(ranks):
        result = by_rank[rank][number]
        expected = truth.log_probs + truth.reference_log_probs
        for ours, theirs in zip(result["log_probs"] + result["reference"], expected, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=0)
        assert result["metrics"]["train/loss"] == pytest.approx(truth.loss, rel=1e-5)
        assert result["metrics"]["train/grad_norm"] == pytest.approx(truth.grad_norm, rel=1e-5)


@pytest.mark.parametrize("number", range(len(CASES)), ids=list(CASES))
def test_engines_get_what_the_trainer_computes_with(outcome, folders, number):
    by_rank, _, root = outcome
    family, _, ranks = list(CASES.values())[number]
    trained = {
        name: torch.from_numpy(array)
        for rank in range(ranks)
        for name, array in by_rank[rank][number]["trained"].items()
    }
    folder = os.path.join(root, str(number), "version-00000001")
    sent: dict = {}
    for entry in os.scandir(folder):
        if entry.name.endswith(".safetensors"):
            sent |= load_file(entry.path)
    started = load_file(os.path.join(folders[family], "model.safetensors"))
    rounded = dict(over_linear(trained.items(), GROUP))
    assert set(sent) == set(rounded) == set(started)
    assert [name for name in sent if not torch.equal(sent[name], rounded[name])] == []
    up = next(name for name in sent if name.endswith("up_proj.weight"))
    assert not torch.equal(trained[up], sent[up]) and not torch.equal(trained[up], started[up])


def test_columns_that_are_no_whole_groups_are_refused(outcome):
    by_rank, _, _ = outcome
    assert "--fake-quantization-group-size 7" in by_rank[0][-1] and "columns on a rank" in by_rank[0][-1]
