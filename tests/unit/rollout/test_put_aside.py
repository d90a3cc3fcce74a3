"""Rows that fail again and again: asked a few times, then left out and named; too many of them end the run."""

import asyncio
import json
import types

import numpy as np
import pytest

from slime_like.config.reward import RewardConfig
from slime_like.errors import RewardError
from slime_like.records import FAILED, Prompt, Sample, SampleGroup
from slime_like.rollout.group_stream import GroupStream, StreamLimits
from slime_like.rollout.groups import GroupOutcome
from slime_like.rollout.prompt_feed import PromptFeed
from slime_like.rollout.put_aside import FIRST_LOOK, PutAside
from slime_like.rollout.sample_builder import FAULT
from tests.unit.rollout.test_group_stream import prompts_of

DROPS = RewardConfig(rm_type="exact", on_reward_error="drop")
ROWS = 6


class Source:
    """Six rows, epoch after epoch, in the file's order."""

    num_rows = ROWS

    def row_at(self, position):
        return position % ROWS

    def prompt_at(self, position):
        return Prompt(index=position, text=f"row {position % ROWS}", tokens=np.array([1], dtype=np.int32))

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def group_of(prompt: Prompt, error: str | None) -> GroupOutcome:
    failed = {} if error is None else {"status": FAILED, "error": error, "metadata": {FAULT: True}}
    arrays = {"tokens": prompt.tokens, "loss_mask": np.ones(1, np.int8), "engine_logprobs": np.zeros(1, np.float32)}
    sample = Sample(
        prompt_index=prompt.index,
        sample_index=0,
        weight_versions=np.zeros(1, np.int32),
        response="",
        reward=0.0,
        **arrays,
        **failed,
    )
    return GroupOutcome(group=SampleGroup(prompt=prompt, samples=(sample,)), num_failures=0)


def take(count: int, times: int, errors, tmp_path, put_aside: PutAside):
    """[prompts of each take], how often each row was asked, and the feed. errors: (row, its n-th try) -> error."""
    asked = dict.fromkeys(range(ROWS), 0)

    async def make(prompt):
        row = prompt.index % ROWS
        asked[row] += 1
        return group_of(prompt, errors(row, asked[row]))

    async def run():
        feed = PromptFeed(Source(), tmp_path / "dropped.jsonl", put_aside)
        stream = GroupStream(feed, make, lambda outcome: None, StreamLimits())
        return [prompts_of(await stream.take(count)) for _ in range(times)], asked, feed

    return asyncio.run(asyncio.wait_for(run(), 5))


def test_an_error_that_passes_costs_nothing(tmp_path):
    taken, asked, feed = take(
        3, 2, lambda row, n: "server away" if row == 1 and n == 1 else None, tmp_path, PutAside(DROPS)
    )
    assert taken == [[0, 1, 2], [3, 4, 5]] and asked[1] == 2
    assert feed.ledger.counts()["dropped"] == 0 and feed.put_aside_rows == 0


def test_a_row_that_always_fails_is_asked_three_times_in_all_epochs_and_named(tmp_path, caplog):
    put_aside = PutAside(DROPS)
    taken, asked, feed = take(5, 3, lambda row, n: "division by zero" if row == 2 else None, tmp_path, put_aside)
    assert taken == [[0, 1, 3, 4, 5], [6, 7, 9, 10, 11], [12, 13, 15, 16, 17]]
    assert asked[2] == 3 and feed.put_aside_rows == 1
    assert feed.ledger.dropped == {"put_aside": 3}, "once after its tries, then in each epoch without a request"
    feed.log_put_aside()
    assert "row 2: division by zero" in caplog.text
    lines = [json.loads(line) for line in (tmp_path / "dropped.jsonl").read_text().splitlines()]
    assert lines[0] == {"put_aside": 2, "error": "division by zero"}
    again = PutAside(DROPS)
    again.load_state_dict(json.loads(json.dumps(put_aside.state_dict())))
    assert again.state_dict() == put_aside.state_dict() and again.rows == {2: "division by zero"}


def test_tries_count_from_one_checkpoint_to_the_next(tmp_path):
    put_aside = PutAside(DROPS)
    assert not put_aside.ended(4, "a") and not put_aside.ended(4, "b")
    again = PutAside(DROPS)
    again.load_state_dict(json.loads(json.dumps(put_aside.state_dict())))
    assert again.ended(4, "c") and again.rows == {4: "c"}


def test_a_share_of_errors_that_is_too_large_ends_the_run_and_says_the_last():
    put_aside = PutAside(DROPS)
    for row in range(FIRST_LOOK - 4):
        put_aside.ended(row, None)
    for row in range(3):  # of 32: below a tenth
        put_aside.ended(100 + row, f"error {row}")
    put_aside.ended(200, None)
    resumed = PutAside(DROPS)
    resumed.load_state_dict(json.loads(json.dumps(put_aside.state_dict())))
    for one in (put_aside, resumed):  # the window lasts through a resume
        with pytest.raises(RewardError, match="4 of the last 33 groups .* --max-reward-error-share 0.1 .* error 3"):
            one.ended(103, "error 3")


def test_when_no_row_is_left_that_is_said(tmp_path):
    config = RewardConfig(rm_type="exact", on_reward_error="drop", reward_error_tries=1, max_reward_error_share=1.0)
    with pytest.raises(RewardError, match="no prompt is left. 6 rows were put aside"):
        take(2, 1, lambda row, n: "no", tmp_path, PutAside(config))


def test_what_does_nothing_is_named():
    problems = RewardConfig(rm_type="exact", reward_error_tries=5).problems()
    assert "--reward-error-tries does nothing without --on-reward-error drop" in " ".join(problems)


def test_the_default_keeps_nobody_waiting():
    feed = PromptFeed(types.SimpleNamespace(prompt_at=lambda position: position, num_rows=None))
    assert feed.draw(2) == [0, 1] and not feed.keeps_asking(0, "an error") and not feed.is_put_aside(0)
