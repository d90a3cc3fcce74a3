"""Rows of JSONL and Parquet files: contents that are no text, no JSON, too deep, too long, of half a character."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from slime_like.job.command_line import parse_args
from slime_like.rollout.check_data import check_data
from tests.fuzz.cases import Case

TINY = str(Path(__file__).parents[2] / "models" / "tiny-qwen3")
VALUES: tuple[Any, ...] = (
    None, True, 0, -1.5, 10**30, "", " ", "\0", "\ud800", "a\udfffb", [], [[]], [None], {}, {"a": {"b": []}},
    "x" * 3000, ["x"], [1, 2], [{"role": "user"}], [{"role": None, "content": "x"}], [{"role": 5, "content": "x"}],
    [{"role": "user", "content": None}], [{"role": "user", "content": 7}], [{"role": "user", "content": [1]}],
    [{"role": "user", "content": [{"type": "image"}]}], [{"role": "user", "content": "\ud83d"}],
    [{"role": "assistant", "content": "x", "tool_calls": 3}], [{"role": "assistant", "tool_calls": [{"function": 3}]}],
    [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", "step_loss_mask": "z"}],
    [{"role": ["user"], "content": "x"}], [{"role": "\ud800", "content": "x"}], [{"": ""}],
)  # fmt: skip
_FLAGS = [
    "--hf-checkpoint", TINY, "--num-rollout", "1", "--rollout-batch-size", "1", "--n-samples-per-prompt", "2",
    "--actor-num-gpus-per-node", "1", "--colocate", "--micro-batch-size", "1", "--input-key", "prompt",
]  # fmt: skip
#: Ways to read a row: plain texts, chat, supervised.
WAYS = {
    "plain": ["--rm-type", "math", "--label-key", "label"],
    "chat": ["--rm-type", "math", "--label-key", "label", "--apply-chat-template", "--tool-key", "tools"],
    "supervised": ["--loss-type", "sft_loss", "--debug-train-only"],
}
GOOD = {"prompt": "1 2", "label": "3", "response": "3", "metadata": {}, "tools": None}


def _read(path: Path, way: str) -> None:
    flags = [flag for flag in _FLAGS if flag != "--colocate"] if way == "supervised" else _FLAGS
    command = parse_args([*flags, *WAYS[way], "--prompt-data", str(path), "--plan"])
    source = check_data(dataclasses.replace(command.config))
    for position in range(min(3, source.num_rows or 0)):
        source.prompt_at(position)


def cases(scratch: Path) -> Iterator[Case]:
    """Each key with each value, in each way of reading; lines that are no rows; Parquet files."""
    for way, key, value in itertools.product(WAYS, GOOD, VALUES):
        rows = json.dumps(GOOD | {key: value}) + "\n"
        yield _case(scratch, f"{way} {key} = {ascii(value)[:60]}", rows.encode(), way)
    for way, (name, data) in itertools.product(WAYS, _lines()):
        yield _case(scratch, f"{way} {name}", data, way)
    for way, (name, rows) in itertools.product(WAYS, _tables()):
        yield _parquet_case(scratch, f"{way} Parquet {name}", rows, way)


def _lines() -> Iterator[tuple[str, bytes]]:
    good = json.dumps(GOOD).encode() + b"\n"
    yield "empty file", b""
    yield "blank lines", b"\n \n\t\n"
    yield "no end", good.strip()
    yield "NULs", b"\0" * 4096
    yield "no UTF-8", b'{"prompt": "\xff\xfe"}\n'
    yield "UTF-16", good.decode().encode("utf-16")
    yield "surrogate bytes", b'{"prompt": "\xed\xa0\x80", "label": "1"}\n'
    yield "deep list", b"[" * 100_000 + b"]" * 100_000 + b"\n"
    yield "deep content", b'{"prompt": "a", "label": "1", "metadata": {"a":' + b"[" * 900 + b"]" * 900 + b"}}\n"
    yield "deeper content", b'{"prompt": "a", "label": "1", "metadata": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001
    yield "long number", b'{"prompt": ' + b"9" * 10_000 + b"}\n"
    yield "twice the key", b'{"prompt": "a", "prompt": 3, "label": "1"}\n'
    yield "NaN", b'{"prompt": "a", "label": NaN}\n'
    yield "long prompt", json.dumps(GOOD | {"prompt": "word " * 2_000_000}).encode() + b"\n"
    yield "long chat", json.dumps(GOOD | {"prompt": [{"role": "user", "content": "a" * 9_000_000}]}).encode() + b"\n"
    yield "many rows, one bad", good * 300 + b"{\n" + good
    yield "CSV", b"prompt,label\n1,2\n"


def _tables() -> Iterator[tuple[str, list[dict] | bytes]]:
    yield "no file of it", b"PAR1" + b"\0" * 100 + b"PAR1"
    yield "cut", b"PAR1"
    yield "numbers", [GOOD | {"prompt": 3, "label": 4}]
    yield "nulls", [GOOD | {"prompt": None}, GOOD]
    yield "bytes", [GOOD | {"prompt": b"\xff\xfe"}]
    yield "structs", [GOOD | {"prompt": {"a": 1}}]
    yield "lists", [GOOD | {"prompt": [1, 2]}]


def _case(scratch: Path, name: str, data: bytes, way: str) -> Case:
    def run() -> None:
        path = scratch / "rows.jsonl"
        path.write_bytes(data)
        _read(path, way)

    return Case(name, run)


def _parquet_case(scratch: Path, name: str, rows: list[dict] | bytes, way: str) -> Case:
    def run() -> None:
        path = scratch / "rows.parquet"
        if isinstance(rows, bytes):
            path.write_bytes(rows)
        else:
            rows_kept = [{key: value for key, value in row.items() if key != "metadata"} for row in rows]
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows_kept), path)
        _read(path, way)

    return Case(name, run)
