"""Less reward for responses near the length limit (DAPO's soft overlong punishment)."""

from __future__ import annotations

import dataclasses

from slime_like.config.reward import RewardConfig
from slime_like.records import Sample


def overlong_penalty(num_tokens: int, *, max_tokens: int, buffer_tokens: int) -> float:
    """0 up to max_tokens - buffer_tokens, from there straight down to -1 at max_tokens and beyond (arXiv:2503.14476,
    eq. 13).

    Example: max_tokens 100, buffer_tokens 20 -> 80: 0, 90: -0.5, 100: -1, 101: -1
    """
    return max(-1.0, min(0.0, (max_tokens - buffer_tokens - num_tokens) / buffer_tokens))


def punish_overlong(sample: Sample, config: RewardConfig, *, max_response_tokens: int) -> Sample:
    """A scored sample with --overlong-penalty-factor x the penalty added to its reward, which stays in reward_parts as
    "overlong".

    What a user's function of several turns put between generated tokens does not count: the model did not choose its
    length. Without --overlong-buffer-len, and for a sample without a reward, the sample as it is.
    """
    if config.overlong_buffer_len is None or sample.reward is None:
        return sample
    penalty = overlong_penalty(
        sample.num_response_tokens, max_tokens=max_response_tokens, buffer_tokens=config.overlong_buffer_len
    )
    shaped = config.overlong_penalty_factor * penalty
    parts = sample.reward_parts or {"rule": sample.reward}
    return dataclasses.replace(sample, reward=sample.reward + shaped, reward_parts=parts | {"overlong": shaped})
