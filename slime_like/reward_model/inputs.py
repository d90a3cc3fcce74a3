"""What a reward model reads of a sample: the policy's tokens if both mean the same by them, else text of its own
making.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from slime_like.errors import RewardError
from slime_like.utils.chat_templates import apply_template


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardInput:
    """One sample as a reward model may read it.

    Example: RewardInput(name="prompt 3, sample 0", tokens=[…], prompt="<|im_start|>user\\nsort 71…", messages=[{"role":
    "user", …}], response="17")
    """

    name: str  # for messages
    tokens: np.ndarray  # [T] int32: prompt and response, in the policy's vocabulary
    prompt: str  # as the policy saw it
    response: str
    messages: list[dict] | None = None  # the prompt as chat, before any template; None if it is plain text


def same_ids(policy: Any, reward: Any) -> bool:
    """Whether every token of the policy's tokenizer has the same id in the reward model's, so that ids can be handed on
    as they are.
    """
    known = reward.get_vocab()
    return all(known.get(token) == number for token, number in policy.get_vocab().items())


def encode_inputs(inputs: Sequence[RewardInput], tokenizer: Any) -> list[np.ndarray]:
    """Each sample in the reward model's own tokens, [T] int64.

    A prompt that was chat goes through the reward model's chat template, with the response as the assistant's turn;
    without a template, and for plain prompts, prompt and response are joined, and the tokenizer adds the special tokens
    that it adds to any text. Raises RewardError naming the sample if the template refuses it.
    """
    encoded = []
    for one in inputs:
        if one.messages is not None and tokenizer.chat_template:
            try:
                text = apply_template(tokenizer, [*one.messages, {"role": "assistant", "content": one.response}])
            except Exception as error:  # a template is a program of the model's author: it may raise anything
                raise RewardError(
                    f"the reward model's chat template refuses {one.name}: {type(error).__name__}: {error}"
                ) from error
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            ids = tokenizer(one.prompt + one.response)["input_ids"]
        encoded.append(np.array(ids, dtype=np.int64))
    return encoded
