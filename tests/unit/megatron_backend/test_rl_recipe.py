import pytest

from slime_like.errors import DataError
from slime_like.megatron_backend.rl_recipe import combine_steps, split_rollout


def test_rollout_is_split_in_order():
    assert [list(part) for part in split_rollout(list("abcdef"), 2)] == [["a", "b", "c"], ["d", "e", "f"]]
    # A filter may leave fewer than asked for; nothing is dropped.
    assert [len(part) for part in split_rollout(list("abcdefg"), 3)] == [2, 3, 2]


def test_too_few_samples_are_refused():
    with pytest.raises(DataError, match="num-steps-per-rollout"):
        split_rollout(["a"], 2)


def test_metrics_of_steps_are_combined_by_meaning():
    steps = [
        {"train/loss": 1.0, "train/lr": 0.1, "train/logprob_abs_diff": 1.0, "train/logprob_abs_diff_max": 5.0},
        {"train/loss": 3.0, "train/lr": 0.2, "train/logprob_abs_diff": 2.0, "train/logprob_abs_diff_max": 4.0},
    ]
    assert combine_steps(steps, [30, 10]) == {
        "train/loss": 2.0,
        "train/lr": 0.2,
        "train/logprob_abs_diff": 1.25,
        "train/logprob_abs_diff_max": 5.0,
    }
