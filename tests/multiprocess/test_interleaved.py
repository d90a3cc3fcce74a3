"""Chunks of layers, overlapping collectives and bf16: what is saved, accumulated and read after a step is what a plain
split gives.
"""
# Covers slime_like.megatron_backend.compat.buffers and slime_like.megatron_backend.step.gradient_sync too, which it
# does not import itself.

import os

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from slime_like.records import BASE, REFERENCE
from tests.helpers.hf_truth import score
from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.train_world import (
    add_gradients,
    free_ports,
    make_config,
    make_samples,
    optimizer_step,
    recipe_of,
    run_ranks,
)

pytestmark = pytest.mark.multiprocess

PIPELINE = {"pipeline_model_parallel_size": 2}
INTERLEAVED = PIPELINE | {"num_virtual_stages_per_pipeline_rank": 2}
TENSOR = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
ROLLOUTS = [make_samples(8, seed=seed) for seed in range(4)]
#: A bf16 trainer's log-probs against HF's fp32 ones: largest and root mean square difference, the latter also against
#: HF's own bf16.
BF16_LARGEST, BF16_MEAN, BF16_RATIO = 0.2, 0.03, 1.5


def start(place, ports, folder, *, parallel, optimizer=None, num_steps=2, loss=None, **checkpoint):
    from slime_like.megatron_backend.worker import TrainWorker

    config = make_config(
        folder,
        num_ranks=2,
        num_steps=num_steps,
        parallel=parallel,
        optimizer=optimizer or {},
        checkpoint=checkpoint,
        loss=loss or {},
    )
    worker = TrainWorker(config, **(place | {"master_port": ports.pop(0)}))
    worker.start()
    return worker


def weights_of(worker):
    from slime_like.megatron_backend.hf.names_and_shards import joins_export

    return {name: tensor.float().numpy().copy() for name, tensor in worker.export(BASE)} if joins_export() else {}


def checkpoints(place, ports, folder, root):
    """What follows a save under one split, loaded under others."""
    metrics, saves, back = {}, os.path.join(root, "saves"), os.path.join(root, "back")
    worker = start(place, ports, folder, parallel=INTERLEAVED, save=saves)
    for step in (0, 1):
        recipe_of(worker).train(step, ROLLOUTS[step])
    recipe_of(worker).save(2, {})
    metrics["straight"] = [recipe_of(worker).train(step, ROLLOUTS[step]).metrics for step in (2, 3)]
    worker.close()
    splits = {
        "interleaved": (INTERLEAVED, saves),
        "pipeline": (PIPELINE, saves),
        "tensor": (TENSOR, saves),
        "data": (OVERLAP, saves),
    }
    splits["back"] = (INTERLEAVED, back)
    for name, (parallel, load) in splits.items():
        worker = start(place, ports, folder, parallel=parallel, load=load, save=back)
        if name == "tensor":
            recipe_of(worker).save(2, {})
        metrics[name] = [recipe_of(worker).train(step, ROLLOUTS[step]).metrics for step in (2, 3)]
        worker.close()
    return metrics


def accumulation(place, ports, folder, parallel):
    """Two optimizer steps of two calls each: in the second, Megatron knows how many gradients to wait for."""
    worker = start(place, ports, folder, parallel=parallel, optimizer={"clip_grad": 0.0})
    steps = []
    for samples in ROLLOUTS[:2]:
        add_gradients(worker, samples[:4])
        add_gradients(worker, samples[4:])
        steps.append(optimizer_step(worker))
    mixed = recipe_of(worker).train(0, ROLLOUTS[2]).metrics  # now reductions start in the backward pass
    add_gradients(worker, ROLLOUTS[3])
    results = {
        "steps": [*steps, mixed, optimizer_step(worker)],
        "weights": weights_of(worker),
        "log-probs": recipe_of(worker).log_probs(ROLLOUTS[0]),
    }
    worker.close()
    return results


def reading(place, ports, folder, reference, parallel):
    """What reads weights after a step: export, log-probs, and a reference that takes the actor's place."""
    worker = start(
        place,
        ports,
        folder,
        parallel=parallel,
        num_steps=4,
        loss={"use_kl_loss": True, "kl_loss_coef": 0.1},
        load=folder,
        ref_load=reference,
    )
    metrics = recipe_of(worker).train(0, ROLLOUTS[0]).metrics
    results = {
        "metrics": metrics,
        "weights": weights_of(worker),
        "reference": recipe_of(worker).log_probs(ROLLOUTS[1], weights=REFERENCE),
    }
    results["log-probs"] = recipe_of(worker).log_probs(ROLLOUTS[1])
    results["next"] = recipe_of(worker).train(1, ROLLOUTS[1]).metrics
    worker.close()
    return results


def half_precision(place, ports, folder, parallel):
    """Log-probs in bf16, and that training moves them."""
    worker = start(place, ports, folder, parallel=parallel, optimizer={"bf16": True})
    before = recipe_of(worker).log_probs(ROLLOUTS[0])
    recipe_of(worker).train(0, ROLLOUTS[0])
    log_probs = before, recipe_of(worker).log_probs(ROLLOUTS[0])
    worker.close()
    return log_probs


def in_world(place, folder, reference, root, ports):
    ports = list(ports)
    results = {"checkpoints": checkpoints(place, ports, folder, root)}
    for name, parallel in (
        ("plain", {}),
        ("overlap", OVERLAP),
        ("replicated", {"overlap_grad_reduce": True, "use_distributed_optimizer": False}),
    ):
        results["accumulation", name] = accumulation(place, ports, folder, parallel)
    for name, parallel in (("plain", {}), ("overlap", OVERLAP)):
        results["reading", name] = reading(place, ports, folder, reference, parallel)
    for name, parallel in (("data", OVERLAP), ("tensor", TENSOR), ("interleaved", INTERLEAVED)):
        results["bf16", name] = half_precision(place, ports, folder, parallel)
    return results


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = str(tmp_path_factory.mktemp("interleaved"))
    return (
        make_tiny_model(os.path.join(root, "model"), "qwen2", tied=True),
        make_tiny_model(os.path.join(root, "reference"), "qwen2", tied=True, seed=1),
        root,
    )


@pytest.fixture(scope="module")
def world(folders):
    return run_ranks(in_world, 2, *folders, free_ports(16), timeout_s=200)


def assert_same(ours, theirs, *, rel):
    assert set(ours) == set(theirs)
    for name, value in theirs.items():
        assert ours[name] == pytest.approx(value, rel=rel, abs=1e-6), name


def test_chunks_resume_exactly(world):
    for metrics in (rank["checkpoints"] for rank in world):
        assert metrics["interleaved"] == metrics["straight"]


@pytest.mark.parametrize("split", ["pipeline", "tensor", "data", "back"])
def test_a_checkpoint_of_chunks_is_read_by_every_split_and_back(world, split):
    metrics = world[0]["checkpoints"]
    for ours, theirs in zip(metrics[split], metrics["straight"], strict=True):
        assert_same(ours, theirs, rel=3e-4)


@pytest.mark.parametrize("split", ["overlap", "replicated"])
def test_gradients_of_several_calls_add_up_though_reductions_overlap(world, split):
    for rank in world:
        ours, plain = rank["accumulation", split], rank["accumulation", "plain"]
        for mine, theirs in zip(ours["steps"], plain["steps"], strict=True):
            assert_same(mine, theirs, rel=1e-5)
        for mine, theirs in zip(ours["log-probs"], plain["log-probs"], strict=True):
            np.testing.assert_allclose(mine, theirs, atol=1e-4, rtol=0)
    assert world[0]["accumulation", split]["steps"][0]["train/grad_norm"] > 0


def test_whoever_reads_weights_after_a_step_sees_all_of_them(world):
    assert world[0]["reading", "plain"]["weights"]
    for rank in world:
        ours, plain = rank["reading", "overlap"], rank["reading", "plain"]
        assert_same(ours["metrics"], plain["metrics"], rel=1e-5)
        assert_same(ours["next"], plain["next"], rel=1e-5)
        for key in ("reference", "log-probs"):
            for mine, theirs in zip(ours[key], plain[key], strict=True):
                np.testing.assert_allclose(mine, theirs, atol=1e-5, rtol=0, err_msg=key)
        assert set(ours["weights"]) == set(plain["weights"])
        for name, theirs in plain["weights"].items():
            np.testing.assert_allclose(ours["weights"][name], theirs, atol=1e-6, rtol=0, err_msg=name)


def differences(rows, others):
    """(largest, root mean square) over all tokens."""
    gaps = np.concatenate([ours - theirs for ours, theirs in zip(rows, others, strict=True)])
    return np.abs(gaps).max(), np.sqrt(np.mean(gaps**2))


@pytest.mark.parametrize("split", ["data", "tensor", "interleaved"])
def test_bf16_stays_within_its_bound_of_hf(world, folders, split):
    def hf_rows(dtype):
        model = AutoModelForCausalLM.from_pretrained(folders[0], dtype=dtype, attn_implementation="eager")
        with torch.no_grad():
            return [np.concatenate([[0.0], score(model, sample.tokens, 1.0)[0].numpy()]) for sample in ROLLOUTS[0]]

    exact, half = hf_rows(torch.float32), hf_rows(torch.bfloat16)
    before, after = world[0]["bf16", split]
    (largest, mean), (_, theirs) = differences(before, exact), differences(half, exact)
    print(f"bf16 {split}: off by {mean:.4f} (at most {largest:.4f}), HF's own bf16 by {theirs:.4f}")
    assert 0 < largest <= BF16_LARGEST and mean <= BF16_MEAN and mean <= BF16_RATIO * theirs
    assert differences(after, before)[1] > 5 * BF16_MEAN
