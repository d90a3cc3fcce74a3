"""Importance weights, IcePop, sequence masking and mismatch: by hand, and against loops in Python's floats written from
the sources.
"""

import math

import numpy as np
import pytest
import torch

from slime_like.algorithms.off_policy import importance_weights, mismatch, off_policy_sequence_mask, rejected_samples

ONE_EACH = torch.arange(3)


def weights_of(trainer, engine, sequences=ONE_EACH, *, level="token", mode="truncate", low=0.2, high=2.0):
    return importance_weights(
        torch.tensor(trainer).log(), torch.tensor(engine).log(), sequences, level=level, mode=mode, low=low, high=high
    )


def test_importance_weights_by_hand():
    weights, bounded = weights_of([0.25, 0.9, 0.1], [0.5, 0.1, 1.0])
    assert weights.tolist() == pytest.approx([0.5, 2.0, 0.2]) and bounded.tolist() == [0, 1, 1]


def test_icepop_by_hand():
    weights, bounded = weights_of([0.25, 0.9, 0.1], [0.5, 0.1, 1.0], mode="mask")
    assert weights.tolist() == pytest.approx([0.5, 0, 0]) and bounded.tolist() == [0, 1, 1]


def test_levels_by_hand():
    # Tokens 0 and 2 are one sample, with ratios 1/2 and 1/2: its product is 1/4, its geometric mean 1/2.
    trainer, engine, owner = [0.25, 0.9, 0.1], [0.5, 0.6, 0.2], torch.tensor([0, 1, 0])
    assert weights_of(trainer, engine, owner, level="sequence")[0].tolist() == pytest.approx([0.25, 1.5, 0.25])
    assert weights_of(trainer, engine, owner, level="geometric")[0].tolist() == pytest.approx([0.5, 1.5, 0.5])
    assert weights_of(trainer, engine, owner, level="sequence", mode="mask", low=0.3)[0].tolist() == pytest.approx(
        [0, 1.5, 0]
    )


def test_no_gradient_and_no_samples():
    log_probs = torch.randn(5, requires_grad=True)
    same = importance_weights(log_probs, log_probs, torch.arange(5), level="token", mode="truncate", low=0.0, high=2.0)[
        0
    ]
    assert same.tolist() == [1] * 5 and not same.requires_grad
    empty = torch.zeros(0)
    for level in ("token", "sequence", "geometric"):
        assert importance_weights(
            empty, empty, torch.zeros(0, dtype=torch.int64), level=level, mode="mask", low=0.0, high=2.0
        )[0].shape == (0,)
    assert off_policy_sequence_mask(empty, empty, empty, torch.zeros(0, dtype=torch.int64), delta=0.1).shape == (0,)


def test_unknown_words_list_the_known():
    with pytest.raises(ValueError, match="token, sequence, geometric"):
        weights_of([0.5], [0.5], torch.zeros(1, dtype=torch.int64), level="word")
    with pytest.raises(ValueError, match="truncate, mask"):
        weights_of([0.5], [0.5], torch.zeros(1, dtype=torch.int64), mode="drop")


def batch(seed, size=40, samples=6):
    rng = np.random.default_rng(seed)
    log_probs = rng.normal(size=size) - 2
    return (
        log_probs,
        log_probs + 0.3 * rng.normal(size=size),
        rng.permutation(np.arange(size) % samples),
        rng.normal(size=samples),
    )


def oracle_weight(trainer, engine, owner, token, *, level, mode, low, high):
    mine = [k for k in range(len(owner)) if owner[k] == owner[token]]
    if level == "token":
        ratio = math.exp(trainer[token] - engine[token])
    else:
        ratio = 1.0
        for k in mine:
            ratio *= math.exp(trainer[k] - engine[k])
        ratio = ratio if level == "sequence" else ratio ** (1 / len(mine))
    if low <= ratio <= high:
        return ratio, 0
    return (0.0 if mode == "mask" else low if ratio < low else high), 1


@pytest.mark.parametrize(
    ("level", "low", "high"), [("token", 0.8, 1.3), ("sequence", 0.5, 1.6), ("geometric", 0.95, 1.05)]
)
@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_weights_against_float64(level, low, high, mode):
    trainer, engine, owner, _ = batch(0)
    options = {"level": level, "mode": mode, "low": low, "high": high}
    ours, bounded = importance_weights(torch.tensor(trainer), torch.tensor(engine), torch.tensor(owner), **options)
    theirs = [oracle_weight(trainer, engine, owner, token, **options) for token in range(len(owner))]
    assert ours.tolist() == pytest.approx([weight for weight, _ in theirs], rel=1e-9)
    assert bounded.tolist() == [flag for _, flag in theirs]
    assert 0 < sum(bounded.tolist()) < len(owner)


def test_sequence_mask_by_hand():
    # Sample 0 moved by (.4 + 0) / 2 = .2, sample 1 by -.1; both bad; sample 2 moved by 1 but is good.
    new, old = torch.tensor([-1.4, -1.0, -0.9, -2.0]), torch.tensor([-1.0, -1.0, -1.0, -1.0])
    kept = off_policy_sequence_mask(
        new, old, torch.tensor([-1.0, -1.0, -1.0, 1.0]), torch.tensor([0, 0, 1, 2]), delta=0.1
    )
    assert kept.tolist() == [0, 0, 1, 1]
    assert off_policy_sequence_mask(new, old, -torch.ones(4), torch.tensor([0, 0, 1, 2]), delta=0.25).tolist() == [
        1,
        1,
        1,
        0,
    ]


def test_sequence_mask_against_float64():
    new, old, owner, per_sample = batch(1)
    advantages = per_sample[owner]
    ours = off_policy_sequence_mask(
        torch.tensor(new), torch.tensor(old), torch.tensor(advantages), torch.tensor(owner), delta=0.05
    ).tolist()
    for token, kept in enumerate(ours):
        mine = [k for k in range(len(owner)) if owner[k] == owner[token]]
        moved = sum(old[k] - new[k] for k in mine) / len(mine)
        assert kept == (0.0 if advantages[token] < 0 and moved > 0.05 else 1.0)
    assert 0 < sum(ours) < len(ours)


def test_token_advantages_are_masked_one_by_one():
    """With an advantage for each token, a sample that moved away keeps its good tokens."""
    kept = off_policy_sequence_mask(
        torch.full((2,), -2.0),
        torch.full((2,), -1.0),
        torch.tensor([1.0, -1.0]),
        torch.zeros(2, dtype=torch.int64),
        delta=0.1,
    )
    assert kept.tolist() == [1, 0]


def test_mismatch_by_hand():
    # Trainer .25, engine .5: ratio 1/2.
    metrics = {
        name: value.item()
        for name, value in mismatch(torch.tensor([0.25]).log(), torch.tensor([0.5]).log(), low=0.6, high=2.0).items()
    }
    expected = {"kl": math.log(2), "k3_kl": -0.5 + math.log(2), "ratio": 0.5, "chi2": -0.75, "clip_ratio": 1.0}
    assert metrics == pytest.approx(expected, rel=1e-6)


def test_mismatch_averages_to_the_divergences():
    trainer, engine = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5])
    metrics = mismatch(torch.tensor(np.log(trainer)), torch.tensor(np.log(engine)), low=0.0, high=2.0)
    means = {name: sum(q * v for q, v in zip(engine, values.tolist(), strict=True)) for name, values in metrics.items()}
    divergence = sum(q * math.log(q / p) for p, q in zip(trainer, engine, strict=True))
    assert means["kl"] == pytest.approx(divergence) and means["k3_kl"] == pytest.approx(divergence)
    assert means["ratio"] == pytest.approx(1.0)
    assert means["chi2"] == pytest.approx(sum((p - q) ** 2 / q for p, q in zip(trainer, engine, strict=True)))
    assert means["clip_ratio"] == pytest.approx(0.2)


def test_rejection_by_hand():
    # Sample 0 has ratios 1/2 and 1/2, sample 1 has 1.5: products 1/4 and 1.5, means per token 1/2 and 1.5.
    trainer, engine, owner = (
        torch.tensor([0.25, 0.9, 0.1]).log(),
        torch.tensor([0.5, 0.6, 0.2]).log(),
        torch.tensor([0, 1, 0]),
    )
    assert rejected_samples(trainer, engine, owner, level="sequence", low=0.3, high=2.0).tolist() == [1, 0, 1]
    assert rejected_samples(trainer, engine, owner, level="geometric", low=0.3, high=1.4).tolist() == [0, 1, 0]
    with pytest.raises(ValueError, match="sequence, geometric"):
        rejected_samples(trainer, engine, owner, level="token", low=0.0, high=2.0)
    assert rejected_samples(
        torch.zeros(0), torch.zeros(0), torch.zeros(0, dtype=torch.int64), level="sequence", low=0.0, high=2.0
    ).shape == (0,)


@pytest.mark.parametrize(("level", "low", "high"), [("sequence", 0.5, 1.6), ("geometric", 0.95, 1.05)])
def test_rejection_against_float64(level, low, high):
    trainer, engine, owner, _ = batch(2)
    ours = rejected_samples(
        torch.tensor(trainer), torch.tensor(engine), torch.tensor(owner), level=level, low=low, high=high
    ).tolist()
    theirs = [
        oracle_weight(trainer, engine, owner, token, level=level, mode="mask", low=low, high=high)[1]
        for token in range(len(owner))
    ]
    assert ours == theirs and 0 < sum(ours) < len(ours)
