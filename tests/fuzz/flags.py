"""Flag x value: every flag of train.py and of the Tinker server with values that make no sense."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Sequence
from pathlib import Path

from slime_like.config.base import _scalar_type
from slime_like.config.tree import GROUPS
from slime_like.job.command_line import parse_args
from slime_like.planning.report.render import as_json, make_report
from slime_like.tinker.options import ServerConfig, read_command
from tests.fuzz.cases import Case

TINY = str(Path(__file__).parents[2] / "models" / "tiny-qwen3")
BASE = [
    "--hf-checkpoint", TINY, "--prompt-data", "rows.jsonl", "--num-rollout", "2", "--rollout-batch-size", "4",
    "--n-samples-per-prompt", "4", "--rm-type", "exact", "--label-key", "label", "--actor-num-gpus-per-node", "1",
    "--colocate", "--micro-batch-size", "1", "--plan",
]  # fmt: skip
#: Of numbers; with them come those of texts.
NUMBERS = (
    "0", "1", "-1", "2", "3", "7", "0.5", "1e-30", "1e30", "-0.0", "nan", "inf", "-inf", "1e999", "2147483647",
    "2147483648", "9" * 20, "-" + "9" * 20, "9" * 5000, "1_000", "٣",
)  # fmt: skip
TEXTS = (
    "", " ", "x", "-", "--", "none", "null", "true", "[]", "[1]", "{}", '{"a": 1}', "[[[[", "[" * 100_000,
    "a.b", "a.b.c", "os.system", "/", "/dev/null", "/dev/zero", "/proc/self/mem", "/nowhere/x", "../..", "\n",
    "a\nb", "\udcff",
    "é" * 300, "x" * 100_000, "x@[0:1]", "x@[", "@[:]", "%s %d", "{0}", "$HOME",
    "127.0.0.1:99999", "http://[", "1,2,3", "=",
)  # fmt: skip


def _values(kind: type) -> Sequence[str]:
    numbers = (*NUMBERS, *TEXTS[:10], "\udcff", "")
    return () if kind is bool else numbers if kind in (int, float) else (*TEXTS, "0", "-1", "nan")


def _planned(argv: list[str]) -> None:
    command = parse_args(argv)
    as_json(make_report(command.config, planning=True))


def _started(argv: list[str]) -> None:
    """Without --plan: files are looked for, too; nothing is started."""
    parse_args([text for text in argv if text != "--plan"])


def _served(argv: list[str]) -> None:
    read_command(["--base-model", TINY, "--plan", *argv])


def _fields(group: type) -> list[tuple[str, type, bool]]:
    hints = typing.get_type_hints(group)
    fields = [field for field in dataclasses.fields(group) if "help" in field.metadata]
    return [("--" + field.name.replace("_", "-"), *_scalar_type(hints[field.name])) for field in fields]


def cases() -> list[Case]:
    """All of them."""
    corpus = []
    for group in GROUPS.values():
        for name, kind, is_list in _fields(group):
            for value in _values(kind):
                argv = [*BASE, f"{name}={value}"]
                corpus.append(_case(f"{name}={value}", _started if kind is str else _planned, argv))
            if is_list:
                corpus.append(_case(f"{name} 1 x", _planned, [*BASE, name, "1", "x"]))
            if kind is bool:
                corpus += [_case(flag, _planned, [*BASE, flag]) for flag in (name, "--no-" + name[2:], f"{name}=1")]
            else:
                corpus.append(_case(f"{name} without a value", _planned, [*BASE, name]))
    for name, kind, _ in _fields(ServerConfig):
        corpus += [_case(f"server {name}={value}", _served, [f"{name}={value}"]) for value in _values(kind)]
    return corpus


def _case(name: str, run, argv: list[str]) -> Case:
    return Case(name if len(name) < 120 else f"{name[:100]}… ({len(name)})", lambda: run(argv))
