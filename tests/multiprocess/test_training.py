"""What a train step means: independent of how it is cut up, right about old log-probs, and kind to
the actor's weights.
"""

import dataclasses

import numpy as np
import pytest
import torch

from slime_like.errors import DataError
from slime_like.records import BASE, REFERENCE
from tests.helpers.hf_truth import load_model, score
from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.train_world import (
    add_gradients,
    advantage_of,
    free_ports,
    make_config,
    make_samples,
    optimizer_step,
    recipe_of,
    run_ranks,
)

pytestmark = pytest.mark.multiprocess

PPO = {"eps_clip": 0.1, "eps_clip_high": 0.15, "eps_clip_c": 1.5}


def in_world(place, folder, reference, ports):
    """Everything that needs live trainers, on one rank."""
    from slime_like.megatron_backend.worker import TrainWorker

    results, ports = {}, list(ports)
    samples = make_samples(8)

    def worker_of(**options):
        worker = TrainWorker(make_config(folder, **options), **(place | {"master_port": ports.pop(0)}))
        worker.start()
        return worker

    cuts = {
        "one": {},
        "four": {"micro_batch_size": 4},
        "packed": {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 30},
        "chunked": {"log_probs_chunk_size": 7},
    }
    for name, batch in cuts.items():
        worker = worker_of(batch=batch)
        results[name] = recipe_of(worker).train(0, samples).metrics
        worker.close()

    # The same primitives by hand: two calls add up to the gradient of the sum of both losses.
    worker = worker_of(optimizer={"clip_grad": 0.0})
    add_gradients(worker, samples[:4])
    add_gradients(worker, samples[4:])
    results["halves"] = optimizer_step(worker)
    worker.close()

    worker = worker_of(num_steps=2, loss=PPO)
    results["ppo"] = recipe_of(worker).train(0, samples).metrics
    worker.close()

    for estimator in ("gspo", "cispo"):
        for name, batch in cuts.items():
            worker = worker_of(
                num_steps=2, batch=batch, loss={"advantage_estimator": estimator, "use_tis": True, "tis_clip": 1.1}
            )
            results[estimator, name] = recipe_of(worker).train(0, samples).metrics
            worker.close()

    worker = worker_of(optimizer={"clip_grad": 0.0}, loss={"use_tis": True, "tis_clip": 1.1, "tis_clip_low": 0.9})
    results["tis"] = recipe_of(worker).train(0, samples).metrics
    worker.close()

    untrained = [dataclasses.replace(sample, loss_mask=np.zeros_like(sample.loss_mask)) for sample in samples]
    worker = worker_of(optimizer={"clip_grad": 0.0})
    results["two untrained"] = recipe_of(worker).train(0, [*untrained[:2], *samples[2:]]).metrics
    worker.close()
    for name, options in (
        ("grpo", PPO),
        ("reinforce_plus_plus", {"advantage_estimator": "reinforce_plus_plus", "normalize_advantages": True}),
    ):
        worker = worker_of(num_steps=2, loss=options)
        results["untrained", name] = recipe_of(worker).train(0, untrained).metrics
        worker.close()

    worker = worker_of(
        loss={"use_kl_loss": True, "kl_loss_coef": 0.1}, checkpoint={"ref_load": reference, "load": folder}
    )
    before = {name: p.detach().clone() for name, p in worker.stage.named_parameters()}
    results["reference"] = recipe_of(worker).log_probs(samples, weights=REFERENCE)
    results["unchanged"] = all(torch.equal(p, before[name]) for name, p in worker.stage.named_parameters())
    worker.close()

    worker = worker_of(loss={"loss_type": "sft_loss"}, rollout={"rollout_temperature": 0.5})
    results["sft"] = [recipe_of(worker).train(step, samples).metrics for step in range(6)]
    worker.close()

    bf16 = worker_of(optimizer={"bf16": True, "lr": 1e-2})
    results["bf16"] = [recipe_of(bf16).train(step, samples).metrics for step in range(2)]
    results["bf16 dtypes"] = sorted({str(t.dtype) for _, t in bf16.export(BASE)})
    try:
        recipe_of(bf16).train(
            2, [dataclasses.replace(samples[0], tokens=samples[0].tokens[:1], loss_mask=samples[0].loss_mask[:1])]
        )
    except DataError as error:
        results["short"] = str(error)
    bf16.close()
    return results


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return make_tiny_model(str(root / "actor"), "qwen3"), make_tiny_model(str(root / "reference"), "qwen3", seed=1)


@pytest.fixture(scope="module")
def world(folders):
    return run_ranks(in_world, 1, *folders, free_ports(24), timeout_s=100)[0]


@pytest.mark.parametrize("cut", ["four", "packed", "chunked"])
def test_how_micro_batches_are_cut_changes_nothing(world, cut):
    for name, value in world["one"].items():
        assert world[cut][name] == pytest.approx(value, rel=1e-5, abs=1e-7), name


@pytest.mark.parametrize("estimator", ["gspo", "cispo"])
@pytest.mark.parametrize("cut", ["four", "packed"])
def test_sequence_ratios_do_not_depend_on_the_cut_either(world, estimator, cut):
    for name, value in world[estimator, "one"].items():
        assert world[estimator, cut][name] == pytest.approx(value, rel=2e-5, abs=1e-6), name
    assert world[estimator, "one"]["train/ratio_mean"] != 1


def test_engine_correction_weighs_the_gradient_as_hf_says(world, folders):
    model, samples = load_model(folders[0]), make_samples(8)
    factors = []
    for sample in samples:
        log_probs, _ = score(model, sample.tokens, 1.0)
        mask = torch.as_tensor(sample.loss_mask[1:].astype(bool))
        weight = (log_probs.detach()[mask] - torch.as_tensor(sample.engine_logprobs[1:])[mask]).exp().clamp(0.9, 1.1)
        (-(weight * log_probs[mask]).mean() * advantage_of(sample) / 8).backward()
        factors.append(weight.mean().item())
    norm = torch.sqrt(sum((p.grad.double() ** 2).sum() for p in model.parameters())).item()
    assert world["tis"]["train/grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert world["tis"]["train/tis"] == pytest.approx(np.mean(factors), rel=1e-5)
    assert 0 < world["tis"]["train/tis_clip_ratio"] <= 1


def test_a_sample_with_an_empty_mask_pulls_nowhere_and_counts_among_the_samples(world, folders):
    model, samples = load_model(folders[0]), make_samples(8)
    for sample in samples[2:]:
        log_probs, _ = score(model, sample.tokens, 1.0)
        (-log_probs[torch.as_tensor(sample.loss_mask[1:].astype(bool))].mean() * advantage_of(sample) / 8).backward()
    norm = torch.sqrt(sum((p.grad.double() ** 2).sum() for p in model.parameters())).item()
    assert world["two untrained"]["train/grad_norm"] == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("estimator", ["grpo", "reinforce_plus_plus"])
def test_a_rollout_without_any_trained_token_ends_no_run(world, estimator):
    metrics = world["untrained", estimator]
    assert metrics["train/grad_norm"] == metrics["train/loss"] == 0 and all(map(np.isfinite, metrics.values()))


def test_two_calls_add_their_gradients(world, folders):
    model, samples = load_model(folders[0]), make_samples(8)
    for sample in samples:
        log_probs, _ = score(model, sample.tokens, 1.0)
        mask = torch.as_tensor(sample.loss_mask[1:].astype(bool))
        # Each call takes the mean over its own four samples; the gradient of the ratio at 1 is that of the log-prob.
        (-log_probs[mask].mean() * advantage_of(sample) / 4).backward()
    norm = torch.sqrt(sum((p.grad.double() ** 2).sum() for p in model.parameters())).item()
    assert world["halves"]["train/grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_later_steps_are_clipped_against_the_weights_before_the_first(world, folders):
    model, samples = load_model(folders[0]), make_samples(8)
    differences = []
    with torch.no_grad():
        for sample in samples:
            rows = score(model, sample.tokens, 1.0)[0].numpy()
            differences.append(np.abs(rows - sample.engine_logprobs[1:])[sample.loss_mask[1:].astype(bool)])
    metrics = world["ppo"]
    # The difference from the engine belongs to the weights that generated, although two steps were taken since.
    assert metrics["train/logprob_abs_diff"] == pytest.approx(np.concatenate(differences).mean(), rel=1e-5)
    # The first of the two steps has ratio 1 throughout; the second sees what the first changed.
    assert metrics["train/clip_ratio"] > 0
    assert metrics["train/ratio_mean"] != pytest.approx(1.0, abs=1e-4)
    assert world["one"]["train/ratio_mean"] == pytest.approx(1.0, abs=1e-6)


def test_reference_is_scored_and_the_actor_comes_back_bit_for_bit(world, folders):
    model = load_model(folders[1])
    for sample, ours in zip(make_samples(8), world["reference"], strict=True):
        np.testing.assert_allclose(ours[1:], score(model, sample.tokens, 1.0)[0].detach().numpy(), atol=1e-5, rtol=0)
    assert world["unchanged"]


def test_supervised_loss_is_hfs_and_falls(world, folders):
    model, samples = load_model(folders[0]), make_samples(8)
    with torch.no_grad():
        rows = [score(model, s.tokens, 1.0)[0][torch.as_tensor(s.loss_mask[1:].astype(bool))] for s in samples]
    losses = [m["train/loss"] for m in world["sft"]]
    assert losses[0] == pytest.approx(float(np.mean([-row.mean().item() for row in rows])), rel=1e-5)
    assert losses[-1] < 0.8 * losses[0]
    assert "train/logprob_abs_diff" not in world["sft"][0]


def test_bf16_trains_close_to_fp32(world):
    assert world["bf16 dtypes"] == ["torch.bfloat16"]
    assert world["bf16"][0]["train/entropy"] == pytest.approx(world["one"]["train/entropy"], rel=0.01)
    assert world["bf16"][0]["train/grad_norm"] == pytest.approx(world["one"]["train/grad_norm"], rel=0.05)
    # The policy loss at ratio 1 is the same under any weights; the entropy tells whether they moved.
    assert abs(world["bf16"][1]["train/entropy"] - world["bf16"][0]["train/entropy"]) > 0.01


def test_sample_without_a_prediction_is_refused_by_name(world):
    assert "0/0" in world["short"]


def test_missing_tensor_is_named(tmp_path):
    from safetensors.torch import load_file, save_file

    folder = make_tiny_model(str(tmp_path / "model"), "llama", num_layers=1)
    tensors = load_file(f"{folder}/model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, f"{folder}/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RuntimeError, match=r"CheckpointError.*model\.layers\.0\.mlp\.up_proj\.weight"):
        run_ranks(start_only, 1, folder)


def start_only(place, folder):
    from slime_like.megatron_backend.worker import TrainWorker

    TrainWorker(make_config(folder), **place).start()
