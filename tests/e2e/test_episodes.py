"""Episodes of many turns on the real stack: exact tokens, and rows that share an episode's advantage."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from slime_like.records import Sample, SampleGroup
from slime_like.rollout.debug_data import load_rollout
from tests.e2e.hf_oracle import largest_difference
from tests.e2e.library_environments import number_of
from tests.e2e.runs import SMALL_RUN, assert_nothing_left, our_processes, run_train

pytestmark = pytest.mark.e2e

NUM_ROLLOUTS, NUM_EPISODES = 2, 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Play:
    """What is played, and how many answers the most talkative episodes have at least."""

    env: str
    prompts: str
    library: str | None = None
    turns: int


PLAYS = {
    "relay": Play(env="tests.e2e.environments:Relay", prompts="{data}/train.jsonl", turns=3),
    "textarena": Play(
        env="tests.e2e.library_environments:TicTacToe", prompts="seeds:1000", library="textarena", turns=3
    ),
    "reasoning-gym": Play(
        env="tests.e2e.library_environments:LetterCounting",
        prompts="rg:letter_counting?min_words=1&max_words=3",
        library="reasoning_gym",
        turns=1,
    ),
}


@pytest.fixture(scope="module")
def ending_model_dir(tiny_model_dir, tmp_path_factory) -> Path:
    """The untrained model, for long conversations, with a bias to end its answers: after some five tokens, not 300.

    One coordinate of the tied embeddings is the same for all tokens, and thus in every position, and large for the
    token that ends an answer.
    """
    folder = tmp_path_factory.mktemp("models") / "ending"
    shutil.copytree(tiny_model_dir, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][:, 0] = 0.2
    weights["model.embed_tokens.weight"][config["eos_token_id"], 0] = 2.3
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def without_reward(flags: list[str]) -> list[str]:
    """The environment gives it."""
    place = flags.index("--custom-rm-path")
    return [*flags[:place], *flags[place + 2 :]]


def policy_loss(groups: Sequence[SampleGroup], member) -> float:
    """An on-policy GRPO step's: minus the mean of the rows' advantages (arXiv:2402.03300, eq. 3, with a ratio of 1).

    member: which member of its group a row belongs to.
    """
    advantages = []
    for group in groups:
        rewards = {member(row): row.reward for row in group.samples}
        values = np.array(list(rewards.values()), dtype=np.float64)
        centered = (values - values.mean()) / (values.std(ddof=1) + 1e-6) if np.ptp(values) else 0 * values
        by_member = dict(zip(rewards, centered, strict=True))
        advantages += [by_member[member(row)] for row in group.samples]
    return -float(np.mean(advantages))


def check_relay(segments: Sequence[Sample]) -> None:
    """The third answer begins another conversation, which is a row of its own; both rows have the one reward."""
    turns = segments[-1].metadata["episode"]["turns"]
    assert len(segments) == (2 if turns == 3 else 1)
    assert len({segment.reward for segment in segments}) == 1


def check_textarena(segments: Sequence[Sample]) -> None:
    """One row; won, drawn or lost, or else neither: the game, or an answer, has not ended."""
    (row,) = segments
    ending = row.metadata["episode"]["ending"]
    assert ending in ("done", "length", "max_turns") and row.reward in (-1.0, 0.0, 1.0)
    assert row.reward == 0 or ending == "done"


def check_reasoning_gym(segments: Sequence[Sample]) -> None:
    """One answer; the reward is 1 where it is the number of letters, counted here."""
    (row,) = segments
    question, word = row.metadata["reasoning_gym"]["entry"]["question"].split(" appear in the text: ")
    count = word.count(question.split('"')[1])
    if row.metadata["episode"]["ending"] == "done":
        assert row.reward == float(number_of({"content": row.response}) % 3 == count)
    else:
        assert row.reward == 0


CHECKS = {"relay": check_relay, "textarena": check_textarena, "reasoning-gym": check_reasoning_gym}


@pytest.mark.parametrize(
    "name", ["relay", *(pytest.param(name, marks=pytest.mark.long_run) for name in PLAYS if name != "relay")]
)
def test_every_trained_token_is_the_engines_and_transformers(ending_model_dir, tiny_data_dir, tmp_path, name):
    """Two engines behind the router, two trainer ranks; with Relay rows of two and of one answer from each episode."""
    play = PLAYS[name]
    if play.library:
        pytest.importorskip(play.library, reason=f"{play.library} is not installed (extra: envs)")
    before = our_processes()
    flags = [
        "--hf-checkpoint", ending_model_dir, "--prompt-data", play.prompts.format(data=tiny_data_dir),
        "--actor-num-gpus-per-node", "2", "--colocate", "--rollout-num-gpus-per-engine", "1",
        "--env", play.env, "--rollout-temperature", "1", "--max-turns", "6", "--num-steps-per-rollout", "1",
        "--lr", "1e-4", "--max-tokens-per-gpu", "4096", "--rollout-max-context-len", "4000",
        "--save", tmp_path / "save", "--save-interval", "1", "--save-hf", tmp_path / "hf/{rollout_id}",
        "--num-rollout", NUM_ROLLOUTS, "--save-debug-rollout-data", tmp_path / "samples/{rollout_id}.npz",
    ]  # fmt: skip
    run = run_train(*without_reward(SMALL_RUN), *flags, run_dir=tmp_path / "run", timeout=240)
    assert run.returncode == 0, run.logs()
    train, rollouts = run.metrics("train"), run.metrics("rollout")
    assert [line["step"] for line in train] == list(range(NUM_ROLLOUTS))
    assert max(line["train/logprob_abs_diff_max"] for line in train) <= 1e-4
    assert sum(line["rollout/episodes/violations"] for line in rollouts) == 0
    assert sum(line["rollout/episodes/num"] for line in rollouts) >= NUM_ROLLOUTS * NUM_EPISODES
    assert max(line["rollout/episodes/turns_max"] for line in rollouts) >= play.turns
    assert max(line["rollout/reward_std"] for line in rollouts) > 0
    wrong_by = []
    for number in range(NUM_ROLLOUTS):
        groups = load_rollout(str(tmp_path / "samples/{rollout_id}.npz"), number)
        assert sum(len(group.episodes) for group in groups) == NUM_EPISODES
        for group in groups:
            for segments in group.episodes:
                CHECKS[name](segments)
        # An episode is one member of its group, however many rows it has.
        loss = policy_loss(groups, member=lambda row: row.sample_index)
        assert train[number]["train/pg_loss"] == pytest.approx(loss, abs=1e-4)
        wrong_by.append(abs(policy_loss(groups, member=id) - loss))
    assert name != "relay" or max(wrong_by) > 1e-3, "the check could not tell"
    # Generated after one training, by both engines: that is what HF says with these weights, and they have proven them.
    assert largest_difference(tmp_path / "hf/1", tmp_path / "samples/1.npz") <= 1e-4
    assert largest_difference(ending_model_dir, tmp_path / "samples/1.npz") > 1e-3
    proofs = [
        (line["sync/transport"], line["sync/version"], line["sync/engines_proven"]) for line in run.metrics("sync")
    ]
    assert proofs == [("ipc", version, 2) for version in (1, 2, 3)]
    assert_nothing_left(before)
