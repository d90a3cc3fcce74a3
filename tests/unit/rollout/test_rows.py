"""Records become rows a batch at a time, in order; what is wrong with one is said in test_data_source.py and
test_supervised.py.
"""

from __future__ import annotations

import itertools

from slime_like.config.data import DataConfig
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
