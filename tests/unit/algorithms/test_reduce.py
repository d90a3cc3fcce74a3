import numpy as np
import torch

from slime_like.algorithms.reduce import token_weights, weighted_sum


def test_weights_by_hand():
    assert token_weights([1, 3], per_token=True).tolist() == [0.25, 0.25]
    np.testing.assert_allclose(token_weights([1, 3], per_token=False), [1 / 2, 1 / 6])


def test_sample_without_trained_tokens_counts_as_a_sample():
    assert token_weights([2, 0], per_token=False).tolist() == [0.25, 0.0]
    assert token_weights([0, 0], per_token=True).tolist() == [0.0, 0.0]
    assert token_weights([], per_token=True).tolist() == []


def test_parts_add_up_to_the_mean_of_the_whole():
    samples = [np.array([1.0, 2.0]), np.array([5.0]), np.array([4.0, 0.0, 2.0])]
    for per_token, mean in ((True, 14 / 6), (False, (1.5 + 5 + 2) / 3)):
        weights = token_weights([len(s) for s in samples], per_token=per_token)
        parts = [weighted_sum(torch.tensor(s), torch.full((len(s),), w)).item() for s, w in zip(samples, weights.tolist(), strict=True)]
        np.testing.assert_allclose(sum(parts), mean, rtol=1e-6)
