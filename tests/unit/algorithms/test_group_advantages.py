import subprocess
import sys

import numpy as np
import pytest

from slime_like.algorithms.group_advantages import group_advantages, normalize
from slime_like.config.training import LossConfig
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


def test_group_of_one_keeps_its_reward():
    assert normalize(np.array([2.5]), LossConfig()).tolist() == [2.5]


def test_needs_no_torch():
    code = "import slime_like.algorithms.group_advantages, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
