"""What is loaded, how texts become ids, and what ends a turn."""

from __future__ import annotations

import pytest

from slime_like.errors import DataError
from slime_like.rollout.tokenizer import encode, end_of_turn_id, load_tokenizer


def test_folders_without_a_tokenizer_are_named(tmp_path):
    with pytest.raises(DataError, match=f"--hf-checkpoint {tmp_path}/no: no such folder."):
        load_tokenizer(f"{tmp_path}/no")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=f"--hf-checkpoint {tmp_path}: its tokenizer cannot be loaded"):
        load_tokenizer(str(tmp_path))


def test_texts_become_ids_as_they_stand(tokenizer):
    assert encode(tokenizer, []) == []
    one, two = encode(tokenizer, ["<|im_start|>user", "7"])
    assert one[0] == tokenizer.convert_tokens_to_ids("<|im_start|>") and len(two) == 1
    assert tokenizer.decode(one) == "<|im_start|>user"


def test_a_chat_turn_ends_as_the_template_ends_it(tokenizer):
    assert end_of_turn_id(tokenizer, {}) == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert end_of_turn_id(tokenizer, None) == tokenizer.eos_token_id
