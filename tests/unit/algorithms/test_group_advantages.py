import subprocess
import sys

import numpy as np
import pytest

from slime_like.algorithms.group_advantages import BASELINES, batch_deviation, group_advantages, normalize
from slime_like.algorithms.token_advantages import TOKEN_ADVANTAGES
from slime_like.config.algorithms import ESTIMATORS
from slime_like.config.loss import LossConfig
from slime_like.errors import DataError


def test_centres_without_deviation():
    assert group_advantages(np.array([1, 0, 0, 1]), normalize_std=False).tolist() == [0.5, -0.5, -0.5, 0.5]


def test_divides_by_the_sample_deviation():
    # Deviation of [1, 0, 0, 1] with G - 1 = 3 in the denominator: sqrt(4 * 0.25 / 3) = 0.57735.
    advantages = group_advantages(np.array([1.0, 0.0, 0.0, 1.0]), normalize_std=True)
    np.testing.assert_allclose(advantages, [0.866024, -0.866024, -0.866024, 0.866024], atol=1e-5)


@pytest.mark.parametrize("value", [1.0, 0.1, 1 / 3])
def test_equal_rewards_teach_nothing(value):
    assert group_advantages(np.full(7, value), normalize_std=True).tolist() == [0.0] * 7


def test_one_sample_has_no_baseline():
    with pytest.raises(DataError, match="n-samples-per-prompt"):
        group_advantages(np.array([1.0]), normalize_std=True)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_rewards_must_be_finite(bad):
    with pytest.raises(DataError, match="finite"):
        group_advantages(np.array([1.0, bad]), normalize_std=True)
    with pytest.raises(DataError, match="finite"):
        normalize(np.array([1.0, bad]), LossConfig(disable_rewards_normalization=True))


def test_flags_choose():
    rewards = np.array([3.0, 1.0])
    assert normalize(rewards, LossConfig(disable_rewards_normalization=True)).tolist() == [3.0, 1.0]
    assert normalize(rewards, LossConfig(disable_grpo_std_normalization=True)).tolist() == [1.0, -1.0]
    np.testing.assert_allclose(normalize(rewards, LossConfig()), [0.7071063, -0.7071063], atol=1e-6)


COMPARING = [name for name, row in ESTIMATORS.items() if row.baseline]


@pytest.mark.parametrize("name", COMPARING)
def test_one_sample_teaches_its_reward_where_one_was_asked_for_and_nothing_where_the_others_failed(name):
    loss = LossConfig(advantage_estimator=name)
    assert normalize(np.array([2.5]), loss, deviation=2.0).tolist() == [2.5]
    assert normalize(np.array([2.5]), loss, group_size=4, deviation=2.0).tolist() == [0]
    raw = LossConfig(advantage_estimator=name, disable_rewards_normalization=True)
    assert normalize(np.array([2.5]), raw, group_size=4).tolist() == [2.5]


def test_every_row_has_its_function():
    assert {row.baseline for row in ESTIMATORS.values()} == {None, *BASELINES}
    assert {row.tokens for row in ESTIMATORS.values()} == set(TOKEN_ADVANTAGES)
    assert {row.scale for row in ESTIMATORS.values()} == {None, "group", "batch"}


def test_dr_grpo_centres_only():
    assert normalize(np.array([3.0, 1.0]), LossConfig(advantage_estimator="dr_grpo")).tolist() == [1, -1]


def test_batch_deviation_by_hand():
    """Groups 1, 0 and 3, 3, 2: a mean of 1.8, squares of .64, 3.24, 1.44, 1.44, .04 over 4.

    Each group keeps its own mean.
    """
    groups = [np.array([1.0, 0.0]), np.array([3.0, 3.0, 2.0])]
    deviation = batch_deviation(groups)
    assert deviation == pytest.approx((6.8 / 4) ** 0.5)
    loss = LossConfig(advantage_estimator="grpo_batch_std")
    assert normalize(groups[0], loss, deviation=deviation) == pytest.approx(np.array([0.5, -0.5]) / (deviation + 1e-6))
    assert normalize(groups[1], loss, deviation=deviation) == pytest.approx(
        np.array([1, 1, -2]) / 3 / (deviation + 1e-6)
    )
    assert batch_deviation([]) == batch_deviation([np.ones(1)]) == 0
    assert normalize(np.ones(3), loss, deviation=batch_deviation([np.ones(3)])).tolist() == [0, 0, 0]


def test_needs_no_torch():
    code = "import slime_like.algorithms.group_advantages, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
