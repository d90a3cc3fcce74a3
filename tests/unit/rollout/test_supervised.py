"""Supervised rows as a run draws them: answers and conversations, what is cut or left out, and what is said of it."""

from __future__ import annotations

import copy
import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from slime_like.errors import DataError
from slime_like.rollout.check_data import check_data
from slime_like.rollout.prompt_feed import PromptFeed
from slime_like.rollout.supervised import supervised_samples
from slime_like.rollout.tokenizer import end_of_turn_id
from tests.unit.rollout.agents.conversations import TEMPLATES, random_tokenizer
from tests.unit.rollout.rows import digits_row

SFT = {"loss_type": "sft_loss", "rm_type": None, "label_key": None, "n_samples_per_prompt": 1}


def rows():
    return [digits_row(n) | {"response": f"{n:04d}"} for n in range(5)]


def chat(*texts: str) -> dict:
    return {"prompt": [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]}


def drawn(config, count=1, tokenizer=None):
    return supervised_samples(PromptFeed(check_data(config, tokenizer=tokenizer)), count)


def texts_of(tokenizer, sample) -> list[str]:
    return [tokenizer.decode(part) for part in np.split(sample.tokens, np.flatnonzero(np.diff(sample.loss_mask)) + 1)]


def test_the_answer_and_the_end_token_are_trained_on(make_config, tokenizer):
    feed = PromptFeed(check_data(make_config(rows(), **SFT)))
    samples = supervised_samples(feed, 7)
    assert [sample.prompt_index for sample in samples] == list(range(7)) and feed.ledger.counts()["taken"] == 7
    sample = samples[1]
    asked = "<|im_start|>user\nsort 0001<|im_end|>\n<|im_start|>assistant\n"
    assert texts_of(tokenizer, sample) == [asked, "0001<|im_end|>"] and sample.loss_mask[-1] == 1
    assert sample.advantages.tolist() == sample.weights.tolist() == sample.loss_mask.tolist()
    assert len(sample.tokens) == len(sample.loss_mask) == len(sample.engine_logprobs) == len(sample.weight_versions)


def test_an_answer_that_is_cut_has_no_end_token(make_config, tokenizer, caplog):
    config = make_config(rows()[:1], **SFT)
    (whole,) = drawn(config)
    assert texts_of(tokenizer, whole)[1] == "0000<|im_end|>"
    length, prompt = len(whole.tokens), int(np.argmax(whole.loss_mask))
    assert len(drawn(make_config(rows()[:1], rollout_max_context_len=length, **SFT))[0].tokens) == length
    assert "are cut at" not in caplog.text
    (cut,) = drawn(make_config(rows()[:1], rollout_max_context_len=length - 1, **SFT))
    assert texts_of(tokenizer, cut)[1] == "0000" and f"1 of 1 rows are cut at {length - 1} tokens" in caplog.text
    message = f"all 1 prompts have no message to train, or are longer than {prompt - 1} tokens"
    with pytest.raises(DataError, match=message):
        drawn(make_config(rows()[:1], rollout_max_context_len=prompt, **SFT))


def test_rows_of_messages_are_conversations_all_of_whose_turns_are_trained(make_config, tokenizer):
    row = chat("a", "b", "c", "d", "e")
    for options in ({}, {"loss_mask_type": "all"}, {"apply_chat_template": False}):
        (sample,) = drawn(make_config([row], **SFT, **options))
        assert texts_of(tokenizer, sample) == [
            "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n",
            "b<|im_end|>",
            "\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n",
            "d<|im_end|>",
        ]
    (last,) = drawn(make_config([row], loss_mask_type="last", **SFT))
    assert texts_of(tokenizer, last)[1:] == ["d<|im_end|>"] and last.tokens.tolist() == sample.tokens.tolist()


def test_a_row_with_an_answer_is_a_conversation_only_where_that_is_asked_for(make_config, tokenizer):
    row = chat("a", "b", "c", "d") | {"response": "e"}
    assert texts_of(tokenizer, drawn(make_config([row], **SFT))[0])[1:] == ["e<|im_end|>"]
    asked = drawn(make_config([row], loss_mask_type="all", **SFT))[0]
    assert texts_of(tokenizer, asked)[1::2] == ["b<|im_end|>", "d<|im_end|>"]


def test_a_conversation_is_cut_and_its_later_samples_are_left_out(make_config, caplog):
    tokenizer = random_tokenizer(0, "qwen3")
    row = chat("a", "b", "c", "d" * 40)
    parts = drawn(make_config([row], max_position_embeddings=500, **SFT), tokenizer=tokenizer)
    first, second = map(len, (sample.tokens for sample in parts))
    assert [(sample.prompt_index, sample.sample_index) for sample in parts] == [(0, 0), (0, 0)]
    assert "1 of 1 conversations are several samples (2 in all)" in caplog.text and "are cut at" not in caplog.text
    begin = int(np.argmax(parts[1].loss_mask))
    for context, lengths in ((second - 1, [first, second - 1]), (begin, [first]), (first - 1, [first - 1])):
        caplog.clear()
        config = make_config([row], rollout_max_context_len=context, max_position_embeddings=500, **SFT)
        assert [len(sample.tokens) for sample in drawn(config, tokenizer=tokenizer)] == lengths
        assert f"1 of 1 rows are cut at {context} tokens" in caplog.text


def test_conversations_without_anything_to_train_are_left_out_and_counted(make_config, caplog):
    untrained = chat("a", "b")
    untrained["prompt"][1]["step_loss_mask"] = 0
    samples = drawn(make_config([untrained, chat("c", "d")], **SFT), 2)
    assert len(samples) == 2 and samples[0].tokens.tolist() == samples[1].tokens.tolist()  # two epochs
    assert "1 of 2 prompts are left out: .*step_loss_mask" in caplog.text or "step_loss_mask" in caplog.text


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        (digits_row(1), {}, r"line 2 has no key 'response' \(--response-key\), and no conversation with an assistant"),
        (digits_row(1) | {"response": 1}, {}, "line 2: 'response' .* is a int, not a string"),
        ({"prompt": "a"}, {"loss_mask_type": "all"}, "line 2: the prompt 'prompt' is a str, no list of chat messages"),
        (chat("a"), {"loss_mask_type": "last"}, "line 2: none of its 1 messages is the assistant's"),
        (chat("a", "b") | {"tools": [{"name": "f"}]}, {}, r"line 2, message 2: has tools \(--tool-key\), and the chat"),
    ],
)
def test_wrong_rows_are_named(make_config, row, options, message):
    with pytest.raises(DataError, match="train.jsonl " + message):
        check_data(make_config([chat("a", "b"), row], **SFT, **options))


def test_parquet_and_jsonl_train_the_same_tools_calls_and_results(make_config, tmp_path):
    tool = {"type": "function", "function": {"name": "add", "parameters": {"a": {"type": "integer"}}}}
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    row = {
        "messages": [
            {"role": "user", "content": "1+0"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "1", "tool_call_id": "1"},
            {"role": "assistant", "content": "It is 1"},
        ],
        "functions": [tool],
    }
    tokenizer = copy.deepcopy(random_tokenizer(0, "chatml"))
    tokenizer.chat_template = (
        "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
        + TEMPLATES["chatml"][0].replace(
            "<|im_end|>",
            "{% if 'tool_calls' in m %}{% for c in m.tool_calls %}<call>{{ c.function.name }}"
            "{% for k, v in c.function.arguments.items() %} {{ k }}={{ v }}{% endfor %}</call>{% endfor %}{% endif %}"
            "<|im_end|>",
            1,
        )
    )
    table = pyarrow.Table.from_pylist([row, {**row, "functions": None}])
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    keys = {"input_key": "messages", "tool_key": "functions", "max_position_embeddings": 2000}
    samples = {}
    for kind in ("parquet@[0:1]", "jsonl"):
        config = make_config(prompt_data=f"{tmp_path}/rows.{kind}", **keys, **SFT)
        (samples[kind],) = drawn(config, tokenizer=tokenizer)
    (first, second) = samples.values()
    assert first.tokens.tolist() == second.tokens.tolist() and first.loss_mask.tolist() == second.loss_mask.tolist()
    texts = texts_of(tokenizer, first)
    assert texts[1::2] == ["<call>add a=1</call><|im_end|>", "It is 1<|im_end|>"]
    assert texts[0].startswith('<|im_start|>system\n[{"type": "function", "function": {"name": "add"')
    assert "<|im_start|>tool\n1<|im_end|>" in texts[2]


def test_the_end_token_is_the_templates_and_not_the_tokenizers(tokenizer):
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
