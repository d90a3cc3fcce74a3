"""Saving, resuming and exporting: nothing that a later step depends on is lost, under the same layout or another."""
# Covers slime_like.megatron_backend.checkpoint.state and slime_like.megatron_backend.hf.save too, which it does not
# import itself.

import json
import os
import shutil
import time

import numpy as np
import pytest

from tests.helpers.hf_truth import load_model, score
from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.train_world import free_ports, make_config, make_samples, recipe_of, run_ranks

pytestmark = pytest.mark.multiprocess

TENSOR, PIPELINE, DATA = (
    {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    {"pipeline_model_parallel_size": 2},
    {},
)
ROLLOUTS = [make_samples(8, seed=seed) for seed in range(4)]
SCHEDULE = {"lr": 5e-3, "lr_decay_style": "linear", "lr_warmup_iters": 2}
CLIENT_STATE = {"data": {"position": 16, "epoch": 1}, "weight_version": 2}


def start(place, ports, folder, *, parallel, optimizer=None, **checkpoint):
    from slime_like.megatron_backend.worker import TrainWorker

    # Two train steps a rollout, so that old log-probs are computed before the first.
    config = make_config(
        folder,
        num_ranks=2,
        num_steps=2,
        parallel=parallel,
        optimizer=SCHEDULE | (optimizer or {}),
        checkpoint=checkpoint,
    )
    worker = TrainWorker(config, **(place | {"master_port": ports.pop(0)}))
    return worker, worker.start()


def metrics_of(worker, rollouts):
    return [recipe_of(worker).train(step, ROLLOUTS[step]).metrics for step in rollouts]


def in_world(place, folder, root, ports):
    """Everything that needs a live trainer, in one world of two ranks; the tests look at what it returns."""
    from slime_like.errors import CheckpointError

    results: dict = {}
    ports = list(ports)
    saves = os.path.join(root, "saves")
    worker, _ = start(place, ports, folder, parallel=TENSOR, save=saves)
    metrics_of(worker, [0, 1])
    began = time.monotonic()
    results["path"] = recipe_of(worker).save(2, CLIENT_STATE)
    results["save_seconds"] = time.monotonic() - began
    recipe_of(worker).save_hf(os.path.join(root, "hf"))
    recipe_of(worker).save_hf(os.path.join(root, "hf"))  # replaces itself
    results["log_probs"] = recipe_of(worker).log_probs(ROLLOUTS[0])
    results["straight"] = metrics_of(worker, [2, 3])
    worker.close()

    for name, parallel in (("tensor", TENSOR), ("pipeline", PIPELINE), ("data", DATA)):
        worker, results[name + " start"] = start(place, ports, folder, parallel=parallel, load=saves)
        results[name] = metrics_of(worker, [2, 3])
        worker.close()

    # A start without optimizer state, and one with the weights only.
    for name, options in (("no optimizer", {"no_load_optim": True}), ("finetune", {"finetune": True})):
        worker, results[name + " start"] = start(place, ports, folder, parallel=DATA, load=saves, **options)
        results[name + " log-probs"] = recipe_of(worker).log_probs(ROLLOUTS[0])
        results[name] = metrics_of(worker, [2, 3])
        worker.close()

    # bf16 keeps fp32 main weights apart from the model's: both must come back.
    half, optimizer = os.path.join(root, "half"), {"bf16": True}
    worker, _ = start(place, ports, folder, parallel=DATA, optimizer=optimizer, save=half)
    metrics_of(worker, [0, 1])
    recipe_of(worker).save(2, {})
    results["bf16 straight"] = metrics_of(worker, [2, 3])
    worker.close()
    for name, parallel, lost in (
        ("bf16", DATA, {}),
        ("bf16 tensor", TENSOR, {}),
        ("bf16 lost", TENSOR, {"no_load_optim": True}),
    ):
        worker, _ = start(place, ports, folder, parallel=parallel, optimizer=optimizer, load=half, **lost)
        results[name] = metrics_of(worker, [2, 3])
        worker.close()

    small = os.path.join(root, "small")
    worker, _ = start(
        place, ports, folder, parallel=DATA, load=os.path.join(root, "hf"), save=small, no_save_optim=True
    )
    results["from hf log-probs"] = recipe_of(worker).log_probs(ROLLOUTS[0])
    recipe_of(worker).save(1, {})
    worker.close()
    worker, _ = start(place, ports, folder, parallel=DATA, ref_load=small)
    results["from ref log-probs"] = recipe_of(worker).log_probs(ROLLOUTS[0])
    worker.close()

    torn = os.path.join(root, "torn")
    if place["rank"] == 0:
        shutil.copytree(saves, torn)
        shard = max(
            (e for e in os.scandir(os.path.join(torn, "iter_0000002")) if e.name.endswith(".distcp")),
            key=lambda e: e.stat().st_size,
        )
        os.truncate(shard.path, shard.stat().st_size - 1)
        results["torn file"] = shard.path
    other = os.path.join(root, "other")
    for name, model, load in (
        ("torn", folder, torn),
        ("lacks optimizer", folder, small),
        ("other architecture", other, saves),
    ):
        try:
            worker, _ = start(place, ports, model, parallel=TENSOR, load=load)
        except CheckpointError as error:
            results[name] = str(error)
        from slime_like.megatron_backend.initialize import shut_down

        shut_down()
    return results


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    root = str(tmp_path_factory.mktemp("checkpoints"))
    folder = make_tiny_model(os.path.join(root, "model"), "qwen3", tied=True)
    make_tiny_model(os.path.join(root, "other"), "qwen3", tied=True, num_layers=2)
    with open(os.path.join(folder, "tokenizer.json"), "w", encoding="utf-8") as file:
        file.write('{"a": "tokenizer"}')
    first, second = run_ranks(in_world, 2, folder, root, free_ports(16), timeout_s=150)
    assert first["straight"] == second["straight"]
    return first | {"root": root, "folder": folder}


def assert_continues(resumed, straight, *, rel):
    for ours, theirs in zip(resumed, straight, strict=True):
        assert set(ours) == set(theirs)
        for name in theirs:
            assert ours[name] == pytest.approx(theirs[name], rel=rel, abs=1e-6), name


def test_resuming_under_the_same_layout_is_exact(world):
    assert world["tensor"] == world["straight"]
    assert world["tensor start"]["num_rollouts_done"] == 2
    assert world["tensor start"]["client_state"] == CLIENT_STATE


@pytest.mark.parametrize("layout", ["pipeline", "data"])
def test_resuming_under_another_layout_continues(world, layout):
    assert_continues(world[layout], world["straight"], rel=2e-4)
    assert world[layout][0]["train/lr"] == world["straight"][0]["train/lr"]


def test_bf16_resumes_with_its_fp32_weights(world):
    assert world["bf16"] == world["bf16 straight"]
    # Another layout rounds differently in bf16; without the fp32 weights and moments it is off by far more.
    for way, goes_on in (("bf16 tensor", True), ("bf16 lost", False)):
        for ours, theirs in zip(world[way], world["bf16 straight"], strict=True):
            assert (ours["train/entropy"] == pytest.approx(theirs["train/entropy"], rel=3e-4)) is goes_on
        # Later ones are of weights that have moved apart: 10 % in one way, 3 % in the other.
        ours, theirs = world[way][0]["train/grad_norm"], world["bf16 straight"][0]["train/grad_norm"]
        assert (ours == pytest.approx(theirs, rel=0.02)) is goes_on


def test_learning_rate_schedule_goes_on(world):
    # 20 steps in all; steps 4 to 7 come after the resume. Warm-up ends at step 2, then linear to 0 at step 20.
    rates = [5e-3 * (20 - step) / 18 for step in (5, 7)]
    assert [m["train/lr"] for m in world["straight"]] == pytest.approx(rates)


def test_saving_is_quick(world):
    assert world["save_seconds"] < 3


def test_weights_survive_every_way_out(world):
    for key in ("no optimizer log-probs", "finetune log-probs", "from hf log-probs", "from ref log-probs"):
        for ours, theirs in zip(world[key], world["log_probs"], strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=0, err_msg=key)


def test_no_load_optim_keeps_the_count_and_forgets_the_moments(world):
    assert world["no optimizer start"]["num_rollouts_done"] == 2
    assert world["no optimizer"][0]["train/lr"] == world["straight"][0]["train/lr"]
    assert world["no optimizer"][1]["train/loss"] != pytest.approx(world["straight"][1]["train/loss"], rel=1e-4)


def test_finetune_starts_anew(world):
    assert world["finetune start"]["num_rollouts_done"] == 0
    assert world["finetune start"]["client_state"] == {}
    assert world["finetune"][0]["train/lr"] == pytest.approx(2.5e-3)  # the second step of the warm-up


def test_torn_checkpoint_is_refused_by_file(world):
    assert world["torn file"] in world["torn"]
    assert "torn" in world["torn"]


def test_missing_optimizer_state_is_refused_with_the_fix(world):
    assert "--no-load-optim" in world["lacks optimizer"]


def test_other_architecture_is_refused(world):
    assert "num_layers: checkpoint 4, flags 2" in world["other architecture"]


def test_tracker_and_folder_bear_megatrons_names(world):
    assert world["path"].endswith("saves/iter_0000002")
    with open(os.path.join(world["root"], "saves", "latest_checkpointed_iteration.txt"), encoding="utf-8") as file:
        assert file.read() == "2"
    assert sorted(os.listdir(os.path.join(world["root"], "saves"))) == [
        "iter_0000002",
        "latest_checkpointed_iteration.txt",
    ]


def test_saved_hf_folder_is_what_transformers_loads(world):
    folder = os.path.join(world["root"], "hf")
    model = load_model(folder)
    for sample, ours in zip(ROLLOUTS[0], world["log_probs"], strict=True):
        np.testing.assert_allclose(score(model, sample.tokens, 1.0)[0].detach().numpy(), ours[1:], atol=1e-5, rtol=0)
    with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
        assert json.load(file)["dtype"] == "float32"
    assert os.path.isfile(os.path.join(folder, "tokenizer.json"))
    assert not os.path.exists(folder + ".tmp")
