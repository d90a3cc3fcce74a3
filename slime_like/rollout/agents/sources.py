"""Prompts that stand in no file: seeds for environments that make their own questions, and reasoning-gym's tasks.

seeds:1000, seeds:1000:1100            one prompt a seed, from the first to before the last
rg:chain_sum?min_terms=2&size=500      reasoning-gym's questions, labelled with the answer; seed= is one of its options
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from slime_like.config.data import DataConfig
from slime_like.errors import DataError
from slime_like.rollout.agents.registry import split_arguments

_DEFAULT_SIZE = 500
_SEEDS = re.compile(r"(\d{1,9})(?::(\d{1,9}))?")


def generated_rows(path: str, data: DataConfig) -> list[tuple[int, dict]] | None:
    """(number from 1, row) as a file of the data set would have them; None if the path is a file's.

    Raises DataError.
    """
    kind, _, rest = path.partition(":")
    if kind == "seeds":
        rows = list(_seeds(path, rest, data))
    elif kind == "rg":
        rows = list(_reasoning_gym(path, rest, data))
    else:
        return None
    if not rows:
        raise DataError(f"{path}: has no row.")
    return list(enumerate(rows, 1))


def _seeds(path: str, rest: str, data: DataConfig) -> Iterator[dict]:
    match = _SEEDS.fullmatch(rest)
    if not match:
        raise DataError(f"{path}: is no range of seeds. Fix: seeds:1000, or seeds:1000:1100.")
    first, last = (0, int(match[1])) if match[2] is None else (int(match[1]), int(match[2]))
    for seed in range(first, last):
        row: dict = {data.input_key: f"seed {seed}", data.metadata_key: {"seed": seed}}
        yield row | ({data.label_key: None} if data.label_key else {})


def _reasoning_gym(path: str, rest: str, data: DataConfig) -> Iterator[dict]:
    from slime_like.rollout.agents.adapters.reasoning_gym import make_dataset

    name, options = split_arguments(rest)
    options = {"size": _DEFAULT_SIZE, "seed": 0} | options
    for entry in make_dataset(name, options, where=path):
        row = {
            data.input_key: entry["question"],
            data.metadata_key: {"reasoning_gym": {"task": name, "options": options, "entry": dict(entry)}},
        }
        yield row | {data.label_key or "label": entry["answer"]}
