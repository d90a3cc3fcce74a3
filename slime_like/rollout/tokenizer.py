"""The tokenizer of an HF folder, loaded without torch where the folder allows it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from slime_like.config.base import shortened
from slime_like.errors import DataError
from slime_like.utils.chat_templates import apply_template

_PROBE = "probe-response"


def load_tokenizer(folder: str):
    """The HF tokenizer of --hf-checkpoint, from local files only.

    A folder with tokenizer.json is read by transformers' generic fast class: AutoTokenizer would import torch (seconds
    at start) only to find the same file. Raises DataError if there is none or it cannot be read.
    """
    if not os.path.isdir(folder):
        raise DataError(f"--hf-checkpoint {folder}: no such folder.")
    try:
        if os.path.isfile(os.path.join(folder, "tokenizer.json")):
            from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast

            return _checked(PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True))
        from transformers import AutoTokenizer

        return _checked(AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False))
    except Exception as error:  # what broken files end in: tokenizers raises Exception itself
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise DataError(f"--hf-checkpoint {folder}: its tokenizer cannot be loaded: {reason[:300]}") from error


def _checked(tokenizer: Any) -> Any:
    """The tokenizer, once it has read a word and its special tokens are texts. Raises ValueError."""
    ids = tokenizer(["probe"], add_special_tokens=False)["input_ids"][0]
    if not ids or not all(isinstance(token, int) and token >= 0 for token in ids):
        raise ValueError(f"it makes the tokens {shortened(ids)} of the word 'probe'")
    templates = tokenizer.chat_template
    if templates is not None and not isinstance(templates, (str, dict)):
        raise ValueError(f"its chat_template is {shortened(templates)}, no text")
    if tokenizer.eos_token is not None and tokenizer.eos_token_id is None:
        raise ValueError(f"its eos_token {shortened(tokenizer.eos_token)} is no token of it")
    return tokenizer


def encode(tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of each text as it stands: special tokens come from the text (the chat template), none is added."""
    return tokenizer(list(texts), add_special_tokens=False)["input_ids"] if texts else []


def end_of_turn_id(tokenizer, chat_template_kwargs: dict | None) -> int:
    """The token that ends an answer: what the chat template puts after one, else the tokenizer's end-of-sequence token.

    chat_template_kwargs: None for prompts without a chat template. Base models often end a text with another token than
    a chat turn; training on the wrong one teaches a model that never stops. Raises DataError if there is neither.
    """
    if chat_template_kwargs is not None and tokenizer.chat_template:
        messages = [{"role": "user", "content": "probe"}, {"role": "assistant", "content": _PROBE}]
        try:
            text = apply_template(tokenizer, messages, **chat_template_kwargs)
        except Exception as error:  # a template may raise anything: it is a program of the model's author
            raise DataError(f"the chat template refuses a question and an answer: {error}") from error
        _, separator, after = text.rpartition(_PROBE)
        ids = encode(tokenizer, [after.lstrip()])[0] if separator and after.strip() else []
        if ids and tokenizer.convert_ids_to_tokens(ids[0]) in tokenizer.get_added_vocab():
            return ids[0]
    if tokenizer.eos_token_id is None:
        raise DataError(
            "the tokenizer has no end-of-sequence token, so a supervised answer would never end. Fix: set eos_token in"
            " tokenizer_config.json."
        )
    return tokenizer.eos_token_id
