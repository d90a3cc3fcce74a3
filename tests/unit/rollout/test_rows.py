"""Records become rows a batch at a time, in order; what is wrong with one is said in test_data_source.py and
test_supervised.py.
"""

from __future__ import annotations

import itertools

import pytest

from slime_like.config.data import DataConfig
from slime_like.errors import DataError
from slime_like.rollout.row_files import FileRow
from slime_like.rollout.rows import RowMaker

NUM_ROWS = 600  # more than two batches


def test_rows_come_in_order_and_one_that_does_not_fit_leaves_its_place(tokenizer):
    records = [
        FileRow(n, {"input": "9" * (30 if n % 7 == 0 else 5), "metadata": {"n": n}}, "") for n in range(NUM_ROWS)
    ]
    maker = RowMaker(DataConfig(num_rollout=1), tokenizer, max_prompt_tokens=20, max_tokens=40)
    rows = list(maker.rows(records))
    assert len(rows) == NUM_ROWS
    assert all((row is None) == (n % 7 == 0) for n, row in enumerate(rows))
    assert all(row.line == row.metadata["n"] == n for n, row in enumerate(rows) if row is not None)


def test_records_are_taken_as_they_are_needed(tokenizer):
    """An endless source, or a large file, is not read before its first row is made."""
    taken = itertools.count()
    maker = RowMaker(DataConfig(num_rollout=1), tokenizer, max_prompt_tokens=20, max_tokens=40)
    rows = maker.rows(FileRow(n, {"input": "a"}, "") for n in taken)
    assert next(rows) is not None and next(taken) <= 257


def test_the_last_answers_are_cut_at_the_limit_and_counted(tokenizer):
    data = DataConfig(num_rollout=1, input_key="messages")
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b" * 60}]
    maker = RowMaker(data, tokenizer, max_prompt_tokens=70, max_tokens=50, supervised=True)
    (row,) = maker.rows([FileRow(1, {"messages": messages}, "")])
    (sample,) = row.supervised
    assert len(sample.tokens) == len(sample.loss_mask) == 50 and maker.num_cut == 1
    assert (
        row.tokens.tolist() == sample.tokens[: len(row.tokens)].tolist()
        and not sample.loss_mask[: len(row.tokens)].any()
    )


def test_a_text_that_can_never_fit_is_not_tokenized(tokenizer):
    """Five million characters take seconds, and a hostile row could hold many more."""

    class Counting:
        num_characters = 0

        def __getattr__(self, name):
            return getattr(tokenizer, name)

        def __call__(self, texts, **kwargs):
            self.num_characters += sum(map(len, texts))
            return tokenizer(texts, **kwargs)

    counting = Counting()
    data = DataConfig(num_rollout=1, input_key="prompt", response_key="response")
    for supervised in (False, True):
        maker = RowMaker(data, counting, max_prompt_tokens=20, max_tokens=40, supervised=supervised)
        records = [FileRow(n, {"prompt": text, "response": "1"}, "") for n, text in enumerate(("12", "9" * 5_000_000))]
        assert [row is None for row in maker.rows(records)] == [False, True]
    assert counting.num_characters < 1000


@pytest.mark.parametrize("supervised", [False, True])
@pytest.mark.parametrize("field", ["prompt", "response"])
def test_half_a_character_is_named(tokenizer, supervised, field):
    if field == "response" and not supervised:
        pytest.skip("a prompt has no response")
    data = DataConfig(num_rollout=1, input_key="prompt", response_key="response")
    maker = RowMaker(data, tokenizer, max_prompt_tokens=20, max_tokens=40, supervised=supervised)
    record = {"prompt": "12", "response": "3"} | {field: "a\ud800b"}
    with pytest.raises(DataError, match=r"x line 3 holds half a character \(the lone surrogate \\ud800\)"):
        list(maker.rows([FileRow(3, record, "x line 3")]))


def test_a_message_s_role_is_a_text(tokenizer):
    data = DataConfig(num_rollout=1, input_key="prompt", apply_chat_template=True)
    maker = RowMaker(data, tokenizer, max_prompt_tokens=20, max_tokens=40)
    for role in (None, 5, ["user"]):
        with pytest.raises(DataError, match="x line 1: a chat message's 'role' and keys are texts"):
            list(maker.rows([FileRow(1, {"prompt": [{"role": role, "content": "a"}]}, "x line 1")]))
