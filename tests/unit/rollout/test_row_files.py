"""Rows of JSONL and Parquet files: the same rows from both, slices, and what is said of bad files."""

from __future__ import annotations

import datetime
import decimal
import json
import tracemalloc

import pyarrow
import pyarrow.parquet
import pytest

from slime_like.errors import DataError
from slime_like.rollout.row_files import LONGEST_LINE_BYTES, read_rows, row_name

NEEDED = {"messages": "--input-key"}
ALL = slice(None)


@pytest.fixture
def write_parquet(tmp_path):
    """Writes a table in row groups of two."""

    def write(table, name="rows.parquet", rows_a_group=2) -> str:
        path = str(tmp_path / name)
        table = table if isinstance(table, pyarrow.Table) else pyarrow.Table.from_pylist(table)
        pyarrow.parquet.write_table(table, path, row_group_size=rows_a_group)
        return path

    return write


def numbers(file: str, wanted: slice) -> list[int]:
    return [row.record["n"] for row in read_rows(file, wanted, {"n": "--input-key"})]


@pytest.mark.parametrize(
    "wanted",
    [ALL, slice(1, 4), slice(3, None), slice(None, 3), slice(-2, None), slice(-6, -3), slice(None, -6), slice(6, 99)],
)
def test_slices_take_the_same_rows_as_a_list_from_both_kinds(write_parquet, write_rows, wanted):
    rows = [{"n": n} for n in range(7)]
    expected = list(range(7))[wanted]
    assert numbers(write_parquet(rows), wanted) == numbers(write_rows(rows), wanted) == expected


def test_rows_are_counted_from_one_and_named_by_their_file(write_parquet, write_rows):
    rows = [{"n": n} for n in range(5)]
    parquet, lines = write_parquet(rows), write_rows(["", *map(json.dumps, rows)])
    needed = {"n": "--input-key"}
    assert [row.number for row in read_rows(parquet, slice(3, None), needed)] == [4, 5]
    assert [row.number for row in read_rows(lines, slice(3, None), needed)] == [5, 6]  # line 1 is blank
    assert next(read_rows(parquet, slice(3, None), needed)).where == row_name(parquet, 4) == f"{parquet} row 4"
    assert row_name(lines, 4) == f"{lines} line 4"


def test_conversations_come_out_as_they_went_in_without_the_nulls_of_structs(write_parquet):
    """A struct has all keys of the column: None in a template is another thing than a key that is not there."""
    call = {"id": "1", "function": {"name": "add", "arguments": '{"a": null}'}}
    rows = [
        {
            "messages": [{"role": "user", "content": "1+1"}, {"role": "assistant", "tool_calls": [call]}],
            "label": None,
            "more": None,
        },
        {
            "messages": [{"role": "tool", "content": "2", "tool_call_id": "1"}],
            "label": "2",
            "more": {"a": 1, "b": None},
        },
    ]
    file = write_parquet([*rows])
    columns = pyarrow.parquet.read_table(file).to_pylist()
    assert "tool_calls" in columns[0]["messages"][0], "the file has the null"
    read = [row.record for row in read_rows(file, ALL, NEEDED, ["label", "more", "absent"])]
    assert read == [rows[0], {**rows[1], "more": {"a": 1}}]


def test_only_the_columns_that_are_needed_are_read(write_parquet):
    file = write_parquet([{"messages": "a", "image": b"\x00", "label": 1}])
    assert [row.record for row in read_rows(file, ALL, NEEDED, ["label"])] == [{"messages": "a", "label": 1}]
    with pytest.raises(DataError, match="row 1: the column 'image' holds a bytes"):
        list(read_rows(file, ALL, NEEDED, ["image"]))


def test_values_are_as_json_would_have_them(write_parquet):
    maps = pyarrow.array([[("a", 1)]], type=pyarrow.map_(pyarrow.string(), pyarrow.int64()))
    words = pyarrow.array(["x"]).dictionary_encode()
    columns = {"messages": words, "map": maps, "day": [datetime.date(2026, 1, 2)], "exact": [decimal.Decimal("1.50")]}
    file = write_parquet(pyarrow.table(columns))
    (row,) = read_rows(file, ALL, NEEDED, list(columns))
    assert row.record == {"messages": "x", "map": {"a": 1}, "day": "2026-01-02", "exact": "1.50"}
    json.dumps(row.record)


def test_a_missing_column_is_told_with_those_that_there_are(write_parquet):
    file = write_parquet([{"prompt": "a", "answer": 1}])
    with pytest.raises(DataError, match=r"has no column 'messages' \(--input-key\). Its columns: 'prompt', 'answer'"):
        next(read_rows(file, ALL, NEEDED))


def test_bad_files_are_named(write_parquet, tmp_path, write_rows):
    renamed, torn = tmp_path / "renamed.jsonl", tmp_path / "torn.parquet"
    whole = write_parquet([{"n": n} for n in range(9)])
    renamed.write_bytes(open(whole, "rb").read())
    torn.write_bytes(open(whole, "rb").read()[:-20])
    needed = {"n": "--input-key"}
    empty = write_parquet(pyarrow.table({"n": pyarrow.array([], pyarrow.int64())}), "empty.parquet")
    for file, wanted, message in [
        (str(renamed), ALL, "renamed.jsonl line 1 is no UTF-8 text .* Fix: a name that ends in .parquet"),
        (str(torn), ALL, "torn.parquet cannot be read as Parquet"),
        (str(tmp_path / "absent.parquet"), ALL, "absent.parquet cannot be read: No such file"),
        (str(tmp_path / "absent.jsonl"), ALL, "absent.jsonl cannot be read: No such file"),
        (empty, ALL, "empty.parquet is empty: it has no row"),
        (whole, slice(9, 12), r"rows.parquet: the slice \[9:12\] takes none of its 9 rows"),
        (write_rows([{"n": 1}]), slice(None, 0), r"the slice \[:0\] takes none of its 1 rows"),
    ]:
        with pytest.raises(DataError, match=message):
            list(read_rows(file, wanted, needed))


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_the_file_is_not_held_in_memory(write_parquet, write_rows, kind):
    rows = [{"messages": f"{n}" + "x" * 10_000} for n in range(2_000)]  # 20 MB of text
    file = write_parquet(rows, rows_a_group=200) if kind == "parquet" else write_rows(rows)
    del rows
    tracemalloc.start()
    try:
        assert sum(1 for _ in read_rows(file, slice(5, None), NEEDED)) == 1_995
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8e6  # a batch of 256 rows is 2.6 MB, as Python's text


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"messages": "\\ud83d"}', r"x.jsonl line 2 holds half a character \(the lone surrogate \\ud83d\)"),
        ("[" * 100_000, "x.jsonl line 2 is nested too deeply"),
        ('{"a": ' + "[" * 300 + "]" * 300 + "}", "x.jsonl line 2 is nested more than 200 deep"),
    ],
)
def test_lines_that_nothing_later_takes(tmp_path, line, message):
    path = tmp_path / "x.jsonl"
    path.write_text(f'{{"messages": "a"}}\n{line}\n')
    with pytest.raises(DataError, match=message):
        list(read_rows(str(path), ALL, NEEDED))


def test_pairs_of_surrogates_are_whole_characters(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"messages": "\\ud83d\\ude00"}\n')
    (row,) = read_rows(str(path), ALL, NEEDED)
    assert row.record["messages"] == "\U0001f600"


def test_a_line_without_end_is_bounded(tmp_path):
    path = tmp_path / "x.jsonl"
    with open(path, "wb") as file:
        file.write(b'{"messages": "a"}\n')
        file.truncate(LONGEST_LINE_BYTES * 3)  # a hole: NULs without a newline
    tracemalloc.start()
    with pytest.raises(DataError, match="x.jsonl line 2 has more than 64 MiB"):
        list(read_rows(str(path), ALL, NEEDED))
    assert tracemalloc.get_traced_memory()[1] < 2.5 * LONGEST_LINE_BYTES
    tracemalloc.stop()
