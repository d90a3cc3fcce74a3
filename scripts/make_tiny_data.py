"""Write the tiny tasks' data: rows of {"prompt": [chat messages], "label": str} as JSONL.

usage: make_tiny_data.py sort4 OUT [--seed 0]

sort4: "sort 7146" -> "1467". OUT gets
  sft.jsonl    warm-up rows with a "response": right with probability 0.35, else a copy, the reverse or descending
  train.jsonl  prompts for RL
  eval.jsonl   held-out prompts, each once
A prompt is held out by a hash of its text, so no file of another seed or size can leak one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

HELD_OUT_PERCENT = 10
#: How often a warm-up row shows the rewarded behaviour. RL has to find out which of the behaviours is rewarded.
RIGHT_PROBABILITY = 0.35
NUM_ROWS = {"sft": 12_800, "train": 1_280, "eval": 200}


def sort_digits(rng: random.Random, num_digits: int) -> tuple[str, str]:
    """A prompt and its answer: ("sort 7146", "1467")."""
    digits = "".join(rng.choice("0123456789") for _ in range(num_digits))
    return f"sort {digits}", "".join(sorted(digits))


TASKS: dict[str, Callable[[random.Random], tuple[str, str]]] = {"sort4": lambda rng: sort_digits(rng, 4)}


def is_held_out(text: str) -> bool:
    """Whether a prompt belongs to the evaluation, for ever and in every file."""
    return zlib.crc32(text.encode()) % 100 < HELD_OUT_PERCENT


def rows(task: str, *, seed: int, held_out: bool) -> Iterator[dict]:
    """Endless rows of one side of the hold-out; prompts may repeat."""
    rng = random.Random(f"{task}/{seed}/{held_out}")
    while True:
        text, label = TASKS[task](rng)
        if is_held_out(text) == held_out:
            yield {"prompt": [{"role": "user", "content": text}], "label": label}


def distinct(stream: Iterator[dict]) -> Iterator[dict]:
    """Each prompt once."""
    seen = set()
    for row in stream:
        text = row["prompt"][0]["content"]
        if text not in seen:
            seen.add(text)
            yield row


def demonstrate(row: dict, rng: random.Random) -> dict:
    """The row with a warm-up target: the right answer, or one of three wrong behaviours."""
    digits = row["prompt"][0]["content"].split()[-1]
    wrong = (digits, digits[::-1], "".join(sorted(digits, reverse=True)))
    return row | {"response": row["label"] if rng.random() < RIGHT_PROBABILITY else rng.choice(wrong)}


def write_task(task: str, out: Path, *, seed: int) -> None:
    """sft.jsonl, train.jsonl and eval.jsonl; eval is the same for every seed."""
    demonstrations = random.Random(f"{task}/{seed}/demonstrations")
    streams = {
        "sft": (demonstrate(row, demonstrations) for row in rows(task, seed=2 * seed, held_out=False)),
        "train": rows(task, seed=2 * seed + 1, held_out=False),
        "eval": distinct(rows(task, seed=0, held_out=True)),
    }
    out.mkdir(parents=True, exist_ok=True)
    for name, stream in streams.items():
        with open(out / f"{name}.jsonl", "w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in itertools.islice(stream, NUM_ROWS[name]))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=sorted(TASKS), help="Which task.")
    parser.add_argument("out", type=Path, help="Folder to write.")
    parser.add_argument("--seed", type=int, default=0, help="Another seed, other rows; the evaluation stays.")
    args = parser.parse_args()
    write_task(args.task, args.out, seed=args.seed)


if __name__ == "__main__":
    main()
