"""Rows in, prompts out: the order, resuming, and what is said about bad input."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from slime_like.errors import DataError, PluginError
from slime_like.rollout.check_data import check_data
from slime_like.rollout.data_source import load_eval_data
from slime_like.rollout.prompt_feed import PromptFeed
from slime_like.rollout.tokenizer import load_tokenizer
from tests.unit.rollout.rows import digits_row


def feed_of(config) -> PromptFeed:
    return PromptFeed(check_data(config))


def test_prompts_are_rendered_with_the_chat_template(make_config, tokenizer):
    prompt = feed_of(make_config()).draw(1)[0]
    assert prompt.text == "<|im_start|>user\nsort 0000<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.tokens.dtype == np.int32 and tokenizer.decode(prompt.tokens.tolist()) == prompt.text
    assert (prompt.index, prompt.label, prompt.metadata, prompt.supervised) == (0, "0000", {}, ())


def test_a_string_is_one_user_turn_with_the_template_and_raw_without(make_config):
    rows = [{"prompt": "sort 12", "label": "12", "metadata": {"level": 3}}]
    assert feed_of(make_config(rows)).draw(1)[0].text == "<|im_start|>user\nsort 12<|im_end|>\n<|im_start|>assistant\n"
    raw = feed_of(make_config(rows, apply_chat_template=False)).draw(1)[0]
    assert (raw.text, raw.metadata) == ("sort 12", {"level": 3})


def test_rows_come_in_file_order_and_wrap_into_the_next_epoch(make_config):
    source = check_data(make_config())  # 7 rows
    prompts = PromptFeed(source).draw(9)
    assert [prompt.index for prompt in prompts] == list(range(9))
    assert [prompt.label for prompt in prompts] == [
        "0000",
        "0001",
        "0002",
        "0003",
        "0004",
        "0005",
        "0006",
        "0000",
        "0001",
    ]


def test_shuffle_gives_each_epoch_its_own_order_and_every_run_the_same(make_config):
    config = make_config(rollout_shuffle=True, rollout_seed=5)
    labels = [prompt.label for prompt in feed_of(config).draw(21)]
    assert labels == [prompt.label for prompt in feed_of(config).draw(21)]
    epochs = [labels[i : i + 7] for i in (0, 7, 14)]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert labels != [prompt.label for prompt in feed_of(make_config(rollout_shuffle=True, rollout_seed=6)).draw(21)]


def test_the_shuffled_order_is_fixed_for_ever(make_config):
    """A change of this order would break resuming of runs that exist."""
    labels = [int(prompt.label) for prompt in feed_of(make_config(rollout_shuffle=True, rollout_seed=42)).draw(7)]
    assert labels == np.random.Generator(np.random.PCG64(np.random.SeedSequence([42, 0]))).permutation(7).tolist()


def test_slices_take_rows_by_position_and_errors_keep_the_file_line(make_config, write_rows):
    path = write_rows(["", *[json.dumps(digits_row(n)) for n in range(5)], "{broken"], "sliced.jsonl")
    source = check_data(make_config(prompt_data=f"{path}@[1:3]"))
    assert [row.label for row in source.rows] == ["0001", "0002"]
    assert source.rows[0].line == 3  # line 1 is blank
    assert [row.label for row in check_data(make_config(prompt_data=f"{path}@[-3:-1]")).rows] == ["0003", "0004"]
    with pytest.raises(DataError, match="line 7 is malformed JSON"):
        check_data(make_config(prompt_data=path))
    with pytest.raises(DataError, match=r"slice \[9:12\] takes none of its 6 rows"):
        check_data(make_config(prompt_data=f"{path}@[9:12]"))


def test_number_of_rollouts(make_config):
    assert check_data(make_config(num_rollout=4)).num_rollouts(2) == 4
    assert check_data(make_config(num_rollout=None, num_epoch=3)).num_rollouts(2) == 10  # 21 prompts


def test_long_prompts_are_left_out_and_counted(make_config, caplog):
    rows = [digits_row(1), {"prompt": [{"role": "user", "content": "sort " + "9" * 30}], "label": "x"}, digits_row(2)]
    source = check_data(make_config(rows, rollout_max_prompt_len=20))
    assert ([row.label for row in source.rows], source.num_filtered) == (["0001", "0002"], 1)
    assert "train.jsonl: 1 of 3 prompts are left out" in caplog.text
    assert check_data(make_config(rows)).num_filtered == 0
    # no room for a single answer token
    assert check_data(make_config(rows, rollout_max_context_len=40)).num_filtered == 1
    with pytest.raises(DataError, match="all 3 prompts are longer than 5 tokens"):
        check_data(make_config(rows, rollout_max_prompt_len=5))


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([], {}, "is empty"),
        (["   "], {}, "is empty"),
        ([digits_row(1), '{"prompt": '], {}, r"train.jsonl line 2 is malformed JSON: .* starts with '\{\"prompt\":'"),
        (["[1, 2]"], {}, "line 1 is a JSON list, not an object"),
        (
            [digits_row(1), {"question": "x", "label": 1}],
            {},
            r"line 2 has no key 'prompt' \(--input-key\). Its keys: 'question', 'label'",
        ),
        ([{"prompt": "x"}], {}, r"line 1 has no key 'label' \(--label-key\). Its keys: 'prompt'"),
        (
            [digits_row(1)],
            {"apply_chat_template": False},
            "line 1: the prompt 'prompt' is a list of chat messages. Fix: add --apply-chat-template",
        ),
        ([{"prompt": 5, "label": 1}], {}, "is a int, neither a string nor a list"),
        ([{"prompt": ["hi"], "label": 1}], {}, "a chat message needs 'role' and 'content' .*, but is 'hi'"),
        ([{"prompt": [], "label": 1}], {}, "list of chat messages is empty"),
        ([{"prompt": "", "label": 1}], {"apply_chat_template": False}, "line 1: the prompt is empty"),
        (
            [digits_row(1), {"prompt": "x", "label": None}],
            {},
            "train.jsonl line 2: has no label, and --rm-type exact compares with one",
        ),
        ([digits_row(1)], {"label_key": None}, "line 1: has no label, .*Fix: --label-key"),
        (
            [{"prompt": [{"role": "user", "tool_calls": [{}]}], "label": 1}],
            {},
            "a chat message needs 'role' and 'content' .*, but is",
        ),
        (
            [digits_row(1) | {"tools": "[{"}],
            {},
            r"line 1: 'tools' \(--tool-key\) is malformed JSON: .* starts with '\[\{'",
        ),
        (
            [digits_row(1) | {"tools": {"name": "add"}}],
            {},
            r"line 1: 'tools' \(--tool-key\) is no list of objects, but",
        ),
        (
            [digits_row(1) | {"tools": [{"name": "add"}]}],
            {},
            "line 1: has tools .--tool-key., and the chat template of --hf-checkpoint has no place for them",
        ),
        ([digits_row(1) | {"metadata": [1]}], {}, r"'metadata' \(--metadata-key\) is a list, not an object"),
    ],
)
def test_bad_rows_are_named(make_config, rows, options, message):
    with pytest.raises(DataError, match=message):
        check_data(make_config(rows, **options))


def test_files_that_cannot_be_read_are_named(make_config, tmp_path):
    with pytest.raises(DataError, match="absent.jsonl cannot be read: No such file"):
        check_data(make_config(prompt_data=str(tmp_path / "absent.jsonl")))
    binary = tmp_path / "data.jsonl"
    binary.write_bytes(b'{"prompt": 1}\n\xff\xfe\x00')
    with pytest.raises(DataError, match="data.jsonl line 2 is no UTF-8 text .byte 0."):
        check_data(make_config(prompt_data=str(binary)))


def test_a_folder_without_a_tokenizer_is_named(make_config, tmp_path):
    with pytest.raises(DataError, match="--hf-checkpoint .*: its tokenizer cannot be loaded"):
        check_data(make_config(hf_checkpoint=str(tmp_path)))


def test_a_tokenizer_without_a_template_is_named(make_config, tmp_path, tokenizer):
    tokenizer.save_pretrained(tmp_path / "plain")
    (tmp_path / "plain" / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((tmp_path / "plain" / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (tmp_path / "plain" / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match="has no chat template"):
        check_data(make_config(hf_checkpoint=str(tmp_path / "plain")))


TOOL_TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool['function']['name'] }};{% endfor %}</tools>{% endif %}"
    "{% for message in messages %}{{ message['role'] }}:{{ message['content'] or '' }}"
    "{% for call in message['tool_calls'] or [] %}->{{ call['function']['name'] }}{% endfor %}|{% endfor %}"
)
ADD = {"type": "function", "function": {"name": "add", "parameters": {}}}


@pytest.fixture
def with_tools(make_config, tmp_path, tokenizer):
    """A config on a tokenizer whose template knows tools."""
    folder = tmp_path / "with-tools"
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TOOL_TEMPLATE}))
    return lambda rows, **options: make_config(rows, hf_checkpoint=str(folder), **options)


def test_tools_reach_the_chat_template(with_tools):
    rows = [
        digits_row(1) | {"tools": [ADD]},
        digits_row(2) | {"tools": json.dumps([ADD])},
        digits_row(3),
        digits_row(4) | {"tools": []},
    ]
    prompts = feed_of(with_tools(rows)).draw(4)
    assert [prompt.text for prompt in prompts[:2]] == [f"<tools>add;</tools>user:sort 000{n}|" for n in (1, 2)]
    assert [prompt.text for prompt in prompts[2:]] == ["user:sort 0003|", "user:sort 0004|"]
    assert [prompt.metadata for prompt in prompts] == [{"tools": [ADD]}, {"tools": [ADD]}, {}, {}]


def test_tools_under_another_key_and_for_evaluations(with_tools, write_rows):
    rows = [digits_row(1) | {"functions": [ADD], "metadata": {"tools": "mine"}}]
    assert feed_of(with_tools(rows)).draw(1)[0].text == "user:sort 0001|"
    prompt = feed_of(with_tools(rows, tool_key="functions")).draw(1)[0]
    assert prompt.text.startswith("<tools>add;") and prompt.metadata == {"tools": "mine"}
    held_out = {"eval_prompt_data": ["held-out", write_rows(rows, "held-out.jsonl")], "eval_interval": 1}
    for options, text in (
        ({}, "user:sort 0001|"),
        ({"eval_tool_key": "functions"}, "<tools>add;</tools>user:sort 0001|"),
    ):
        config = with_tools(None, **held_out, **options)
        assert (
            load_eval_data(config, load_tokenizer(config.checkpoint.hf_checkpoint))["held-out"].prompt_at(0).text
            == text
        )


def test_parquet_prompts_and_evaluation_sets_are_those_of_jsonl(with_tools, tmp_path):
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    asked = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    rows = [
        digits_row(1) | {"metadata": {"level": 3}, "tools": None},
        {"prompt": asked, "label": "2", "metadata": None, "tools": [ADD | {"function": {"name": "add"}}]},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train.parquet")
    file = str(tmp_path / "train.parquet")
    eval_flags = {"eval_prompt_data": ["held-out", f"{file}@[1:]"], "eval_interval": 1}
    config, lines = with_tools(rows, prompt_data=file, **eval_flags), with_tools(rows)
    prompts = feed_of(config).draw(2)
    assert [p.text for p in prompts] == [p.text for p in feed_of(lines).draw(2)]
    assert prompts[1].text == "<tools>add;</tools>user:1+1|assistant:->add|"
    assert prompts[0].metadata == {"level": 3} and prompts[1].messages[1]["tool_calls"][0]["function"]["arguments"] == {
        "a": 1
    }
    (row,) = load_eval_data(config, load_tokenizer(config.checkpoint.hf_checkpoint))["held-out"].rows
    assert (row.label, row.line, row.text) == ("2", 2, prompts[1].text)
    with pytest.raises(
        DataError, match=r"train.parquet has no column 'question' \(--input-key\). Its columns: 'prompt'"
    ):
        check_data(with_tools(rows, prompt_data=file, input_key="question"))


def test_an_assistant_may_only_call_tools(with_tools):
    calls = [
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "tool_calls": [ADD]},
        {"role": "tool", "content": "2"},
    ]
    assert feed_of(with_tools([{"prompt": calls, "label": "2"}])).draw(1)[0].text == "user:1+1|assistant:->add|tool:2|"


def test_tools_beside_a_prompt_without_a_template_are_for_the_users_functions(make_config):
    prompt = feed_of(
        make_config([{"prompt": "add: 1+1", "label": "2", "tools": [ADD]}], apply_chat_template=False)
    ).draw(1)[0]
    assert (prompt.text, prompt.metadata) == ("add: 1+1", {"tools": [ADD]})


def test_evaluation_data_and_plugins_are_checked_too(make_config, write_rows):
    held_out = write_rows([{"question": "x"}], "held-out.jsonl")
    with pytest.raises(DataError, match="held-out.jsonl line 1 has no key 'prompt'"):
        check_data(make_config(eval_prompt_data=["held-out", held_out], eval_interval=1))
    with pytest.raises(PluginError, match="--custom-rm-path nowhere.reward: no module 'nowhere'"):
        check_data(make_config(custom_rm_path="nowhere.reward", rm_type=None))


@pytest.mark.slow
def test_the_fast_path_encodes_as_auto_tokenizer_and_needs_no_torch(make_config):
    config = make_config()
    script = (
        "import sys; from slime_like.rollout.tokenizer import load_tokenizer, encode; import"
        " slime_like.rollout.manager\nt = load_tokenizer(sys.argv[1]); texts = sys.argv[2:]; fast = encode(t,"
        " texts)\nt.apply_chat_template([{'role': 'user', 'content': 'x'}], tokenize=False)\nassert 'torch' not in"
        " sys.modules and 'ray' not in sys.modules\nfrom transformers import AutoTokenizer; slow ="
        " AutoTokenizer.from_pretrained(sys.argv[1])\nassert slow(texts, add_special_tokens=False)['input_ids'] =="
        " fast, fast"
    )
    texts = ["<|im_start|>user\nsort 7146<|im_end|>\n", "héllo 世界\n  <calc>12+3</calc>", "0237<|im_end|>"]
    done = subprocess.run(
        [sys.executable, "-c", script, config.checkpoint.hf_checkpoint, *texts],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr


def test_rows_with_reward_types_of_their_own_are_checked(make_config, tokenizer):
    rows = [digits_row(1) | {"rm_type": "f1"}, digits_row(2) | {"metadata": {"rm_type": "gpqa", "choices": ["x"]}}]
    source = check_data(make_config(rows), tokenizer=tokenizer)
    assert [source.prompt_at(place).metadata["rm_type"] for place in (0, 1)] == ["f1", "gpqa"]
    for rm_type, message in (("f2", "is unknown"), ("remote_rm", "needs --rm-url")):
        with pytest.raises(DataError, match=f"train.jsonl line 2: its rm_type.*{message}"):
            check_data(make_config([digits_row(1), digits_row(2) | {"rm_type": rm_type}]), tokenizer=tokenizer)
