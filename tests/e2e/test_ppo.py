"""PPO on the real stack: policy, critic, reference and reward model share GPUs, the critic learns first, and the run
resumes with both.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from slime_like.rollout.debug_data import load_rollout
from tests.e2e.rewards import even_tokens
from tests.e2e.runs import SMALL_RUN, assert_nothing_left, our_processes, run_train
from tests.helpers.tiny_rewards import hf_scores, make_reward_model

pytestmark = pytest.mark.e2e

PPO = [
    "--advantage-estimator", "ppo", "--critic-lr", "3e-4", "--lambd", "0.95", "--normalize-advantages",
    "--num-critic-only-steps", "1",
    "--kl-coef", "0.01", "--colocate", "--colocate-training", "--actor-num-gpus-per-node", "1",
    "--reward-model-weight", "0.25", "--reward-batch-size", "5",
]  # fmt: skip


def assert_rewards_are_the_two_parts(run, samples: str, reward_model) -> None:
    """Each sample's reward is the rule's + 0.25 x what transformers itself says of the same tokens.

    The metrics are their means.
    """
    for step, line in enumerate(run.metrics("rollout")):
        scored = [sample for group in load_rollout(samples, step) for sample in group.samples]
        rule, model = (
            [even_tokens(None, sample) for sample in scored],
            hf_scores(reward_model, [sample.tokens for sample in scored]),
        )
        np.testing.assert_allclose(
            [sample.reward for sample in scored], np.array(rule) + 0.25 * np.array(model), atol=1e-5
        )
        assert [line["reward/rule"], line["reward/model"]] == pytest.approx([np.mean(rule), np.mean(model)], abs=1e-5)
        assert np.std(model) > 0.1


def test_ppo_with_a_reward_model_trains_both_models_and_resumes(tiny_model_dir, tiny_data_dir, tmp_path):
    before = our_processes()
    reward_model, samples = (
        make_reward_model(tmp_path / "reward", vocab_size=320, max_position_embeddings=1024),
        f"{tmp_path}/samples/{{rollout_id}}.npz",
    )
    flags = [
        *SMALL_RUN, *PPO, "--prompt-data", tiny_data_dir / "train.jsonl", "--hf-checkpoint", tiny_model_dir,
        "--ref-load", tiny_model_dir,
        "--save", tmp_path / "save", "--reward-load", reward_model, "--save-debug-rollout-data", samples,
    ]  # fmt: skip
    run = run_train(*flags, run_dir=tmp_path / "run", timeout=240)
    assert run.returncode == 0, run.logs()
    first, *later = run.metrics("train")
    assert len(later) == 2
    # The first rollout trains the critic alone. That its loss and its step are autograd's is for
    # tests/multiprocess/test_critic.py: over three rollouts of changing samples a falling loss would be luck. What it
    # expects goes from nothing towards the returns, by Adam's steps of about one size.
    assert "train/loss" not in first and first["train/value_loss"] > 0
    expected = [line["train/value_mean"] for line in (first, *later)]
    assert 0 < expected[0] < expected[1] < expected[2]
    for line in (first, *later):
        assert math.isfinite(line["train/value_loss"]) and line["train/critic_grad_norm"] > 0
    for line in later:
        assert line["train/logprob_abs_diff_max"] < 1e-4 and line["train/grad_norm"] > 0
    assert_rewards_are_the_two_parts(run, samples, reward_model)
    assert_nothing_left(before)

    resumed = run_train(
        *flags, "--load", tmp_path / "save", "--num-rollout", "4", run_dir=tmp_path / "resumed", timeout=240
    )
    assert resumed.returncode == 0, resumed.logs()
    (line,) = resumed.metrics("train")
    assert line["step"] == 3 and line["train/logprob_abs_diff_max"] < 1e-4
    # Versions go on, too: the weights that were saved are the fourth, and are sent as that again.
    assert [line["sync/version"] for line in run.metrics("sync")] == [1, 2, 3, 4]
    assert [line["sync/version"] for line in resumed.metrics("sync")] == [4, 5]
    assert (tmp_path / "save/latest_checkpointed_iteration.txt").read_text().strip() == "4"
    # A critic that had forgotten would expect next to nothing again.
    assert line["train/value_mean"] > expected[1]
    assert sorted(path.name for path in (tmp_path / "save/critic").iterdir()) == [
        "iter_0000003",
        "iter_0000004",
        "latest_checkpointed_iteration.txt",
    ]
    assert_nothing_left(before)
