"""Prompts are drawn once, in the stream's order, and a resume goes on where the state was saved."""

from __future__ import annotations

import json

import pytest

from slime_like.errors import CheckpointError
from slime_like.rollout.check_data import check_data
from slime_like.rollout.prompt_feed import PromptFeed
from slime_like.utils.files import read_json_lines
from tests.unit.rollout.rows import digits_row


def drawn(feed: PromptFeed, count: int) -> list:
    return [(prompt.index, prompt.label) for prompt in feed.draw(count)]


@pytest.mark.parametrize("count", [0, 3, 7, 11])
def test_resume_continues_exactly_also_in_the_middle_of_an_epoch(make_config, count):
    whole, first, second = (PromptFeed(check_data(make_config(rollout_shuffle=True))) for _ in range(3))
    first.ledger.trained(prompt.index for prompt in first.take_answered(count))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert drawn(second, 10) == drawn(whole, count + 10)[count:]
    assert second.epoch == (count + 10) / 7


def test_a_resume_says_how_many_an_earlier_run_names(make_config, tmp_path):
    source = check_data(make_config())
    first, second = PromptFeed(source, tmp_path / "first"), PromptFeed(source, tmp_path / "second")
    first.draw(3)
    first.ledger.drop(1, "stale")
    second.load_state_dict(first.state_dict())
    second.draw(2)
    second.ledger.drop(2, "failed")
    assert read_json_lines(tmp_path / "first") == [{"prompt": 1, "why": "stale"}]
    assert read_json_lines(tmp_path / "second") == [
        {"resumed": {"stale": 1}, "position": 3},
        {"prompt": 2, "why": "failed"},
    ]
    assert second.ledger.dropped == {"stale": 1, "failed": 1}


def test_resume_refuses_other_data(make_config):
    state = PromptFeed(check_data(make_config())).state_dict()
    other = PromptFeed(check_data(make_config([digits_row(1), digits_row(2)])))
    with pytest.raises(CheckpointError, match="num_rows was 7 and is 2"):
        other.load_state_dict(state)
