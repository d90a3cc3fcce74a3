"""Episodes of many turns on the real stack: exact tokens, rows that share an episode, a reward that rises."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from slime_like.rollout.debug_data import load_rollout
from tests.e2e.hf_oracle import largest_difference
from tests.e2e.runs import ROOT, SMALL_RUN, Finished, assert_nothing_left, environment, our_processes, run_train

pytestmark = pytest.mark.e2e


def without_reward(flags: list[str]) -> list[str]:
    """The environment gives it."""
    place = flags.index("--custom-rm-path")
    return [*flags[:place], *flags[place + 2 :]]


def test_every_trained_token_of_several_rows_is_the_engines_and_transformers(tiny_model_dir, tiny_data_dir, tmp_path):
    """Two engines behind the router, two trainer ranks; rows of two and of one answer from each episode."""
    before = our_processes()
    flags = [
        "--hf-checkpoint", tiny_model_dir, "--prompt-data", f"{tiny_data_dir}/train.jsonl",
        "--actor-num-gpus-per-node", "2", "--colocate", "--rollout-num-gpus-per-engine", "1",
        "--env", "tests.e2e.environments:Relay", "--rollout-temperature", "1",
        "--save", tmp_path / "save", "--save-interval", "1", "--save-hf", tmp_path / "hf/{rollout_id}",
        "--save-debug-rollout-data", tmp_path / "samples/{rollout_id}.npz",
    ]  # fmt: skip
    run = run_train(*without_reward(SMALL_RUN), *flags, run_dir=tmp_path / "run", timeout=240)
    assert run.returncode == 0, run.logs()
    train, rollouts = run.metrics("train"), run.metrics("rollout")
    assert [line["step"] for line in train] == [0, 1, 2]
    assert max(line["train/logprob_abs_diff_max"] for line in train) <= 1e-4
    assert sum(line["rollout/episodes/violations"] for line in rollouts) == 0
    assert sum(line["rollout/episodes/num"] for line in rollouts) >= 3 * 16
    # An untrained model seldom ends by itself: whoever has said three things has two rows.
    groups = load_rollout(str(tmp_path / "samples/2.npz"), 0)
    episodes = [segments for group in groups for segments in group.episodes]
    assert len(episodes) == 16
    for segments in episodes:
        report = segments[-1].metadata["episode"]
        assert len(segments) == (2 if report["turns"] == 3 else 1)
        assert len({segment.reward for segment in segments}) == 1
    assert largest_difference(tmp_path / "hf/2", tmp_path / "samples/2.npz") <= 1e-4
    assert_nothing_left(before)


@pytest.mark.long_run
def test_a_tiny_model_learns_to_use_the_calculator(tmp_path):
    """The example as it stands, in 15 rollouts: the warm-up has shown the tool, the reward makes it a habit."""
    before = our_processes()
    for name in ("calculator-model", "calculator-data"):
        shutil.rmtree(ROOT / "runs/tiny" / name, ignore_errors=True)
    command = ["bash", str(ROOT / "scripts/run_example.sh"), "calculator", "--num-rollout", "15"]
    done = subprocess.run(
        [*command, "--run-dir", str(tmp_path / "run")],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
    )
    run = Finished(done.returncode, done.stdout, tmp_path / "run")
    assert run.returncode == 0, run.logs()
    rewards = [line["rollout/reward_mean"] for line in run.metrics("rollout")]
    assert sum(rewards[-3:]) / 3 >= sum(rewards[:3]) / 3 + 0.2, rewards
    turns = [line["rollout/episodes/turns_mean"] for line in run.metrics("rollout")]
    assert turns[-1] > turns[0], "it asks the tool more often"
    assert max(line["train/logprob_abs_diff_max"] for line in run.metrics("train")) <= 1e-4
    assert_nothing_left(before)
