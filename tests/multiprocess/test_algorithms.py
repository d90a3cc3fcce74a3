"""Every estimator, loss, mask and mean in a real trainer: loss and gradient norm are those of loops over tokens on top
of HF and autograd.
"""
# Covers slime_like.megatron_backend.step.advantages and slime_like.megatron_backend.step.objective too, which it does
# not import itself.

import dataclasses
import math

import numpy as np
import pytest
import torch

from slime_like.records import REFERENCE, TEACHER
from tests.helpers.hf_truth import load_model, score
from tests.helpers.loss_loops import Truth, expected_of
from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.train_world import free_ports, make_config, make_samples, recipe_of, run_ranks

pytestmark = pytest.mark.multiprocess

DYNAMIC = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 40, "balance_data": True}
LAYOUTS = {
    "one rank": (1, {}, {"micro_batch_size": 4}),
    "dp2": (2, {}, DYNAMIC),
    "tp2": (2, {"tensor_model_parallel_size": 2}, {}),
    "cp2": (2, {"context_parallel_size": 2}, DYNAMIC),
    "pp2": (2, {"pipeline_model_parallel_size": 2}, DYNAMIC),
}
HERE = "tests.multiprocess.test_algorithms"
ENGINE = {"use_rollout_logprobs": True, "eps_clip": 0.2, "eps_clip_high": 0.4}
REJECTION = {"tis_reject_level": "geometric", "tis_reject_low": 0.8, "tis_reject_high": 1.25}
CASES = {
    "reinforce++": {
        "advantage_estimator": "reinforce_plus_plus",
        "gamma": 0.9,
        "kl_coef": 0.1,
        "normalize_advantages": True,
    },
    "reinforce++ baseline": {
        "advantage_estimator": "reinforce_plus_plus_baseline",
        "kl_coef": 0.1,
        "normalize_advantages": True,
    },
    "grpo, whitened": {"normalize_advantages": True},
    "distillation": {"use_opd": True, "opd_kl_coef": 0.5},
    "distillation, whitened": {
        "use_opd": True,
        "opd_kl_coef": 2.0,
        "normalize_advantages": True,
        "advantage_estimator": "cispo",
    },
    "plain policy gradient": {"policy_loss": "reinforce"},
    "ratio to the engine": ENGINE | {"get_mismatch_metrics": True, "tis_clip_low": 0.5},
    "ratio to the engine, gspo": ENGINE | {"advantage_estimator": "gspo"},
    "clip-cov": ENGINE | {"policy_loss": "clip_cov", "clip_cov_ratio": 1.0, "clip_cov_lb": 0.1, "clip_cov_ub": 0.5},
    "sequence masking": {"use_opsm": True, "opsm_delta": 0.1},
    "sequence masking, gspo, token advantages": ENGINE
    | {"policy_loss": "gspo", "use_opsm": True, "opsm_delta": 0.1, "use_opd": True, "opd_kl_coef": 0.5},
    "tis, sequence": {"use_tis": True, "tis_level": "sequence", "tis_clip": 1.5, "tis_clip_low": 0.5},
    "tis, geometric mask": {
        "use_tis": True,
        "tis_level": "geometric",
        "tis_mode": "mask",
        "tis_clip": 1.5,
        "tis_clip_low": 0.7,
    },
    "icepop": {"use_tis": True, "tis_mode": "mask", "tis_clip": 2.0, "tis_clip_low": 0.5} | REJECTION,
    "unbiased kl": ENGINE | {"use_kl_loss": True, "kl_loss_type": "k3", "kl_loss_coef": 0.1, "use_unbiased_kl": True},
    "constant, sapo": {
        "loss_reduction": "constant",
        "loss_divisor": 16,
        "policy_loss": "sapo",
        "use_rollout_logprobs": True,
    },
    "rollout, gmpo": ENGINE | {"loss_reduction": "rollout", "policy_loss": "gmpo", "entropy_coef": 0.01},
    "token, kl-cov": {
        "loss_reduction": "token",
        "policy_loss": "kl_cov",
        "kl_cov_ratio": 0.2,
        "use_rollout_logprobs": True,
    },
    "own correction": {"use_tis": True, "custom_tis_function_path": f"{HERE}.halved_where_the_engine_is_surer"},
    "own policy loss and mean": {
        "custom_policy_loss_function_path": f"{HERE}.squashed",
        "use_tis": True,
        "use_opsm": True,
        "opsm_delta": 0.1,
        "entropy_coef": 0.01,
        "use_kl_loss": True,
        "kl_loss_type": "k3",
        "kl_loss_coef": 0.1,
        "tis_clip": 1.5,
        "tis_clip_low": 0.5,
        "custom_pg_loss_reducer_function_path": f"{HERE}.sum_over_tokens",
    },
    "own loss": {"loss_type": "custom_loss", "custom_loss_function_path": f"{HERE}.squared", "use_kl_loss": True},
}


def sum_over_tokens(args, samples):
    """A user's mean: the sum over a sample's tokens / (samples x the longest response allowed)."""
    return [1 / (len(samples) * args.rollout_max_response_len)] * len(samples)


def halved_where_the_engine_is_surer(args, pg_loss, train_log_probs, rollout_log_probs, sample_of_token):
    halved = (rollout_log_probs > train_log_probs).to(pg_loss.dtype)
    return pg_loss * (1 - 0.5 * halved), {"halved": halved}


def squashed(args, batch):
    """A user's loss of a token; means, KL, entropy and corrections stay the flags'."""
    return -batch.advantages * torch.tanh(batch.log_probs), {"tanh": torch.tanh(batch.log_probs.detach())}


def squared(args, batch, reduce):
    """A user's loss: the advantage-weighted square of the log-prob, and the distance to the reference."""
    loss = reduce(batch.advantages * batch.log_probs**2) + args.eps_clip * reduce(
        batch.log_probs - batch.reference_log_probs
    )
    return loss, {"square": reduce(batch.log_probs.detach() ** 2)}


def rollout():
    """Samples with rewards; two are parts of one response, one has nothing to train on."""
    rng = np.random.default_rng(3)
    samples = [dataclasses.replace(sample, reward=float(rng.normal())) for sample in make_samples(8)]
    samples[3] = dataclasses.replace(samples[3], sample_index=samples[2].sample_index)
    samples[-1] = dataclasses.replace(samples[-1], loss_mask=np.zeros_like(samples[-1].loss_mask))
    return samples


def worker_of(place, port, ranks, folders, **options):
    from slime_like.megatron_backend.worker import TrainWorker

    options["checkpoint"] = {"ref_load": folders["reference"], "load": folders["actor"]} | options.get("checkpoint", {})
    worker = TrainWorker(
        make_config(folders["actor"], num_ranks=ranks, **options),
        **(place | {"world_size": ranks, "master_port": port}),
    )
    worker.start()
    return worker


def with_loss(worker, loss):
    """The same trainer with another loss; a learning rate of 0 keeps its weights."""
    from slime_like.megatron_backend.step.batch import StepCutter
    from slime_like.megatron_backend.step.forward import device_of
    from slime_like.megatron_backend.step.runner import StepRunner

    config = worker.config = dataclasses.replace(worker.config, loss=loss)
    worker.prepare = StepCutter(config, device=device_of(worker.stage), num_chunks=len(worker.model))
    worker.runner = StepRunner(config, worker.model)


def in_world(place, folders, ports, saves):
    """(layout, case) -> metrics, and what moves: everything on at most two ranks."""
    from slime_like.config.loss import LossConfig

    results, ports = {}, list(ports)
    samples = rollout()
    everything = {"use_opd": True, "opd_teacher_load": folders["teacher"], "use_kl_loss": True}
    for layout, (ranks, parallel, batch) in LAYOUTS.items():
        port = ports.pop(0)
        if place["rank"] >= ranks:
            continue
        options = {"optimizer": {"lr": 0.0, "clip_grad": 0.0}, "loss": everything, "parallel": parallel, "batch": batch}
        worker = worker_of(place, port, ranks, folders, **options)
        for name, loss in CASES.items():
            with_loss(
                worker, LossConfig(**({"opd_teacher_load": folders["teacher"]} if loss.get("use_opd") else {}), **loss)
            )
            results[layout, name] = recipe_of(worker).train(0, samples).metrics
        results[layout, "kl"] = recipe_of(worker).kl_to_reference(samples)
        results[layout, "teacher"] = recipe_of(worker).log_probs(samples, weights=TEACHER)
        worker.close()
    port, again = ports.pop(0), ports.pop(0)
    moving = {
        "loss": {"use_kl_loss": True, "kl_loss_coef": 0.1, "ref_update_interval": 2},
        "parallel": {"tensor_model_parallel_size": 2},
    }
    worker = worker_of(place, port, 2, folders, checkpoint={"save": saves, "load": saves}, **moving)
    results["moving"] = []
    for step in range(3):
        recipe_of(worker).train(step, samples)
        results["moving"].append(
            (recipe_of(worker).log_probs(samples, weights=REFERENCE), recipe_of(worker).log_probs(samples))
        )
        if step == 1:
            recipe_of(worker).save(2, {})
    worker.close()
    worker = worker_of(place, again, 2, folders, checkpoint={"load": saves}, **moving)
    results["resumed"] = (recipe_of(worker).log_probs(samples, weights=REFERENCE), recipe_of(worker).log_probs(samples))
    worker.close()
    if place["rank"] == 0:
        for reset in (False, True):
            results["moved", reset] = second_step(place, ports.pop(0), folders, samples, reset)
        results["taken"] = taken_weights(place, ports, folders, samples, saves)
    return results


def second_step(place, port, folders, samples, reset):
    """How far the second rollout's step moves each weight that has a gradient, in units of the learning rate."""
    worker = worker_of(place, port, 1, folders, optimizer={"lr": 1e-3}, loss={"reset_optimizer_states": reset})
    recipe_of(worker).train(0, samples)
    stages = worker.stage if isinstance(worker.stage, (list, tuple)) else [worker.stage]
    before = [p.detach().clone() for stage in stages for p in stage.parameters()]
    recipe_of(worker).train(1, make_samples(8, seed=5))
    after = [p.detach() for stage in stages for p in stage.parameters()]
    moved = torch.cat([((a - b) / 1e-3).abs().flatten() for a, b in zip(after, before, strict=True)])
    worker.close()
    return moved[moved > 0].numpy()


def taken_weights(place, ports, folders, samples, saves):
    """Log-probs of a policy that moved, and of a reference in processes of its own before and after it took the
    policy's weights.
    """
    from slime_like.megatron_backend.worker import TrainWorker

    worker = worker_of(place, ports.pop(0), 1, folders)
    recipe_of(worker).train(0, samples)
    moved = recipe_of(worker).log_probs(samples)
    recipe_of(worker).save_hf(f"{saves}/reference")
    worker.close()
    config = dataclasses.replace(
        worker.config, role="ref", checkpoint=dataclasses.replace(worker.config.checkpoint, load=None)
    )
    reference = TrainWorker(config, **(place | {"world_size": 1, "master_port": ports.pop(0)}))
    reference.start()
    first = recipe_of(reference).log_probs(samples)
    recipe_of(reference).take_weights(f"{saves}/reference")
    taken = recipe_of(reference).log_probs(samples)
    reference.close()
    return first, taken, moved


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {
        name: make_tiny_model(str(root / name), "qwen2", tied=True, seed=seed)
        for seed, name in enumerate(("actor", "reference", "teacher"))
    }


@pytest.fixture(scope="module")
def outcomes(folders, tmp_path_factory):
    return run_ranks(
        in_world, 2, folders, free_ports(len(LAYOUTS) + 6), str(tmp_path_factory.mktemp("saves")), timeout_s=240
    )


@pytest.fixture(scope="module")
def truth(folders):
    samples = rollout()
    model = load_model(folders["actor"])
    scored = [score(model, s.tokens, 1.0) for s in samples]
    with torch.no_grad():
        others = [
            [[0.0, *score(load_model(folders[name]), s.tokens, 1.0)[0].tolist()] for s in samples]
            for name in ("reference", "teacher")
        ]
    pad = torch.zeros(1)
    return Truth(
        model, samples, [torch.cat([pad, lp]) for lp, _ in scored], [torch.cat([pad, e]) for _, e in scored], *others
    )


@pytest.fixture(scope="module")
def expected(truth):
    """case -> metrics, loss and gradient norm."""
    truths = {}
    for name, options in CASES.items():
        metrics, loss = expected_of(truth, options)
        gradients = torch.autograd.grad(loss, list(truth.model.parameters()), retain_graph=True)
        norm = math.sqrt(sum((gradient.double() ** 2).sum().item() for gradient in gradients))
        truths[name] = metrics | {"train/loss": loss.item(), "train/grad_norm": norm}
    return truths


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_norm_are_those_of_the_loops(outcomes, expected, layout, case):
    ours = outcomes[0][layout, case]
    for name, value in expected[case].items():
        if name in ours:
            assert ours[name] == pytest.approx(value, rel=5e-5, abs=2e-6), name
    for other in outcomes[1 : LAYOUTS[layout][0]]:
        assert other[layout, case] == ours


def test_what_a_case_is_about_is_reported(outcomes):
    about = {
        "sequence masking": "train/opsm_masked_ratio",
        "icepop": "train/tis_clip_ratio",
        "distillation": "train/opd_kl",
        "own correction": "train/halved",
    }
    about |= {
        "clip-cov": "train/picked_ratio",
        "token, kl-cov": "train/picked_ratio",
        "own policy loss and mean": "train/tanh",
    }
    about |= {
        "tis, sequence": "train/tis_clip_ratio",
        "tis, geometric mask": "train/tis",
        "own loss": "train/square",
        "unbiased kl": "train/kl_loss",
    }
    for case, name in about.items():
        assert outcomes[0]["one rank", case][name] != 0, case
    for case in ("sequence masking", "icepop", "tis, sequence", "own correction", "clip-cov", "token, kl-cov"):
        assert 0 < outcomes[0]["one rank", case][about[case]] < 1, case
    assert 0 < outcomes[0]["one rank", "icepop"]["train/tis_rejected_ratio"] < 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_mismatch_metrics_are_means_over_tokens(outcomes, truth, layout):
    ours = outcomes[0][layout, "ratio to the engine"]
    logs = [truth.actor[i][t].item() - float(truth.samples[i].engine_logprobs[t]) for i, t in truth.places()]
    ratios = [math.exp(log) for log in logs]
    expected = {
        "kl": -sum(logs) / len(logs),
        "k3_kl": sum(r - 1 - log for r, log in zip(ratios, logs, strict=True)) / len(logs),
        "ratio": sum(ratios) / len(logs),
        "ratio_max": max(ratios),
        "chi2": sum(r * r - 1 for r in ratios) / len(logs),
        "clip_ratio": sum(not 0.5 <= r <= 2.0 for r in ratios) / len(logs),
    }
    for name, value in expected.items():
        assert ours[f"train/mismatch_{name}"] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    assert "train/mismatch_kl" not in outcomes[0][layout, "icepop"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_kl_to_the_reference_and_the_teacher_are_hfs(outcomes, truth, layout):
    for i, (ours, teacher) in enumerate(zip(outcomes[0][layout, "kl"], outcomes[0][layout, "teacher"], strict=True)):
        theirs = truth.actor[i].detach().numpy() - np.array(truth.reference[i])
        np.testing.assert_allclose(ours, theirs, atol=2e-5, rtol=0)
        np.testing.assert_allclose(teacher, truth.teacher[i], atol=1e-5, rtol=0)


def apart(rows, others):
    return max(np.abs(a - b).max() for a, b in zip(rows, others, strict=True))


def test_the_reference_follows_at_its_interval(outcomes, truth):
    """Interval 2: after rollout 0 it is --ref-load, after 1 the policy, after 2 the policy of then.

    Resuming finds it again.
    """
    first, second, third = outcomes[0]["moving"]
    np.testing.assert_allclose(first[0][0], truth.reference[0], atol=1e-5, rtol=0)
    assert apart(second[0], second[1]) == 0
    assert apart(third[0], second[1]) == 0 and apart(third[0], third[1]) > 0.01
    resumed = outcomes[0]["resumed"]
    assert apart(resumed[0], second[1]) < 1e-6 and apart(resumed[1], second[1]) < 1e-6


def test_a_reference_on_gpus_of_its_own_takes_the_policys_weights(outcomes, truth):
    first, taken, moved = outcomes[0]["taken"]
    np.testing.assert_allclose(first[0], truth.reference[0], atol=1e-5, rtol=0)
    assert apart(taken, moved) < 1e-6 and apart(moved, first) > 0.01


def test_a_reset_optimizer_takes_first_steps_again(outcomes):
    """Without moments Adam moves every weight by the learning rate; with those of another rollout it does not."""
    fresh, kept = outcomes[0]["moved", True], outcomes[0]["moved", False]
    assert np.median(np.abs(fresh - 1)) < 1e-3
    assert np.median(np.abs(kept - 1)) > 0.05
