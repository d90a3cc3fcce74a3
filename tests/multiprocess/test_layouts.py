"""One batch, many layouts: the trainer agrees with HF transformers, and weights come out as they went in."""

import dataclasses

import numpy as np
import pytest

from tests.helpers.hf_truth import first_step_truth, load_model
from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.train_world import free_ports, make_config, make_samples, run_ranks

pytestmark = pytest.mark.multiprocess

TEMPERATURE, KL_COEF, ENTROPY_COEF = 0.7, 0.1, 0.01
LOSS = {"use_kl_loss": True, "kl_loss_type": "k2", "kl_loss_coef": KL_COEF, "entropy_coef": ENTROPY_COEF}
DYNAMIC = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 40, "balance_data": True}


@dataclasses.dataclass(frozen=True)
class Case:
    """One layout of one model."""

    name: str
    model: str
    ranks: int = 1
    parallel: dict = dataclasses.field(default_factory=dict)
    batch: dict = dataclasses.field(default_factory=dict)
    loss: dict = dataclasses.field(default_factory=dict)


def tensor_parallel(**more):
    return {"tensor_model_parallel_size": 2, **more}


PIPELINE = {"pipeline_model_parallel_size": 2}
CASES = [
    Case("one rank", "qwen3"),
    Case("one rank, dynamic", "qwen3", batch=DYNAMIC),
    Case("one rank, per token", "qwen3", batch={"micro_batch_size": 4}, loss={"calculate_per_token_loss": True}),
    Case("tp2", "qwen3", 2, tensor_parallel()),
    Case("tp2 sp dynamic", "qwen3", 2, tensor_parallel(sequence_parallel=True), DYNAMIC),
    Case("pp2", "qwen3", 2, PIPELINE, DYNAMIC),
    Case("dp2", "qwen3", 2, {}, DYNAMIC),
    Case("dp2, replicated optimizer, per token", "qwen3", 2, {"use_distributed_optimizer": False}, {"micro_batch_size": 2}, {"calculate_per_token_loss": True}),
    Case("tp2 pp2", "qwen3", 4, tensor_parallel(sequence_parallel=True, **PIPELINE), DYNAMIC),
    Case("tp2 dp2", "qwen3", 4, tensor_parallel(), DYNAMIC),
    Case("recompute full", "qwen3", 1, {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}, DYNAMIC),
    Case("recompute block, pp2", "qwen3", 2, PIPELINE | {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}, DYNAMIC),
    Case("recompute selective, tp2 sp", "qwen3", 2, tensor_parallel(sequence_parallel=True, recompute_granularity="selective"), DYNAMIC),
    Case("pp2, 3 layers before 1", "qwen3", 2, PIPELINE | {"decoder_first_pipeline_num_layers": 3}, DYNAMIC),
    Case("pp2, 1 layer before 3", "qwen2 tied", 2, PIPELINE | {"decoder_last_pipeline_num_layers": 3}, DYNAMIC),
    Case("padded packs, tp2", "qwen3", 2, tensor_parallel(), DYNAMIC | {"data_pad_size_multiplier": 16}),
    Case("one rank", "qwen2 tied"),
    Case("tp2 pp2", "qwen2 tied", 4, tensor_parallel(sequence_parallel=True, **PIPELINE), DYNAMIC),
    Case("pp2", "qwen2 tied", 2, PIPELINE),
    Case("one rank", "llama scaled rope"),
    Case("tp2", "llama scaled rope", 2, tensor_parallel()),
]
LLAMA_ROPE = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA_ROPE["original_max_position_embeddings"] = 8192


def run_cases(place, cases, folders, ports):
    """[result of each case]; None where this rank has no part in it."""
    from slime_like.megatron_backend.worker import TrainWorker

    results = []
    for case, port in zip(cases, ports, strict=True):
        if place["rank"] >= case.ranks:
            results.append(None)
            continue
        groups = {"parallel": case.parallel, "batch": case.batch, "loss": LOSS | case.loss, "rollout": {"rollout_temperature": TEMPERATURE}}
        groups["checkpoint"] = {"ref_load": folders["reference of " + case.model], "load": folders[case.model]}
        config = make_config(folders[case.model], num_ranks=case.ranks, **groups)
        worker = TrainWorker(config, **(place | {"world_size": case.ranks, "master_port": port}))
        worker.start()
        samples = make_samples()
        log_probs, reference = worker.log_probs(samples), worker.log_probs(samples, model="reference")
        exported = {name: tensor.numpy().copy() for name, tensor in worker.weights()}
        report = worker.train(0, samples)
        after = worker.log_probs(samples)
        lone = worker.train(1, samples[:1])  # fewer samples than data parallel ranks
        worker.close()
        results.append({"log_probs": log_probs, "reference": reference, "exported": exported, "report": report, "after": after, "lone": lone})
    return results


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    made = {}
    for prefix, seed in (("", 0), ("reference of ", 1)):
        made[prefix + "qwen3"] = make_tiny_model(str(root / f"qwen3-{seed}"), "qwen3", seed=seed)
        made[prefix + "qwen2 tied"] = make_tiny_model(str(root / f"qwen2-{seed}"), "qwen2", tied=True, seed=seed)
        # With this base the slowest frequencies have wavelengths beyond 8192 positions, which is what llama3 scaling changes.
        made[prefix + "llama scaled rope"] = make_tiny_model(str(root / f"llama-{seed}"), "llama", seed=seed, rope_parameters=LLAMA_ROPE)
    return made


@pytest.fixture(scope="module")
def truths(folders):
    samples = make_samples()
    keys = {(case.model, case.loss.get("calculate_per_token_loss", False)) for case in CASES}
    return {
        (model, per_token): first_step_truth(
            folders[model],
            samples,
            reference=folders["reference of " + model],
            temperature=TEMPERATURE,
            kl_coef=KL_COEF,
            entropy_coef=ENTROPY_COEF,
            per_token=per_token,
        )
        for model, per_token in keys
    }


@pytest.fixture(scope="module")
def outcomes(folders):
    """case -> [result of each of its ranks], all from one world of four processes."""
    by_rank = run_ranks(run_cases, 4, CASES, folders, free_ports(len(CASES)), timeout_s=240)
    return [[by_rank[rank][number] for rank in range(case.ranks)] for number, case in enumerate(CASES)]


def label(number):
    return f"{CASES[number].model}: {CASES[number].name}"


each_case = pytest.mark.parametrize("number", range(len(CASES)), ids=label)


def truth_of(truths, case):
    return truths[case.model, case.loss.get("calculate_per_token_loss", False)]


@each_case
def test_log_probs_equal_hf(outcomes, truths, number):
    truth = truth_of(truths, CASES[number])
    for result in outcomes[number]:
        for ours, theirs in zip(result["log_probs"] + result["reference"], truth.log_probs + truth.reference_log_probs, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=0)


@each_case
def test_loss_and_gradient_norm_equal_hf(outcomes, truths, number):
    truth = truth_of(truths, CASES[number])
    metrics = outcomes[number][0]["report"].metrics
    assert metrics["train/loss"] == pytest.approx(truth.loss, rel=1e-5)
    assert metrics["train/grad_norm"] == pytest.approx(truth.grad_norm, rel=1e-5)
    assert metrics["train/entropy"] == pytest.approx(truth.entropy, rel=1e-5)
    assert metrics["train/kl_loss"] == pytest.approx(truth.kl, rel=1e-5)


@each_case
def test_every_rank_reports_the_same(outcomes, number):
    first = outcomes[number][0]
    for other in outcomes[number][1:]:
        assert other["report"] == first["report"]
        assert other["lone"] == first["lone"]
        for mine, theirs in zip(other["log_probs"], first["log_probs"], strict=True):
            np.testing.assert_array_equal(mine, theirs)


@each_case
def test_a_rank_without_samples_takes_part(outcomes, number):
    # At ratio 1 the policy loss of one sample is its advantage, negated, whatever the weights are.
    metrics = outcomes[number][0]["lone"].metrics
    assert metrics["train/pg_loss"] == pytest.approx(-make_samples()[0].advantage, rel=1e-5)
    assert metrics["train/grad_norm"] > 0


@each_case
def test_engine_difference_is_taken_before_the_step(outcomes, truths, number):
    samples, truth = make_samples(), truth_of(truths, CASES[number])
    differences = np.concatenate([np.abs(lp - s.engine_logprobs)[s.loss_mask.astype(bool)] for lp, s in zip(truth.log_probs, samples, strict=True)])
    metrics = outcomes[number][0]["report"].metrics
    assert metrics["train/logprob_abs_diff"] == pytest.approx(differences.mean(), rel=1e-5)
    assert metrics["train/logprob_abs_diff_max"] == pytest.approx(differences.max(), rel=1e-5)


@each_case
def test_weights_come_out_as_they_went_in(outcomes, folders, number):
    case = CASES[number]
    expected = {name: p.detach().numpy() for name, p in load_model(folders[case.model]).named_parameters()}
    # Each pipeline stage exports its own part; data and tensor parallel ranks export the same whole tensors.
    exported: dict = {}
    for result in outcomes[number]:
        for name, tensor in result["exported"].items():
            np.testing.assert_array_equal(tensor, expected[name], err_msg=name)
            exported[name] = tensor
    assert set(exported) == set(expected)


def test_a_step_moves_every_layout_to_the_same_weights(outcomes):
    """The step's effect, seen through log-probs. Adam divides by its second moment, which blows rounding up to about 1e-3 of a step."""
    for model in {case.model for case in CASES}:
        numbers = [n for n, case in enumerate(CASES) if case.model == model and not case.loss]
        first = outcomes[numbers[0]][0]
        moved = max(np.abs(a - b).max() for a, b in zip(first["after"], first["log_probs"], strict=True))
        assert moved > 0.1
        for number in numbers[1:]:
            for ours, theirs in zip(outcomes[number][0]["after"], first["after"], strict=True):
                np.testing.assert_allclose(ours, theirs, atol=2e-2 * moved, rtol=0, err_msg=label(number))
