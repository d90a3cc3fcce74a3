"""Context parallelism: ranks that share sequences give HF transformers' numbers, and those of one rank under every loss."""

import dataclasses

import numpy as np
import pytest

from slime_like.config.system import SyncConfig
from tests.helpers.hf_truth import first_step_truth, load_model
from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.train_world import free_ports, make_config, make_samples, run_ranks

pytestmark = pytest.mark.multiprocess

TEMPERATURE, KL_COEF, ENTROPY_COEF = 0.7, 0.1, 0.01
TRUTH_LOSS = {"use_kl_loss": True, "kl_loss_type": "k2", "kl_loss_coef": KL_COEF, "entropy_coef": ENTROPY_COEF}
GSPO = {"advantage_estimator": "gspo", "entropy_coef": ENTROPY_COEF}
TIS = {"use_tis": True, "tis_clip": 1.1, "tis_clip_low": 0.5, "entropy_coef": ENTROPY_COEF}
DYNAMIC = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 40, "balance_data": True}
SMALL_PACKS = DYNAMIC | {"max_tokens_per_gpu": 12}
ONE_PACK = DYNAMIC | {"max_tokens_per_gpu": 4000}
CP = {"context_parallel_size": 2}


def batch_of_samples():
    """make_samples, and two more: one of 3 tokens (fewer than 2 x 2 and 2 x 4 chunks), one of 16 trained on its first tokens only."""
    samples = make_samples()
    short, early = make_samples(2, seed=7)
    short = dataclasses.replace(
        short, **{name: getattr(short, name)[:3] for name in ("tokens", "engine_logprobs", "weight_versions")}, loss_mask=np.array([0, 1, 1], dtype=np.int8)
    )
    generator = np.random.default_rng(9)
    mask = np.zeros(16, dtype=np.int8)
    mask[2:7] = 1
    early = dataclasses.replace(
        early,
        tokens=generator.integers(0, 101, 16).astype(np.int32),
        loss_mask=mask,
        engine_logprobs=(-4.6 + generator.normal(size=16)).astype(np.float32) * mask,
        weight_versions=np.where(mask, 0, -1).astype(np.int32),
    )
    return [*samples, short, early]


@dataclasses.dataclass(frozen=True)
class Case:
    """One layout under one loss."""

    name: str
    ranks: int
    parallel: dict
    batch: dict = dataclasses.field(default_factory=lambda: DYNAMIC)
    loss: dict = dataclasses.field(default_factory=lambda: TRUTH_LOSS)
    model: str = "dense"
    num_steps: int = 1


CASES = [
    Case("cp2", 2, CP),
    Case("cp2, samples one by one", 2, CP, {}),
    Case("cp2, small packs", 2, CP, SMALL_PACKS),
    Case("cp2, one pack", 2, CP, ONE_PACK),
    Case("cp2 tp2 sp", 4, CP | {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    Case("cp2 tp2", 4, CP | {"tensor_model_parallel_size": 2}, DYNAMIC | {"data_pad_size_multiplier": 8}),
    Case("cp2 pp2", 4, CP | {"pipeline_model_parallel_size": 2}),
    Case("cp2 dp2", 4, CP),
    Case("cp2 dp2, replicated optimizer", 4, CP | {"use_distributed_optimizer": False}),
    Case("cp4", 4, {"context_parallel_size": 4}),
    Case("cp2, recompute", 2, CP | {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}),
]
#: Each loss on one rank, then under context parallelism. Two train steps, so that the ratio is not 1 in the second.
LOSSES = {"gspo": GSPO, "tis": TIS, "per token": {"calculate_per_token_loss": True, "entropy_coef": ENTROPY_COEF}}
LAYOUTS = {"one rank": (1, {}), "cp2": (2, CP), "cp2 dp2": (4, CP), "cp2 tp2 sp": (4, CP | {"tensor_model_parallel_size": 2, "sequence_parallel": True})}
AGAINST_ONE_RANK = [
    Case(f"{loss}: {layout}", ranks, parallel, loss=flags, num_steps=2) for loss, flags in LOSSES.items() for layout, (ranks, parallel) in LAYOUTS.items()
]


def run_cases(place, cases, folders, ports):
    """[result of each case]; None where this rank has no part in it."""
    from slime_like.megatron_backend.worker import TrainWorker

    results = []
    for case, port in zip(cases, ports, strict=True):
        if place["rank"] >= case.ranks:
            results.append(None)
            continue
        groups = {"parallel": case.parallel, "batch": case.batch, "loss": case.loss, "rollout": {"rollout_temperature": TEMPERATURE}}
        reference = {"ref_load": folders["reference"]} if case.loss.get("use_kl_loss") else {}
        checkpoint = {"load": folders[case.model]} | reference
        config = make_config(folders[case.model], num_ranks=case.ranks, num_samples=10, num_steps=case.num_steps, checkpoint=checkpoint, **groups)
        worker = TrainWorker(config, **(place | {"world_size": case.ranks, "master_port": port}))
        worker.start()
        samples = batch_of_samples()
        result = {"log_probs": worker.log_probs(samples)}
        result["exported"] = {name: tensor.numpy().copy() for name, tensor in worker.weights()}
        result["report"] = worker.train(0, samples)
        result["after"] = worker.log_probs(samples)
        result["lone"] = worker.train(1, samples[-2:])  # fewer samples than data parallel ranks, in each of two steps
        worker.close()
        results.append(result)
    return results


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {
        "dense": make_tiny_model(str(root / "dense"), "qwen3", seed=0),
        "reference": make_tiny_model(str(root / "reference"), "qwen3", seed=1),
    }


@pytest.fixture(scope="module")
def truth(folders):
    return first_step_truth(
        folders["dense"], batch_of_samples(), reference=folders["reference"], temperature=TEMPERATURE, kl_coef=KL_COEF, entropy_coef=ENTROPY_COEF
    )


@pytest.fixture(scope="module")
def outcomes(folders):
    """name -> [result of each of its ranks], all from one world of four processes."""
    cases = CASES + AGAINST_ONE_RANK
    by_rank = run_ranks(run_cases, 4, cases, folders, free_ports(len(cases)), timeout_s=240)
    return {case.name: [by_rank[rank][number] for rank in range(case.ranks)] for number, case in enumerate(cases)}


each_case = pytest.mark.parametrize("name", [case.name for case in CASES])


@each_case
def test_log_probs_equal_hf(outcomes, truth, name):
    for result in outcomes[name]:
        for ours, theirs in zip(result["log_probs"], truth.log_probs, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=0)


@each_case
def test_loss_gradient_norm_and_entropy_equal_hf(outcomes, truth, name):
    metrics = outcomes[name][0]["report"].metrics
    assert metrics["train/loss"] == pytest.approx(truth.loss, rel=1e-5)
    assert metrics["train/grad_norm"] == pytest.approx(truth.grad_norm, rel=1e-5)
    assert metrics["train/entropy"] == pytest.approx(truth.entropy, rel=1e-5)
    assert metrics["train/kl_loss"] == pytest.approx(truth.kl, rel=1e-5)


@pytest.mark.parametrize("name", [case.name for case in CASES + AGAINST_ONE_RANK])
def test_every_rank_reports_the_same(outcomes, name):
    first = outcomes[name][0]
    for other in outcomes[name][1:]:
        assert other["report"] == first["report"]
        assert other["lone"] == first["lone"]
        for mine, theirs in zip(other["log_probs"] + other["after"], first["log_probs"] + first["after"], strict=True):
            np.testing.assert_array_equal(mine, theirs)


@each_case
def test_weights_come_out_as_they_went_in(outcomes, folders, name):
    expected = {name: p.detach().numpy() for name, p in load_model(folders["dense"]).named_parameters()}
    exported = {name: tensor for result in outcomes[name] for name, tensor in result["exported"].items()}
    assert set(exported) == set(expected)
    for parameter, tensor in exported.items():
        np.testing.assert_array_equal(tensor, expected[parameter], err_msg=parameter)


def test_a_step_moves_every_layout_to_the_same_weights(outcomes):
    """Seen through log-probs, as in test_layouts: this depends on each single gradient, not on their norm alone."""
    first = outcomes["cp2"][0]
    moved = max(np.abs(a - b).max() for a, b in zip(first["after"], first["log_probs"], strict=True))
    assert moved > 0.1
    for case in CASES[1:]:
        for ours, theirs in zip(outcomes[case.name][0]["after"], first["after"], strict=True):
            np.testing.assert_allclose(ours, theirs, atol=2e-2 * moved, rtol=0, err_msg=case.name)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one rank"])
@pytest.mark.parametrize("loss", LOSSES)
def test_losses_equal_those_of_one_rank(outcomes, loss, layout):
    """rel 1e-3: the second of the two steps starts from weights that Adam's division left some 1e-4 apart."""
    ours, theirs = outcomes[f"{loss}: {layout}"][0]["report"].metrics, outcomes[f"{loss}: one rank"][0]["report"].metrics
    assert set(ours) == set(theirs)
    for name in set(theirs) - {"train/clip_ratio", "train/tis_clip_ratio"}:
        assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5), name
    if loss == "tis":
        assert 0 < theirs["train/tis_clip_ratio"] < 1
    assert theirs["train/ratio_mean"] != pytest.approx(1.0, abs=1e-3)


def sync_and_save(place, folder, root, ports):
    """Under two context parallel ranks: digest of a publish to disk, and a checkpoint with what one more step on it reports."""
    from slime_like.megatron_backend.worker import TrainWorker

    found = {}
    for (name, parallel), port in zip({"two": CP, "one": {}}.items(), ports, strict=True):
        ranks = parallel.get("context_parallel_size", 1)
        if place["rank"] >= ranks:
            continue
        checkpoint = {"save": f"{root}/saved", "load": folder if name == "two" else f"{root}/saved"}
        config = make_config(folder, num_ranks=ranks, num_samples=10, parallel=parallel, batch=DYNAMIC, checkpoint=checkpoint, optimizer={"lr": 1e-3})
        sync = SyncConfig(update_weight_transport="disk", update_weight_disk_dir=f"{root}/weights-{name}", update_weight_buffer_size=10_000)
        worker = TrainWorker(dataclasses.replace(config, sync=sync), **(place | {"world_size": ranks, "master_port": port}))
        resumed = worker.start()
        samples = batch_of_samples()
        if name == "two":
            found["start digest"] = worker.publish(1, []).digest
            worker.train(0, samples)
            worker.save(1, {"data": 3})
        digest, log_probs = worker.publish(2, []).digest, worker.log_probs(samples)
        found[name] = {"resumed": resumed, "digest": digest, "log_probs": log_probs, "next": worker.train(1, samples).metrics}
        worker.close()
    return found


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
