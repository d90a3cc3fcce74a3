"""A micro-batch whose samples begin alike, by hand: what lies where, who predicts what, and whose it is."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from slime_like.algorithms.shared_prompts import prompt_groups, shared_row
from slime_like.megatron_backend.step.packing import PackLayout, Predictions, pack, packed_rows, record_layout
from slime_like.megatron_backend.step.shared_packing import pack_shared
from slime_like.records import TrainSample, per_token

CPU = torch.device("cpu")


def sample(tokens, mask, advantage=1.0, prompt=0):
    length = len(tokens)
    return TrainSample(
        prompt_index=prompt, sample_index=0, tokens=np.array(tokens, dtype=np.int32),
        loss_mask=np.array(mask, dtype=np.int8), engine_logprobs=-np.arange(length, dtype=np.float32),
        weight_versions=np.zeros(length, dtype=np.int32), reward=0.0, advantages=per_token(advantage, mask),
        weights=per_token(1.0, mask),
    )  # fmt: skip


def packed(samples, multiple: int = 1):
    row = shared_row(prompt_groups(samples))
    return pack_shared(samples, row, np.arange(1.0, 1 + len(samples)), layout=PackLayout(multiple=multiple), device=CPU)


PROMPT = [11, 12, 13, 14]
PAIR = [
    sample([*PROMPT, 31], [0] * 4 + [1], advantage=-1.0),
    sample([*PROMPT, 21, 22], [0] * 4 + [1, 1], advantage=2.0),
]


def test_by_hand():
    batch = packed(PAIR, multiple=4)
    assert batch.samples == (1, 0) and batch.lengths == (6, 5)
    assert batch.tokens.tolist() == [[11, 12, 13, 14, 21, 22, 31, 0]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4, 5, 4, 0]]
    assert batch.padding.tolist() == [[False] * 7 + [True]]
    # 14 predicts both answers' first tokens, in the order of their ids; the last of a sample predicts 0 for nobody.
    assert batch.targets.tolist() == [12, 13, 14, 21, 31, 22, 0, 0]
    assert batch.predictions.rows.tolist() == [0, 1, 2, 3, 3, 4, 5, 6]
    assert batch.predictions.ends == (0, 1, 2, 3, 5, 6, 7, 8, 8)
    assert batch.restoring.tolist() == [0, 1, 2, 3, 5, 6] + [0, 1, 2, 4, 7]
    # Columns are those of whole samples, one behind the other.
    assert batch.num_scores == 11 and batch.trained.tolist() == [3, 4, 9]
    assert batch.advantages.tolist() == [2.0, 2.0, -1.0] and batch.weights.tolist() == [2.0, 2.0, 1.0]
    assert batch.sample_of_token.tolist() == [0, 0, 1]
    assert batch.sequences.boundaries == (0, 4, 6, 7, 8) and batch.sequences.max_seqlen_q == 6


def test_scores_come_back_as_each_samples_own():
    batch = packed(PAIR)
    scores = torch.arange(8.0)[batch.restoring]
    rows = record_layout(scores, batch.lengths)
    assert [row.tolist() for row in rows] == [[0, 0, 1, 2, 3, 5], [0, 0, 1, 2, 4]]
    (column,) = packed_rows(dict(zip(batch.samples, rows, strict=True)), [batch])
    assert column.tolist() == [0, 1, 2, 3, 5, 0, 0, 1, 2, 4, 0]


def test_samples_with_nothing_in_common_are_packed_as_ever():
    apart = [PAIR[0], sample([1, 2, 3, 4, 5, 6], [0, 1, 1, 1, 1, 1], prompt=1)]
    ours, plain = packed(apart), pack(apart, (0, 1), np.array([1.0, 2.0]), layout=PackLayout(), device=CPU)
    assert ours.predictions is None and ours.restoring is None and ours.sequences.branches is None
    assert torch.equal(ours.tokens, plain.tokens) and torch.equal(ours.weights, plain.weights)
    filler = pack_shared([], shared_row([]), np.zeros(0), layout=PackLayout(multiple=2), device=CPU)
    assert filler.tokens.tolist() == [[0, 0]] and len(filler.trained) == 0


def test_experts_lie_at_their_tokens_and_padding_has_none():
    experts = [np.arange(2 * len(s.tokens)).reshape(-1, 1, 2).astype(np.int8) for s in PAIR]
    samples = [dataclasses.replace(s, routed_experts=e) for s, e in zip(PAIR, experts, strict=True)]
    routed = packed(samples, multiple=4).routed_experts
    assert routed.shape == (1, 8, 1, 2)
    assert routed[0, :, 0, 0].tolist() == [0, 2, 4, 6, 8, 10, 8, -1]


def test_predictions_of_a_block():
    predictions = Predictions.of([2, 1, 0, 3], CPU)
    assert predictions.rows.tolist() == [0, 0, 1, 3, 3, 3]
    wanted, rows = predictions.within(slice(1, 4))
    assert wanted == slice(2, 6) and rows.tolist() == [0, 2, 2, 2]
