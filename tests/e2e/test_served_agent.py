"""A run that is trained by what a foreign agent plays: openai's client, real engine, real trainer."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from slime_like.config.loss import LossConfig
from slime_like.records import SampleGroup
from slime_like.rollout.debug_data import load_rollout
from slime_like.rollout.train_samples import to_train_samples
from tests.e2e.foreign_venvs import with_qwen3_tokens
from tests.e2e.hf_oracle import largest_difference
from tests.e2e.runs import ROOT, SMALL_RUN, assert_nothing_left, environment, our_processes, run_train

pytestmark = pytest.mark.e2e


def without_reward(flags: list[str]) -> list[str]:
    """The agent gives it."""
    place = flags.index("--custom-rm-path")
    return [*flags[:place], *flags[place + 2 :]]


def test_an_openai_client_plays_and_its_answers_are_trained_on(tiny_model_dir, tiny_data_dir, tmp_path):
    before = our_processes()
    run = run_train(
        *without_reward(SMALL_RUN),
        "--hf-checkpoint", str(tiny_model_dir), "--prompt-data", f"{tiny_data_dir}/train.jsonl",
        "--actor-num-gpus-per-node", "1", "--colocate",
        "--serve-rollout", "--agent-path", "tests.e2e.served_agents.even_answers", "--agent-timeout-s", "120",
        "--save-debug-rollout-data", str(tmp_path / "rollout_{rollout_id}"),
        run_dir=tmp_path / "run",
    )  # fmt: skip
    assert run.returncode == 0, run.output[-3000:]
    for metrics in run.metrics("rollout"):
        assert metrics["rollout/episodes/num"] == 16 and metrics["rollout/episodes/turns_mean"] == 2
        assert metrics["rollout/episodes/violations"] == 0 and 0 < metrics["rollout/reward_mean"] < 1
    diffs = [metrics["train/logprob_abs_diff"] for metrics in run.metrics("train")]
    print("log-probs, trainer against engine:", diffs)
    assert len(diffs) == 3 and max(diffs) < 1e-4
    assert [metrics["sync/version"] for metrics in run.metrics("sync")][
        -1
    ] == 4  # the first goes before the first rollout
    for step in range(3):
        for group in load_rollout(str(tmp_path / "rollout_{rollout_id}"), step):
            for rows in group.episodes:
                trained = [token for row in rows for token in row.tokens[row.loss_mask.astype(bool)].tolist()]
                assert trained == rows[0].metadata["episode"]["tokens"], "each token that the agent was sent, once"
    assert_nothing_left(before)


@pytest.mark.long_run
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("requirement", "agent"),
    [
        ("verifiers==0.4.*", "verifiers_agent"),  # renders by itself: /inference/v1/generate
        ("verifiers==0.2.*", "classic_verifiers_agent"),  # chat
    ],
)
def test_verifiers_plays_in_its_own_environment_and_is_trained_on(
    requirement, agent, python_with, tiny_model_dir, tiny_data_dir, tmp_path
):
    python, model = python_with(requirement), tmp_path / "model"
    shutil.copytree(tiny_model_dir, model)
    with_qwen3_tokens(model)
    before = our_processes()
    run = run_train(
        *without_reward(SMALL_RUN), "--hf-checkpoint", model, "--prompt-data", f"{tiny_data_dir}/train.jsonl",
        "--actor-num-gpus-per-node", "1", "--colocate", "--rollout-temperature", "1",
        "--serve-rollout", "--agent-path", f"tests.e2e.foreign_agents.{agent}.play", "--agent-python", python,
        "--agent-timeout-s", "120", "--disable-grpo-std-normalization",
        "--save", tmp_path / "save", "--save-interval", "1", "--save-hf", tmp_path / "hf/{rollout_id}",
        "--save-debug-rollout-data", tmp_path / "samples/{rollout_id}.npz",
        run_dir=tmp_path / "run", timeout=400,
        env=environment(POLICY_TOKENIZER=str(model), PYTHONPATH=str(ROOT / "scripts/examples")),
    )  # fmt: skip
    assert run.returncode == 0, run.logs()
    for metrics in run.metrics("rollout"):
        assert metrics["rollout/episodes/num"] == 16 and metrics["rollout/episodes/violations"] == 0
        assert metrics["rollout/episodes/turns_mean"] == 2 and 0 < metrics["rollout/reward_mean"] < 1
    diffs = [metrics["train/logprob_abs_diff_max"] for metrics in run.metrics("train")]
    assert len(diffs) == 3 and max(diffs) <= 1e-4
    for step in range(3):
        groups = load_rollout(str(tmp_path / "samples/{rollout_id}.npz"), step)
        assert [len(group.episodes) for group in groups] == [4] * 4
        for group in groups:
            assert_rows_are_verifiers_own(group)
        assert_compared_within_groups(groups)
    assert len({reward for group in groups for reward in group.rewards.tolist()}) > 4, "the rubric tells them apart"
    oracle = largest_difference(tmp_path / "hf/2", tmp_path / "samples/2.npz")
    print(
        f"{requirement}: log-probs, trainer against engine {max(diffs):.2g}, transformers against engine {oracle:.2g}"
    )
    assert oracle <= 1e-4
    assert_nothing_left(before)


def assert_rows_are_verifiers_own(group: SampleGroup) -> None:
    """Every answer that verifiers got is trained on once, after the same tokens, with its log-probs; and the reward is
    the rubric's.
    """
    for rows in group.episodes:
        report = rows[0].metadata["episode"]
        assert {row.reward for row in rows} == {len(set(report["said"])) / 40}, "what the rubric pays"
        ours = [answer for row in rows for answer in answers(row.tokens, row.loss_mask, row.engine_logprobs)]
        theirs = [one for row in report["rows"] for one in answers(row["ids"], row["mask"], row["logprobs"])]
        assert sorted(one[:2] for one in ours) == sorted(one[:2] for one in theirs) and len(ours) == 2
        for mine, other in zip(sorted(ours), sorted(theirs), strict=True):
            np.testing.assert_allclose(mine[2], other[2], atol=1e-6)


def answers(ids, mask, logprobs) -> list[tuple[list[int], list[int], list[float]]]:
    """(tokens before, tokens, log-probs) of every run of trained tokens in a row."""
    mask = [0, *map(int, mask), 0]
    starts = [place for place in range(len(ids)) if mask[place + 1] > mask[place]]
    ends = [place for place in range(1, len(ids) + 1) if mask[place + 1] < mask[place]]
    ids, logprobs = list(map(int, ids)), list(map(float, logprobs))
    return [(ids[:start], ids[start:end], logprobs[start:end]) for start, end in zip(starts, ends, strict=True)]


def assert_compared_within_groups(groups: tuple[SampleGroup, ...]) -> None:
    """An advantage is the reward above the mean of its prompt's four episodes, counted by hand."""
    rows = iter(to_train_samples(groups, LossConfig(disable_grpo_std_normalization=True), group_size=4))
    for group in groups:
        rewards = [episode[0].reward for episode in group.episodes]
        for episode, reward in zip(group.episodes, rewards, strict=True):
            for _ in episode:
                row = next(rows)
                np.testing.assert_allclose(
                    row.advantages[row.loss_mask.astype(bool)], reward - sum(rewards) / len(rewards), atol=1e-6
                )
