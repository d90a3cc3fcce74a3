"""A client's own training loop in the trainer's verbs, without the recipe: gradients are autograd's of HF in float64,
steps are Adam's.

What verbs give: slime_like.megatron_backend.verbs.
"""

import dataclasses

import numpy as np
import pytest
import torch

from slime_like.records import BASE, REFERENCE
from tests.helpers.hf_truth import load_model
from tests.helpers.parity import whole_gradients
from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.train_world import free_ports, make_config, make_samples, run_ranks

pytestmark = pytest.mark.multiprocess

DYNAMIC = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 40, "balance_data": True}
LAYOUTS = {
    "one rank": (1, {}, {"micro_batch_size": 2}),
    "dp2, reduced early": (2, {"overlap_grad_reduce": True}, DYNAMIC),
    "tp2": (2, {"tensor_model_parallel_size": 2}, DYNAMIC),
    "pp2": (2, {"pipeline_model_parallel_size": 2}, DYNAMIC),
    "cp2": (2, {"context_parallel_size": 2}, DYNAMIC),
}
THRESHOLDS = {"clip_low_threshold": 0.5, "clip_high_threshold": 1.3}
#: Name of a loss -> its numbers.
LOSSES = {"cross_entropy": {}, "importance_sampling": {}, "ppo": THRESHOLDS, "custom": {"power": 2.0}, "configured": {}}
#: Each calls for another number of the optimizer.
STEPS = [
    {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1},
    {"lr": 3e-3, "betas": (0.5, 0.9), "eps": 1e-3, "weight_decay": 0.0},
]


def power_of_log_probs(batch, numbers):
    """A client's own: the sum of (-log p) ** power, weighed."""
    values = ((-batch.log_probs) ** numbers["power"] * batch.weights).sum()
    return values, {"tokens": batch.weights.new_tensor(float(len(batch.weights)))}


def client_samples():
    """Every token with an advantage and a weight of its own, of both signs; one sample has nothing to train on."""
    rng, samples = np.random.default_rng(11), []
    for sample in make_samples(8):
        trained = sample.loss_mask.astype(np.float32)
        drawn = rng.normal(size=(2, len(trained))).astype(np.float32) * trained
        samples.append(dataclasses.replace(sample, advantages=drawn[0], weights=drawn[1]))
    samples[5] = dataclasses.replace(samples[5], loss_mask=np.zeros_like(samples[5].loss_mask))
    return samples


def spec_of(name):
    from slime_like.megatron_backend.step.loss_spec import LossSpec

    return LossSpec(name=name, config=LOSSES[name], function=power_of_log_probs if name == "custom" else None)


def worker_of(place, port, ranks, folders, **options):
    from slime_like.megatron_backend.worker import TrainWorker

    options["checkpoint"] = {"ref_load": folders["reference"], "load": folders["base"]}
    options["loss"] = {"use_kl_loss": True}  # so that a reference is held
    worker = TrainWorker(
        make_config(folders["base"], num_ranks=ranks, **options), **(place | {"world_size": ranks, "master_port": port})
    )
    worker.start()
    return worker


def in_world(place, folders, ports):
    """(layout, loss) -> metrics, log-probs and gradients of two calls; and Adam's steps, on one rank."""
    results, ports, samples = {}, list(ports), client_samples()
    for layout, (ranks, parallel, batch) in LAYOUTS.items():
        port = ports.pop(0)
        if place["rank"] >= ranks:
            continue
        worker = worker_of(place, port, ranks, folders, parallel=parallel, batch=batch, optimizer={"clip_grad": 0.0})
        for name in LOSSES:
            parts = [worker.forward_backward(part, spec_of(name), weights=BASE) for part in (samples[:3], samples[3:])]
            rows = [row for part in parts for row in part.rows("log_probs")]
            metrics = [part.metrics for part in parts]
            results[layout, name] = {"metrics": metrics, "rows": rows, "gradients": whole_gradients(worker)}
            worker._clear_gradients()
        results[layout, "scores"] = {
            name: worker.forward(samples, weights=BASE).rows(name) for name in ("log_probs", "entropy")
        }
        results[layout, "reference"] = worker.forward(samples, weights=REFERENCE).rows("log_probs")
        worker.close()
    if place["rank"] == 0:
        worker = worker_of(
            place,
            ports.pop(0),
            1,
            folders,
            optimizer={"clip_grad": 0.0, "lr": 2e-2, "weight_decay": 0.5, "adam_beta2": 0.98},
        )
        results["steps"] = list(steps_of(worker, samples))
        results["refused"] = refusals(worker, samples)
        worker.close()
    return results


def exported(worker):
    return {name: tensor.double().numpy().copy() for name, tensor in worker.export(BASE)}


def steps_of(worker, samples):
    """(weights before, gradients, report, weights after) of two steps with numbers of their own, and of one with the
    flags'.
    """
    from slime_like.megatron_backend.step.optimizer import AdamParams

    for params in (*(AdamParams(**numbers) for numbers in STEPS), None):
        worker.forward_backward(samples, spec_of("cross_entropy"), weights=BASE)
        before, gradients = exported(worker), whole_gradients(worker)
        report = worker.optim_step(params, weights=BASE)
        yield before, gradients, report, exported(worker)


def refusals(worker, samples):
    messages = []
    for call in (
        lambda: worker.forward_backward(samples, spec_of("cross_entropy"), weights=REFERENCE),
        lambda: worker.optim_step(None, weights=REFERENCE),
        lambda: worker.forward(samples, weights=dataclasses.replace(BASE, name="nobody")),
    ):
        try:
            call()
        except ValueError as error:
            messages.append(str(error))
    return messages


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {
        name: make_tiny_model(str(root / name), "qwen3", seed=seed) for seed, name in enumerate(("base", "reference"))
    }


@pytest.fixture(scope="module")
def outcomes(folders):
    return run_ranks(in_world, 2, folders, free_ports(len(LAYOUTS) + 1), timeout_s=150)


def scores_of(model, sample):
    """Log-probs and entropy of the tokens after the first, in float64."""
    ids = torch.as_tensor(sample.tokens.astype(np.int64))
    logs = torch.log_softmax(model(ids[None]).logits[0, :-1], -1)
    return logs.gather(-1, ids[1:, None]).squeeze(-1), -(logs.exp() * logs).sum(-1)


def loss_of(name, sample, log_probs, share):
    """One sample's loss: each token's written out."""
    total = log_probs.new_zeros(())
    for t in np.flatnonzero(sample.loss_mask[1:]):
        log_prob, weight, advantage = log_probs[t], float(sample.weights[t + 1]), float(sample.advantages[t + 1])
        ratio = (log_prob - float(sample.engine_logprobs[t + 1])).exp()
        if name == "cross_entropy":
            term = -log_prob
        elif name == "importance_sampling":
            term = -ratio * advantage
        elif name == "ppo":
            term = -min(ratio * advantage, ratio.clamp(0.5, 1.3) * advantage)
        elif name == "custom":
            term = log_prob**2
        else:  # the flags': GRPO at ratio 1, a mean over each call's samples
            term = -(log_prob - log_prob.detach()).exp() * advantage * share
        total = total + weight * term
    return total


@pytest.fixture(scope="module")
def truth(folders):
    """loss -> (its value in each of the two calls, gradients of both together)."""
    expected, samples = {}, client_samples()
    for name in LOSSES:
        model = load_model(folders["base"]).double()
        values = []
        for part in (samples[:3], samples[3:]):
            counts = [max(int(sample.loss_mask[1:].sum()), 1) for sample in part]
            values.append(
                sum(
                    loss_of(name, s, scores_of(model, s)[0], 1 / (count * len(part)))
                    for s, count in zip(part, counts, strict=True)
                )
            )
        sum(values).backward()
        expected[name] = (
            [value.item() for value in values],
            {key: p.grad.numpy() for key, p in model.named_parameters()},
        )
    return expected


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_two_calls_add_up_to_autograds(outcomes, truth, layout, name):
    values, gradients = truth[name]
    largest = max(np.abs(gradient).max() for gradient in gradients.values())
    seen = set()
    for of_rank in outcomes[: LAYOUTS[layout][0]]:
        ours = of_rank[layout, name]
        assert [metrics["train/loss"] for metrics in ours["metrics"]] == pytest.approx(values, rel=1e-5)
        for key, gradient in ours["gradients"].items():
            np.testing.assert_allclose(gradient, gradients[key], atol=1e-5 * largest, rtol=0, err_msg=key)
        seen |= set(ours["gradients"])
    assert seen == set(gradients)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_are_hfs_and_come_with_the_gradients_too(outcomes, folders, layout):
    samples = client_samples()
    with torch.no_grad():
        base, reference = (
            [scores_of(model, s) for s in samples]
            for model in (load_model(folders[name]).double() for name in ("base", "reference"))
        )
    for of_rank in outcomes[: LAYOUTS[layout][0]]:
        scores = of_rank[layout, "scores"]
        for i in range(len(samples)):
            for ours, theirs in (
                (scores["log_probs"], base[i][0]),
                (scores["entropy"], base[i][1]),
                (of_rank[layout, "reference"], reference[i][0]),
            ):
                assert ours[i][0] == 0
                np.testing.assert_allclose(ours[i][1:], theirs.numpy(), atol=2e-5, rtol=0)
            for name in LOSSES:
                np.testing.assert_allclose(of_rank[layout, name]["rows"][i], scores["log_probs"][i], atol=1e-6, rtol=0)


def test_a_step_has_the_numbers_of_its_call(outcomes):
    """AdamW (arXiv:1711.05101, algorithm 2) in float64 over the trainer's own gradients.

    Moments are carried from step to step.
    """
    steps = outcomes[0]["steps"]
    flags = {"lr": 2e-2, "betas": (0.9, 0.98), "eps": 1e-8, "weight_decay": 0.5}
    first, second = ({name: np.zeros_like(tensor) for name, tensor in steps[0][0].items()} for _ in range(2))
    for number, (numbers, (before, gradients, report, after)) in enumerate(
        zip([*STEPS, flags], steps, strict=True), start=1
    ):
        (beta1, beta2), lr = numbers["betas"], numbers["lr"]
        assert report["train/lr"] == pytest.approx(lr)
        assert report["train/grad_norm"] == pytest.approx(
            np.sqrt(sum((gradient.astype(np.float64) ** 2).sum() for gradient in gradients.values())), rel=1e-5
        )
        for name, weight in before.items():
            gradient = gradients[name].astype(np.float64)
            first[name] = beta1 * first[name] + (1 - beta1) * gradient
            second[name] = beta2 * second[name] + (1 - beta2) * gradient**2
            decay = 0.0 if weight.ndim == 1 else numbers["weight_decay"]
            size = np.sqrt(second[name] / (1 - beta2**number)) + numbers["eps"]
            expected = weight * (1 - lr * decay) - lr * first[name] / (1 - beta1**number) / size
            np.testing.assert_allclose(after[name], expected, atol=2e-4 * lr, rtol=0, err_msg=f"step {number}, {name}")


def test_frozen_weights_are_scored_with_and_no_more(outcomes):
    training, stepping, unknown = outcomes[0]["refused"]
    assert "'reference' are not trained here" in training and "'reference' are not trained here" in stepping
    assert "'nobody' are not loaded. Known: base, reference" in unknown
