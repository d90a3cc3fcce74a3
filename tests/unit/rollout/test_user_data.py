"""A data source of the user's own: rows by position, learning from rollouts, and its state in checkpoints."""

from __future__ import annotations

import json

import pytest

from slime_like.errors import CheckpointError, DataError, PluginError, RunError
from slime_like.rollout.check_data import check_data
from tests.unit.rollout.rows import indexes

EXAMPLE, OWN = "scripts.examples.hooks.Sorting", "tests.unit.rollout.own_data."
NO_FILE = {"prompt_data": None}


def labels(result) -> list[int]:
    return [len(group.prompt.label) for group in result.groups]


def test_rows_come_from_the_object_and_it_hears_how_they_went(start_manager):
    manager, _ = start_manager(data_source_path=EXAMPLE, **NO_FILE)
    first, second = manager.generate(0), manager.generate(1)
    assert (labels(first), labels(second)) == ([2, 2], [3, 3])  # all were right: one digit more
    assert indexes(second) == [2, 3] and first.metrics["rollout/reward_mean"] == 1
    assert "rollout/epoch" not in first.metrics  # without end


def test_a_resume_gives_the_object_its_state(start_manager):
    first, _ = start_manager(data_source_path=EXAMPLE, **NO_FILE)
    for step in range(2):
        first.trained(indexes(first.generate(step)))
    state = json.loads(json.dumps(first.snapshot()[0]))
    second, _ = start_manager(data_source_path=EXAMPLE, **NO_FILE)
    second.load_state_dict(state)
    ours, theirs = first.generate(2), second.generate(2)
    assert labels(theirs) == [4, 4]
    assert [group.prompt.label for group in ours.groups] == [group.prompt.label for group in theirs.groups]
    for other in ({"data_source_path": OWN + "Endless", **NO_FILE}, {}):
        with pytest.raises(CheckpointError, match="cannot be resumed"):
            start_manager(**other)[0].load_state_dict(state)


def test_a_source_with_rows_has_epochs(make_config, tokenizer):
    source = check_data(
        make_config(data_source_path=OWN + "ThreeRows", num_rollout=None, num_epoch=4, **NO_FILE), tokenizer=tokenizer
    )
    assert source.num_rollouts(2) == 6 and source.prompt_at(4).label == "1"
    with pytest.raises(DataError, match="--num-epoch needs its num_rows"):
        check_data(
            make_config(data_source_path=OWN + "Endless", num_rollout=None, num_epoch=1, **NO_FILE),
            tokenizer=tokenizer,
        )


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("NoRows", PluginError, "gave a NoRows without row_at"),
        ("HalfState", PluginError, "has one of state_dict and load_state_dict"),
        ("TextRows", DataError, "row 0: is a str, not a dict"),
        ("RowsWithoutPrompt", DataError, "row 0 has no key 'prompt'"),
        ("LongRows", DataError, "row 0: its prompt has more than 57 tokens"),
        ("RaisingRows", RunError, "RaisingRows.row_at: the function raised IndexError: no more"),
        ("WrongNumber", DataError, "num_rows is 0"),
    ],
)
def test_mistakes_are_named_before_anything_starts(make_config, tokenizer, name: str, error, message: str):
    config = make_config(data_source_path=OWN + name, num_rollout=None, num_epoch=1, **NO_FILE)
    with pytest.raises(error, match=message):
        check_data(config, tokenizer=tokenizer)


def test_an_order_is_the_sources_own(make_config):
    problems = make_config(data_source_path=EXAMPLE, rollout_shuffle=True, **NO_FILE).problems()
    assert [problem for problem in problems if "--rollout-shuffle does nothing" in problem]


def test_one_source_of_data(make_config):
    assert any("exclude each other" in problem for problem in make_config(data_source_path=EXAMPLE).problems())


def test_rows_of_ones_own_may_be_conversations(make_config, tokenizer):
    options = {"loss_type": "sft_loss", "rm_type": None, "label_key": None, **NO_FILE}
    source = check_data(make_config(data_source_path=OWN + "Conversations", **options), tokenizer=tokenizer)
    (sample,) = source.prompt_at(3).supervised
    assert tokenizer.decode(sample.tokens[sample.loss_mask == 1]) == "3<|im_end|>"
    with pytest.raises(DataError, match="row 0 has no key 'response'"):
        check_data(make_config(data_source_path=OWN + "ThreeRows", **options), tokenizer=tokenizer)
