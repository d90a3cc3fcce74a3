"""One training that changes its layout at every resume: DP 4 -> DP 2 -> TP 2 -> one rank with padded samples. Its
losses are those of one rank that was never stopped.
"""

from __future__ import annotations

import os

import pytest

from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.train_world import make_config, make_samples, recipe_of, run_ranks

pytestmark = [pytest.mark.multiprocess, pytest.mark.long_run]

PACKED = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 64}
PADDED = {"qkv_format": "bshd", "micro_batch_size": 4}
TENSOR = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
#: Ranks, parallel sizes and batches of each rollout.
LAYOUTS = [(4, {}, PACKED), (2, {}, PACKED), (2, TENSOR, PACKED), (1, {}, PADDED)]
ROLLOUTS = [make_samples(8, seed=seed) for seed in range(len(LAYOUTS))]


def trained(place, folder, saves, rollouts, layout, load):
    """Metrics of these rollouts, in a layout; a checkpoint follows the last."""
    from slime_like.megatron_backend.worker import TrainWorker

    num_ranks, parallel, batch = layout
    config = make_config(
        folder,
        num_ranks=num_ranks,
        num_steps=2,
        parallel=parallel,
        batch=batch,
        optimizer={"lr": 5e-3, "lr_decay_style": "linear"},
        checkpoint={"save": saves} | ({"load": saves} if load else {}),
    )
    worker = TrainWorker(config, **place)
    assert worker.start()["num_rollouts_done"] == (rollouts[0] if load else 0)
    metrics = [recipe_of(worker).train(step, ROLLOUTS[step]).metrics for step in rollouts]
    recipe_of(worker).save(rollouts[-1] + 1, {})
    worker.close()
    return metrics


def test_losses_go_on_as_if_the_layout_had_never_changed(tmp_path):
    folder = make_tiny_model(os.path.join(tmp_path, "model"), "qwen3", tied=True, num_layers=2)
    (straight,) = run_ranks(
        trained, 1, folder, str(tmp_path / "straight"), range(len(LAYOUTS)), (1, {}, PACKED), False, timeout_s=240
    )
    furthest = 0.0
    for step, layout in enumerate(LAYOUTS):
        ((metrics,), *others) = run_ranks(
            trained, layout[0], folder, str(tmp_path / "saves"), [step], layout, step > 0, timeout_s=240
        )
        assert all(other == [metrics] for other in others)
        for name in ("train/loss", "train/entropy", "train/kl", "train/logprob_abs_diff", "train/lr"):
            assert metrics[name] == pytest.approx(straight[step][name], rel=0, abs=1e-5), (step, name)
            furthest = max(furthest, abs(metrics[name] - straight[step][name]))
        assert metrics["train/grad_norm"] == pytest.approx(straight[step]["train/grad_norm"], rel=1e-4)
    assert len({metrics["train/loss"] for metrics in straight}) == len(LAYOUTS)
    print(f"furthest: {furthest:.1e}")
