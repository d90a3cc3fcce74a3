"""Supervised rows: what is trained on, where it ends, and the order."""

from __future__ import annotations

import numpy as np
import pytest

from slime_like.errors import DataError
from slime_like.records import Prompt
from slime_like.rollout.check_data import check_data
from slime_like.rollout.prompt_feed import PromptFeed
from slime_like.rollout.supervised import supervised_sample, supervised_samples
from slime_like.rollout.tokenizer import end_of_turn_id
from tests.unit.rollout.rows import digits_row


def rows():
    return [digits_row(n) | {"response": f"{n:04d}"} for n in range(5)]


def test_the_answer_and_the_end_token_are_trained_on(make_config, tokenizer):
    feed = PromptFeed(check_data(make_config(rows(), loss_type="sft_loss", rm_type=None)))
    samples = supervised_samples(feed, 7)
    assert [sample.prompt_index for sample in samples] == list(range(7)) and feed.ledger.counts()["taken"] == 7
    sample = samples[1]
    trained = sample.tokens[sample.loss_mask == 1]
    assert (
        tokenizer.decode(sample.tokens.tolist())
        == "<|im_start|>user\nsort 0001<|im_end|>\n<|im_start|>assistant\n0001<|im_end|>"
    )
    assert tokenizer.decode(trained.tolist()) == "0001<|im_end|>"
    assert sample.advantages.tolist() == sample.weights.tolist() == sample.loss_mask.tolist()
    assert len(sample.tokens) == len(sample.loss_mask) == len(sample.engine_logprobs) == len(sample.weight_versions)


def test_an_answer_that_is_cut_has_no_end_token():
    prompt = Prompt(index=0, text="", tokens=np.array([11, 12], dtype=np.int32))
    whole, cut = supervised_sample(prompt, [21, 22], 2, 5), supervised_sample(prompt, [21, 22], 2, 4)
    assert (whole.tokens.tolist(), whole.loss_mask.tolist()) == ([11, 12, 21, 22, 2], [0, 0, 1, 1, 1])
    assert (cut.tokens.tolist(), cut.loss_mask.tolist()) == ([11, 12, 21, 22], [0, 0, 1, 1])


def test_a_row_without_an_answer_is_named(make_config):
    with pytest.raises(DataError, match=r"line 1 has no key 'response' \(--response-key\)"):
        check_data(make_config([digits_row(1)], loss_type="sft_loss", rm_type=None))
    with pytest.raises(DataError, match="'response' .* is a int, not a string"):
        check_data(make_config([digits_row(1) | {"response": 1}], loss_type="sft_loss", rm_type=None))


def test_the_end_token_is_the_templates_and_not_the_tokenizers(make_config, tokenizer):
    import copy

    base = copy.deepcopy(tokenizer)
    base.eos_token = "<|endoftext|>"  # as base models have it
    end_of_turn = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert end_of_turn_id(base, {}) == end_of_turn
    assert end_of_turn_id(base, None) == tokenizer.convert_tokens_to_ids("<|endoftext|>")
    base.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    assert end_of_turn_id(base, {}) == base.eos_token_id
    base.eos_token = None
    with pytest.raises(DataError, match="no end-of-sequence token"):
        end_of_turn_id(base, None)
