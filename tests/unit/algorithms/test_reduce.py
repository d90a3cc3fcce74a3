import numpy as np
import pytest
import torch

from slime_like.algorithms.reduce import checked_weights, token_weights, weighted_sum
from slime_like.errors import DataError


def test_weights_by_hand():
    assert token_weights([1, 3], reduction="token").tolist() == [0.25, 0.25]
    np.testing.assert_allclose(token_weights([1, 3]), [1 / 2, 1 / 6])
    assert token_weights([1, 3], reduction="constant", divisor=10).tolist() == [1 / 20, 1 / 20]
    np.testing.assert_allclose(
        token_weights([1, 3, 2], reduction="rollout", rollouts=["a", "a", "b"]), [1 / 8, 1 / 8, 1 / 4]
    )


def test_sample_without_trained_tokens_counts_as_a_sample():
    assert token_weights([2, 0]).tolist() == [0.25, 0.0]
    assert token_weights([2, 0], reduction="rollout", rollouts=[0, 1]).tolist() == [0.25, 0.0]
    assert token_weights([2, 0], reduction="constant", divisor=4).tolist() == [1 / 8, 0.0]
    assert token_weights([0, 0], reduction="token").tolist() == [0.0, 0.0]
    assert token_weights([], reduction="token").tolist() == []


def mean_of(samples, rollouts, reduction, divisor):
    """The definition, in loops over Python's floats."""
    if reduction == "token":
        tokens = [value for sample in samples for value in sample]
        return sum(tokens) / len(tokens)
    if reduction == "constant":
        return sum(sum(sample) / divisor for sample in samples) / len(samples)
    if reduction == "sample":
        return sum(sum(sample) / len(sample) for sample in samples) / len(samples)
    parts = {}
    for sample, rollout in zip(samples, rollouts, strict=True):
        parts.setdefault(rollout, []).extend(sample)
    return sum(sum(values) / len(values) for values in parts.values()) / len(parts)


@pytest.mark.parametrize("reduction", ["sample", "token", "rollout", "constant"])
def test_parts_add_up_to_the_mean_of_the_whole(reduction):
    samples, rollouts = [[1.0, 2.0], [5.0], [4.0, 0.0, 2.0], [-3.0]], [(0, 0), (0, 1), (0, 1), (1, 0)]
    weights = token_weights([len(s) for s in samples], reduction=reduction, rollouts=rollouts, divisor=7)
    parts = [
        weighted_sum(torch.tensor(s), torch.full((len(s),), w)).item()
        for s, w in zip(samples, weights.tolist(), strict=True)
    ]
    assert sum(parts) == pytest.approx(mean_of(samples, rollouts, reduction, 7), rel=1e-6)


def test_rollouts_of_one_sample_each_are_samples():
    counts = [3, 1, 4, 1, 5]
    np.testing.assert_array_equal(token_weights(counts, reduction="rollout", rollouts=range(5)), token_weights(counts))


def test_unknown_reduction_lists_the_known():
    with pytest.raises(ValueError, match="sample, token, rollout, constant"):
        token_weights([1], reduction="median")


@pytest.mark.parametrize("weights", [[1.0], [1.0, float("nan")], "ab", [[1.0, 2.0]], None])
def test_a_reducer_must_give_one_number_a_sample(weights):
    with pytest.raises(DataError, match="--custom-pg-loss-reducer-function-path my.reducer"):
        checked_weights(weights, 2, "my.reducer")
    assert checked_weights((1, 2), 2, "my.reducer").tolist() == [1.0, 2.0]
