"""Supervised rows as train samples: the same data and order as a rollout, but the answers stand in the file."""

from __future__ import annotations

import numpy as np

from slime_like.records import Prompt, SupervisedTokens, TrainSample, per_token
from slime_like.rollout.prompt_feed import PromptFeed


def supervised_samples(feed: PromptFeed, count: int) -> list[TrainSample]:
    """The next `count` rows of the stream as train samples: one a row, several where a chat template rewrites what was
    said before (conversations.py).

    feed: over check_data's source of a run with --loss-type sft_loss.
    """
    return [train_sample(prompt, one) for prompt in feed.take_answered(count) for one in prompt.supervised]


def train_sample(prompt: Prompt, supervised: SupervisedTokens) -> TrainSample:
    """The tokens as one sample, trained with weight 1 where the mask says."""
    tokens, trained = supervised.tokens, supervised.loss_mask
    return TrainSample(
        prompt_index=prompt.index,
        sample_index=0,
        tokens=tokens,
        loss_mask=trained,
        engine_logprobs=np.zeros(len(tokens), dtype=np.float32),
        weight_versions=np.full(len(tokens), -1, dtype=np.int32),
        reward=0.0,
        advantages=per_token(1.0, trained),
        weights=per_token(1.0, trained),
    )
