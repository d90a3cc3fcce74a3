"""Supervised rows as train samples: the same data and order as a rollout, but the answer stands in the file."""

from __future__ import annotations

import numpy as np

from slime_like.errors import DataError
from slime_like.records import Prompt, TrainSample, per_token
from slime_like.rollout.prompt_feed import PromptFeed
from slime_like.rollout.tokenizer import encode


def supervised_samples(feed: PromptFeed, count: int) -> list[TrainSample]:
    """The next `count` rows of the stream as train samples.

    feed: over check_data's source of a run with --loss-type sft_loss.
    Raises DataError if no row has room for an answer within the context.
    """
    prompts, source = feed.take_answered(count), feed.source
    responses = encode(source.tokenizer, [prompt.response or "" for prompt in prompts])
    samples = [
        supervised_sample(prompt, response, source.end_id, source.max_tokens)
        for prompt, response in zip(prompts, responses, strict=True)
    ]
    if not any(sample.loss_mask.any() for sample in samples):
        raise DataError(
            f"{source.path}: no row of a batch has room for an answer within {source.max_tokens} tokens. Fix:"
            " --rollout-max-context-len."
        )
    return samples


def supervised_sample(prompt: Prompt, response: list[int], end_id: int, max_tokens: int) -> TrainSample:
    """Prompt, answer and end token as one sample, trained on the answer and the end token with weight 1.

    Cut at max_tokens; an answer that is cut has no end token, so that nothing wrong is learned about stopping.
    Example: prompt [11, 12], answer [21], end 2 -> tokens [11, 12, 21, 2], loss mask [0, 0, 1, 1]
    """
    tokens = np.concatenate([prompt.tokens, np.array([*response, end_id])]).astype(np.int32)[:max_tokens]
    trained = (np.arange(len(tokens)) >= len(prompt.tokens)).astype(np.int8)
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
