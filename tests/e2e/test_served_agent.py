"""A run that is trained by what a foreign agent plays: openai's client, real engine, real trainer."""

from __future__ import annotations

import pytest

from slime_like.rollout.debug_data import load_rollout
from tests.e2e.runs import SMALL_RUN, assert_nothing_left, our_processes, run_train

pytestmark = pytest.mark.e2e


def test_an_openai_client_plays_and_its_answers_are_trained_on(tiny_model_dir, tiny_data_dir, tmp_path):
    flags = list(SMALL_RUN)
    place = flags.index("--custom-rm-path")
    del flags[place : place + 2]
    before = our_processes()
    run = run_train(
        *flags, "--hf-checkpoint", str(tiny_model_dir), "--prompt-data", f"{tiny_data_dir}/train.jsonl",
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
