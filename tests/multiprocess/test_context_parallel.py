"""Context parallelism: ranks that share sequences give the numbers of one rank under every loss (test_parity.py has
those of HF).
"""

import dataclasses

import numpy as np
import pytest

from slime_like.config.sync import SyncConfig
from tests.helpers.parity import ragged_batch
from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.train_world import disk_order, free_ports, make_config, recipe_of, run_ranks

pytestmark = pytest.mark.multiprocess

TEMPERATURE, ENTROPY_COEF = 0.7, 0.01
GSPO = {"advantage_estimator": "gspo", "entropy_coef": ENTROPY_COEF}
TIS = {"use_tis": True, "tis_clip": 1.1, "tis_clip_low": 0.5, "entropy_coef": ENTROPY_COEF}
DYNAMIC = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 40, "balance_data": True}
CP = {"context_parallel_size": 2}


@dataclasses.dataclass(frozen=True)
class Case:
    """One layout under one loss."""

    name: str
    ranks: int
    parallel: dict
    batch: dict = dataclasses.field(default_factory=lambda: DYNAMIC)
    loss: dict = dataclasses.field(default_factory=dict)
    model: str = "dense"
    num_steps: int = 1


#: Each loss on one rank, then under context parallelism. Two train steps, so that the ratio is not 1 in the second.
LOSSES = {"gspo": GSPO, "tis": TIS, "per token": {"calculate_per_token_loss": True, "entropy_coef": ENTROPY_COEF}}
LAYOUTS = {
    "one rank": (1, {}),
    "cp2": (2, CP),
    "cp2 dp2": (4, CP),
    "cp2 tp2 sp": (4, CP | {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
}
AGAINST_ONE_RANK = [
    Case(f"{loss}: {layout}", ranks, parallel, loss=flags, num_steps=2)
    for loss, flags in LOSSES.items()
    for layout, (ranks, parallel) in LAYOUTS.items()
]


def run_cases(place, cases, folders, ports):
    """[result of each case]; None where this rank has no part in it."""
    from slime_like.megatron_backend.worker import TrainWorker

    results = []
    for case, port in zip(cases, ports, strict=True):
        if place["rank"] >= case.ranks:
            results.append(None)
            continue
        groups = {
            "parallel": case.parallel,
            "batch": case.batch,
            "loss": case.loss,
            "rollout": {"rollout_temperature": TEMPERATURE},
        }
        checkpoint = {"load": folders[case.model]}
        config = make_config(
            folders[case.model],
            num_ranks=case.ranks,
            num_samples=10,
            num_steps=case.num_steps,
            checkpoint=checkpoint,
            **groups,
        )
        worker = TrainWorker(config, **(place | {"world_size": case.ranks, "master_port": port}))
        worker.start()
        samples = ragged_batch()
        result = {"log_probs": recipe_of(worker).log_probs(samples)}
        result["report"] = recipe_of(worker).train(0, samples)
        result["after"] = recipe_of(worker).log_probs(samples)
        # fewer samples than data parallel ranks, in each of two steps
        result["lone"] = recipe_of(worker).train(1, samples[-2:])
        worker.close()
        results.append(result)
    return results


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {
        "dense": make_tiny_model(str(root / "dense"), "qwen3", seed=0),
    }


@pytest.fixture(scope="module")
def outcomes(folders):
    """name -> [result of each of its ranks], all from one world of four processes."""
    cases = AGAINST_ONE_RANK
    by_rank = run_ranks(run_cases, 4, cases, folders, free_ports(len(cases)), timeout_s=240)
    return {case.name: [by_rank[rank][number] for rank in range(case.ranks)] for number, case in enumerate(cases)}


@pytest.mark.parametrize("name", [case.name for case in AGAINST_ONE_RANK])
def test_every_rank_reports_the_same(outcomes, name):
    first = outcomes[name][0]
    for other in outcomes[name][1:]:
        assert other["report"] == first["report"]
        assert other["lone"] == first["lone"]
        for mine, theirs in zip(other["log_probs"] + other["after"], first["log_probs"] + first["after"], strict=True):
            np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one rank"])
@pytest.mark.parametrize("loss", LOSSES)
def test_losses_equal_those_of_one_rank(outcomes, loss, layout):
    """rel 1e-3: the second of the two steps starts from weights that Adam's division left some 1e-4 apart."""
    ours, theirs = (
        outcomes[f"{loss}: {layout}"][0]["report"].metrics,
        outcomes[f"{loss}: one rank"][0]["report"].metrics,
    )
    assert set(ours) == set(theirs)
    for name in set(theirs) - {"train/clip_ratio", "train/tis_clip_ratio"}:
        assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5), name
    if loss == "tis":
        assert 0 < theirs["train/tis_clip_ratio"] < 1
    assert theirs["train/ratio_mean"] != pytest.approx(1.0, abs=1e-3)


def sync_and_save(place, folder, root, ports):
    """Under two context parallel ranks: digest of a publish to disk, and a checkpoint with what one more step on it
    reports.
    """
    from slime_like.megatron_backend.worker import TrainWorker

    results = {}
    for (name, parallel), port in zip({"two": CP, "one": {}}.items(), ports, strict=True):
        ranks = parallel.get("context_parallel_size", 1)
        if place["rank"] >= ranks:
            continue
        checkpoint = {"save": f"{root}/saved", "load": folder if name == "two" else f"{root}/saved"}
        config = make_config(
            folder,
            num_ranks=ranks,
            num_samples=10,
            parallel=parallel,
            batch=DYNAMIC,
            checkpoint=checkpoint,
            optimizer={"lr": 1e-3},
        )
        sync = SyncConfig(
            update_weight_transport="disk",
            update_weight_disk_dir=f"{root}/weights-{name}",
            update_weight_buffer_size=10_000,
        )
        worker = TrainWorker(
            dataclasses.replace(config, sync=sync), **(place | {"world_size": ranks, "master_port": port})
        )
        resumed = worker.start()
        samples = ragged_batch()
        if name == "two":
            results["start digest"] = worker.publish(disk_order(sync.update_weight_disk_dir, 1)).digest
            recipe_of(worker).train(0, samples)
            recipe_of(worker).save(1, {"data": 3})
        digest, log_probs = (
            worker.publish(disk_order(sync.update_weight_disk_dir, 2)).digest,
            recipe_of(worker).log_probs(samples),
        )
        results[name] = {
            "resumed": resumed,
            "digest": digest,
            "log_probs": log_probs,
            "next": recipe_of(worker).train(1, samples).metrics,
        }
        worker.close()
    return results


def test_what_two_ranks_saved_and_published_one_rank_has_too(tmp_path, folders):
    first, second = run_ranks(sync_and_save, 2, folders["dense"], str(tmp_path), free_ports(2), timeout_s=90)
    two, one = first["two"], first["one"]
    assert one["resumed"]["num_rollouts_done"] == 1 and one["resumed"]["client_state"] == {"data": 3}
    assert second["two"]["digest"] == two["digest"] == one["digest"] != first["start digest"]
    for ours, theirs in zip(one["log_probs"], two["log_probs"], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=0)
    assert set(one["next"]) == set(two["next"])
    for name, value in two["next"].items():
        assert one["next"][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
