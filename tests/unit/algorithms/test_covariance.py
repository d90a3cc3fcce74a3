"""Which tokens clip_cov and kl_cov treat apart: by hand, against loops in Python's floats, and the same however a train
step is cut over ranks.
"""

import dataclasses
import threading

import numpy as np
import pytest
import torch

from slime_like.algorithms.covariance import Collectives, covariances, draws, lowest, picked
from slime_like.config.loss import LossConfig
from slime_like.records import TrainSample, per_token
from tests.helpers.train_world import advantage_of

ALONE = Collectives()


def test_covariances_by_hand():
    per_token, count = covariances(torch.tensor([-1.0, -3.0]), torch.tensor([1.0, 0.0]), ALONE)
    assert per_token.tolist() == [0.5, 0.5] and count == 2


def test_lowest_by_hand():
    scores, ties = torch.tensor([3.0, 1.0, torch.inf, 1.0]), torch.tensor([0.0, 0.5, 0.0, 0.2])
    assert lowest(scores, ties, 1, ALONE).tolist() == [False, False, False, True]
    assert lowest(scores, ties, 2, ALONE).tolist() == [False, True, False, True]
    assert lowest(scores, ties, 4, ALONE).tolist() == [True, True, False, True]
    assert lowest(torch.full((3,), torch.inf), torch.zeros(3), 2, ALONE).tolist() == [False] * 3
    assert lowest(torch.zeros(0), torch.zeros(0), 2, ALONE).shape == (0,)


def step(seed=0, samples=12):
    """A train step's samples, their trained tokens' log-probs, and one advantage each."""
    rng = np.random.default_rng(seed)
    train_samples = []
    for number in range(samples):
        length = int(rng.integers(3, 30))
        mask = np.array([0, *rng.integers(0, 2, length - 1)], dtype=np.int8)
        train_samples.append(
            TrainSample(
                prompt_index=number // 4,
                sample_index=number % 4,
                tokens=np.zeros(length, dtype=np.int32),
                loss_mask=mask,
                engine_logprobs=np.zeros(length, dtype=np.float32),
                weight_versions=np.full(length, seed, dtype=np.int32),
                reward=0.0,
                advantages=per_token(float(rng.normal()), mask),
                weights=per_token(1.0, mask),
            )
        )
    logs = [torch.tensor(rng.normal(size=int(s.loss_mask.sum())) * 2 - 2) for s in train_samples]
    return train_samples, logs


def picks_of(samples, logs, places, loss, ranks=ALONE):
    old = torch.cat([torch.zeros(0).double(), *(logs[i] for i in places)])
    advantages = torch.cat(
        [torch.zeros(0).double(), *(torch.full((len(logs[i]),), advantage_of(samples[i])).double() for i in places)]
    )
    chosen = picked(old, advantages, torch.tensor(draws(samples, places)), loss, ranks)
    return dict(zip(places, chosen.split([len(logs[i]) for i in places]), strict=True))


def together(num_ranks, work):
    """work(rank, Collectives) on one thread a rank; their collectives meet at a barrier."""
    barrier, shared, results = threading.Barrier(num_ranks, timeout=20), [None] * num_ranks, [None] * num_ranks

    def exchange(rank, tensor):
        shared[rank] = tensor
        barrier.wait()
        parts = list(shared)
        barrier.wait()
        return parts

    def run(rank):
        results[rank] = work(
            rank,
            Collectives(
                sum=lambda t: torch.stack(exchange(rank, t)).sum(0), gather=lambda t: torch.cat(exchange(rank, t))
            ),
        )

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert None not in results
    return results


KL_COV = LossConfig(policy_loss="kl_cov", kl_cov_ratio=0.1)
CLIP_COV = LossConfig(policy_loss="clip_cov", clip_cov_ratio=0.05, clip_cov_lb=0.3, clip_cov_ub=4.0)


def loop_covariances(samples, logs):
    tokens = [(x, advantage_of(s)) for s, row in zip(samples, logs, strict=True) for x in row.tolist()]
    mean_log, mean_advantage = sum(x for x, _ in tokens) / len(tokens), sum(a for _, a in tokens) / len(tokens)
    return [
        [(x - mean_log) * (advantage_of(s) - mean_advantage) for x in row.tolist()]
        for s, row in zip(samples, logs, strict=True)
    ]


def test_kl_cov_takes_the_highest():
    samples, logs = step()
    theirs = loop_covariances(samples, logs)
    everything = sorted((value for row in theirs for value in row), reverse=True)
    least = everything[int(0.1 * len(everything)) - 1]
    ours = picks_of(samples, logs, range(len(samples)), KL_COV)
    for i, row in ours.items():
        assert row.tolist() == [float(value >= least) for value in theirs[i]]


def test_clip_cov_draws_within_its_band():
    samples, logs = step()
    theirs = loop_covariances(samples, logs)
    inside = [value for row in theirs for value in row if 0.3 < value < 4.0]
    ours = picks_of(samples, logs, range(len(samples)), CLIP_COV)
    chosen = [value for i, row in ours.items() for value, pick in zip(theirs[i], row.tolist(), strict=True) if pick]
    assert len(chosen) == int(0.05 * sum(map(len, theirs))) < len(inside) and set(chosen) <= set(inside)
    whole = picks_of(
        samples,
        logs,
        range(len(samples)),
        LossConfig(policy_loss="clip_cov", clip_cov_ratio=1.0, clip_cov_lb=0.3, clip_cov_ub=4.0),
    )
    assert sum(row.sum().item() for row in whole.values()) == len(inside)


def test_every_token_of_the_band_is_as_likely_as_another():
    """400 rollouts of the same samples, told apart by their weight version: about 1 of 10 draws each, within 5 standard
    errors.
    """
    samples, logs = step(samples=4)
    loss = LossConfig(policy_loss="clip_cov", clip_cov_ratio=0.1, clip_cov_lb=-1e9, clip_cov_ub=1e9)
    counts, times = 0, 400
    for version in range(times):
        now = [dataclasses.replace(s, weight_versions=np.full_like(s.weight_versions, version)) for s in samples]
        counts = counts + torch.cat(list(picks_of(now, logs, range(4), loss).values()))
    share = int(0.1 * len(counts)) / len(counts)
    assert ((counts / times - share).abs() < 5 * (share * (1 - share) / times) ** 0.5).all()


@pytest.mark.parametrize("loss", [KL_COV, CLIP_COV], ids=["kl_cov", "clip_cov"])
@pytest.mark.parametrize(
    "cut",
    [[[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]], [[11, 3], [5, 0, 1, 2, 4, 6, 7, 8, 9, 10], []]],
    ids=["two", "three, one empty"],
)
def test_the_same_tokens_however_the_step_is_cut(loss, cut):
    samples, logs = step()
    whole = picks_of(samples, logs, range(12), loss)
    parts = together(len(cut), lambda rank, ranks: picks_of(samples, logs, cut[rank], loss, ranks))
    merged = {i: row for part in parts for i, row in part.items()}
    assert sum(row.sum().item() for row in whole.values()) > 0
    for i, row in whole.items():
        assert torch.equal(merged[i], row), i


def test_equal_covariances_are_told_apart():
    """Without any advantage all covariances are 0: still no more tokens than asked for."""
    samples, logs = step()
    flat = {
        "log_probs": torch.cat(logs),
        "advantages": torch.zeros(len(torch.cat(logs))),
        "ties": torch.tensor(draws(samples, range(12))),
    }
    assert picked(**flat, loss=KL_COV, ranks=ALONE).sum() == int(0.1 * len(flat["ties"]))
    few = LossConfig(policy_loss="kl_cov")
    assert picked(**flat, loss=few, ranks=ALONE).sum() == 1  # .0002 of them is less than one
