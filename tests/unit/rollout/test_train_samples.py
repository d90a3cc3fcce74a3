"""Groups -> train samples: every group is its own baseline, whatever its size, and a user's function may take its
place.
"""

import dataclasses
import itertools

import numpy as np
import pytest

from slime_like.algorithms.group_advantages import normalize
from slime_like.config.loss import LossConfig
from slime_like.config.run import RunConfig
from slime_like.errors import DataError, PluginError, RunError
from slime_like.records import FAILED, TRUNCATED, Prompt, Sample, SampleGroup
from slime_like.rollout.train_samples import custom_advantages, to_train_samples


def group(index, rewards, *, status="completed"):
    samples = [
        Sample(
            prompt_index=index,
            sample_index=number,
            tokens=np.arange(3, dtype=np.int32),
            loss_mask=np.array([0, 1, 1], dtype=np.int8),
            engine_logprobs=np.zeros(3, dtype=np.float32),
            weight_versions=np.zeros(3, dtype=np.int32),
            response="",
            reward=reward,
            status=status if number == 0 else "completed",
            metadata={"prompt": index, "number": number},
        )
        for number, reward in enumerate(rewards)
    ]
    return SampleGroup(prompt=Prompt(index=index, text="", tokens=np.zeros(1, dtype=np.int32)), samples=tuple(samples))


def advantages_of(groups, **options):
    return [sample.advantages[-1] for sample in to_train_samples(groups, LossConfig(**options))]


def test_groups_of_unequal_size_are_their_own_baselines():
    """A prompt that fanned out into three samples beside one of two: rewards 1, 1 and 0, 0, 0 teach nothing, neither
    within nor between groups.
    """
    assert advantages_of([group(0, [1, 1]), group(1, [0, 0, 0])]) == [0, 0, 0, 0, 0]
    advantages = advantages_of([group(0, [1, 0]), group(1, [3, 0, 0])], disable_grpo_std_normalization=True)
    assert advantages == pytest.approx([0.5, -0.5, 2, -1, -1])
    # The third sample of a deviation of its own group: sqrt(2 x .25 / 1) = .7071 and sqrt((4 + 1 + 1) / 2) = 1.7321.
    advantages = advantages_of([group(0, [1, 0]), group(1, [3, 0, 0])])
    assert advantages == pytest.approx(
        [0.5 / 0.707107, -0.5 / 0.707107, 2 / 1.732051, -1 / 1.732051, -1 / 1.732051], rel=1e-5
    )


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce_plus_plus_baseline"])
def test_a_fanned_out_group_does_not_move_another(estimator):
    options = {"advantage_estimator": estimator}
    alone = advantages_of([group(0, [1, 0, 0.5, 0.25])], **options)
    assert advantages_of([group(0, [1, 0, 0.5, 0.25]), group(1, list(range(9)))], **options)[:4] == alone


def test_failed_samples_leave_a_smaller_group():
    assert advantages_of([group(0, [9, 1, 0], status=FAILED)], disable_grpo_std_normalization=True) == [0.5, -0.5]


def test_truncated_samples_may_train_nothing_and_are_still_compared_with():
    groups = [group(0, [0, 1, 0.5], status=TRUNCATED), group(1, [0, 1])]
    loss = LossConfig(disable_grpo_std_normalization=True)
    masked = to_train_samples(groups, loss, mask_truncated=True)
    assert [sample.loss_mask.tolist() for sample in masked] == [[0, 0, 0], *[[0, 1, 1]] * 4]
    assert [sample.advantages[-1] for sample in masked] == [0, 0.5, 0, -0.5, 0.5]
    assert [sample.advantages[-1] for sample in to_train_samples(groups, loss)] == [-0.5, 0.5, 0, -0.5, 0.5]
    assert all(sample.loss_mask.any() for sample in to_train_samples(groups, loss))
    assert groups[0].samples[0].num_response_tokens == 2, "the rollout's own record stays as it was"


def test_what_failures_leave_alone_teaches_nothing():
    """Of two samples one failed: nothing is left to compare with.

    Where one was asked for, its reward is its advantage.
    """
    groups = [group(0, [9, 7], status=FAILED), group(1, [1, 0])]
    for estimator in ("grpo", "dr_grpo", "rloo", "gspo"):
        samples = to_train_samples(groups, LossConfig(advantage_estimator=estimator), group_size=2)
        assert samples[0].advantages[-1] == 0 and samples[1].advantages[-1] > 0
    assert to_train_samples([group(0, [7])], LossConfig(), group_size=1)[0].advantages[-1] == 7


def test_the_rollouts_deviation_divides_the_groups_difference():
    """Rewards 1, 0 and 3, 3, 2; what failed (9) is in neither. Deviation of the five: sqrt(6.8 / 4)."""
    groups = [group(0, [1, 0]), group(1, [9, 3, 3, 2], status=FAILED)]
    advantages = advantages_of(groups, advantage_estimator="grpo_batch_std")
    assert advantages == pytest.approx([x / 1.7**0.5 for x in (0.5, -0.5, 1 / 3, 1 / 3, -2 / 3)], rel=1e-5)


def test_metadata_reaches_the_trainer():
    assert [sample.metadata for sample in to_train_samples([group(4, [1, 0])], LossConfig())] == [
        {"prompt": 4, "number": 0},
        {"prompt": 4, "number": 1},
    ]


def pass_at_2(args, samples):
    """Pass@k's advantage (Pass@k Training, arXiv:2508.10751), k 2: how a sample's mean over all pairs it is in compares
    with all pairs.
    """
    rewards = [max(pair) for pair in itertools.combinations([s.reward for s in samples], 2)]
    mean, deviation = np.mean(rewards), np.std(rewards)
    with_sample = [[max(s.reward, t.reward) for t in samples if t is not s] for s in samples]
    return [(np.mean(row) - mean) / (deviation + 1e-6) for row in with_sample]


def as_many_as_asked(args, samples):
    return np.full(args.n_samples_per_prompt, 0.25)


def raises(args, samples):
    return 1 / 0


def config_with(name, **options):
    return RunConfig(loss=LossConfig(custom_advantage_function_path=f"{__name__}.{name}", **options))


def test_a_users_function_replaces_the_comparison_within_a_group():
    """Pass@2 of one right answer in four: 3 of 6 pairs hold it, so the mean is 1/2 and the deviation 1/2.

    A wrong one is in 1 of 3 right pairs.
    """
    config = config_with("pass_at_2")
    samples = to_train_samples([group(0, [1, 0, 0, 0]), group(1, [0, 0])], config.loss, custom_advantages(config))
    assert [sample.advantages[-1] for sample in samples[:4]] == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3], rel=1e-5)
    assert [sample.advantages[-1] for sample in samples[4:]] == [0, 0]


def test_a_users_function_sees_the_flags_and_its_answer_is_checked():
    config = config_with("as_many_as_asked")
    with pytest.raises(DataError, match=r"for a group of 2\. It must give one finite number each"):
        to_train_samples([group(0, [1, 0])], config.loss, custom_advantages(config))
    assert to_train_samples([group(0, [7])], config.loss, custom_advantages(config))[0].advantages[-1] == 0.25
    config = config_with("raises")
    with pytest.raises(RunError, match=r"test_train_samples\.raises, prompt 5: the function raised ZeroDivisionError"):
        to_train_samples([group(5, [1, 0])], config.loss, custom_advantages(config))


def test_a_missing_function_is_known_before_the_start():
    assert custom_advantages(RunConfig()) is None
    with pytest.raises(PluginError, match="--custom-advantage-function-path"):
        custom_advantages(config_with("pass_at_3"))


def test_an_answer_of_several_samples_is_compared_once():
    """Answers of 1 and 0 have the mean 1/2, though the first one's reward stands at three samples."""
    pair = group(0, [1, 0])
    segments = [dataclasses.replace(pair.samples[0], segment_index=number) for number in range(3)]
    longer = dataclasses.replace(pair, samples=(*segments, pair.samples[1]))
    samples = to_train_samples([longer], LossConfig(disable_grpo_std_normalization=True), group_size=2)
    assert [(sample.sample_index, sample.advantages[-1]) for sample in samples] == [(0, 0.5)] * 3 + [(1, -0.5)]


def test_every_trained_token_has_the_advantage_and_weight_one():
    (sample, _) = to_train_samples([group(0, [1, 0])], LossConfig(disable_grpo_std_normalization=True))
    assert sample.advantages.tolist() == [0, 0.5, 0.5] and sample.weights.tolist() == [0, 1, 1]
    assert sample.advantages.dtype == sample.weights.dtype == np.float32


def test_advantages_are_rounded_once():
    """Where the trainer computes on with them they come in float64, so that whitening starts from the estimator's own
    numbers.
    """
    plain, whitened = (
        to_train_samples([group(0, [1, 0, 0])], LossConfig(normalize_advantages=on))[0].advantages
        for on in (False, True)
    )
    assert (plain.dtype, whitened.dtype) == (np.float32, np.float64)
    assert whitened[1] == normalize(np.array([1, 0, 0]), LossConfig())[0] != plain[1] == np.float32(whitened[1])
