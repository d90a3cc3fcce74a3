"""One answer of the policy as routes report it."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class TurnAnswer:
    """What was sent, what was sampled, and the chat message that it is.

    Example: prompt_ids (11, 12), tokens (21, 2), logprobs (-.3, -.1), weight_version 4,
    message {"role": "assistant", "content": "hi"}, finish_reason "stop".
    """

    prompt_ids: tuple[int, ...]
    tokens: tuple[int, ...]  # with the one that ended the answer
    logprobs: tuple[float, ...]
    weight_version: int
    message: dict
    finish_reason: str  # "stop", "length" or "tool_calls"
    conversation: tuple[dict, ...] = ()  # all messages, up to and with this one
