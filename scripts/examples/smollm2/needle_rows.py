"""Write the rows of scripts/run-smollm2.sh: who, of several people in a text, does what is asked for (reasoning-gym).

usage: needle_rows.py OUT [--seed 0] [--statements 3] [--train 2000] [--warm-up 192] [--eval 64]

OUT gets
  sft.jsonl    texts with another question ("Who is named?") and a "response" of the right form: a name out of the text
               at random, so that the warm-up shows what an answer looks like, and neither the task nor one answer of it
  train.jsonl  prompts with the answer as label, and what the task's own score needs as metadata
  eval.jsonl   the same of held-out seeds of the generator, for every --seed; none of its texts is in the others
  baselines.json   what scores on eval.jsonl without reading: the best constant answer, a name out of the text at random
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from slime_like.errors import DataError, UserError
from slime_like.rollout.agents.adapters.reasoning_gym import make_dataset

TASK = "needle_haystack"
#: Few tokens; SmolLM2's template has a system message of 20 where none is given.
SYSTEM = "Answer only."
WARM_UP_QUESTION = "Who is named? Reply only with a name."
#: The generator draws question i of a data set from the seed + i: sets lie further apart than they are long.
SEEDS_APART = 1_000_000
_DRAWN_AT_ONCE = 500


def text_of(entry: Mapping) -> str:
    """What stands before the question.

    Example: "Tayo likes red. Ayan likes pigs. \\nWho likes pigs?" -> "Tayo likes red. Ayan likes pigs."
    """
    return entry["question"].partition("\n")[0].strip()


def names_of(entry: Mapping) -> list[str]:
    """The names in the text, each the first word of a statement.

    Example: "Tayo likes red. Ayan likes pigs. \\nWho likes pigs?" -> ["Tayo", "Ayan"]
    """
    return [statement.split()[0] for statement in text_of(entry).split(". ")]


def questions(statements: int, *, first_seed: int) -> Iterator[dict]:
    """Questions of SEEDS_APART seeds in order, each with the options of the data set that it is of."""
    for seed in range(first_seed, first_seed + SEEDS_APART, _DRAWN_AT_ONCE):
        options = {"min_num_statements": statements, "max_num_statements": statements}
        options |= {"seed": seed, "size": _DRAWN_AT_ONCE}
        for entry in make_dataset(TASK, options, where=TASK):
            yield {"task": TASK, "options": options, "entry": dict(entry)}


def choose(stream: Iterator[dict], number: int, *, without: set[str]) -> list[dict]:
    """The first `number` questions whose texts are not in `without`. Raises DataError if there are fewer."""
    rows: list[dict] = []
    for row in stream:
        if len(rows) == number:
            return rows
        if text_of(row["entry"]) not in without:
            rows.append(row)
    raise DataError(f"{TASK}: {len(rows)} of {number} texts are new. Fix: fewer rows, or more --statements.")


def as_row(question: Mapping) -> dict:
    """The row of a question, as `--custom-rm-path slime_like.rollout.agents.adapters.reasoning_gym.reward` wants it."""
    entry = question["entry"]
    row = _asked(entry["question"].strip())
    return row | {"label": entry["answer"], "metadata": {"reasoning_gym": dict(question)}}


def as_demonstration(question: Mapping, rng: random.Random) -> dict:
    """A row of the warm-up."""
    entry = question["entry"]
    row = _asked(f"{text_of(entry)}\n{WARM_UP_QUESTION}")
    return row | {"label": "", "response": rng.choice(names_of(entry))}


def _asked(question: str) -> dict:
    return {"prompt": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]}


def baselines(entries: Sequence[Mapping]) -> dict[str, float]:
    """Score of the best constant answer, and the mean score of a random name out of the text."""
    labels = collections.Counter(entry["answer"] for entry in entries)
    shares = [names_of(entry).count(entry["answer"]) / len(names_of(entry)) for entry in entries]
    return {"constant": max(labels.values()) / len(entries), "random": statistics.fmean(shares)}


def write(out: Path, *, seed: int, statements: int, sizes: Mapping[str, int]) -> dict[str, float]:
    """sft.jsonl, train.jsonl and eval.jsonl of `sizes` rows, and baselines.json, whose content is returned."""
    first = (1 + 2 * seed) * SEEDS_APART
    held_out = choose(questions(statements, first_seed=0), sizes["eval"], without=set())
    texts = {text_of(row["entry"]) for row in held_out}
    warm_up = choose(questions(statements, first_seed=first), sizes["sft"], without=texts)
    train = choose(questions(statements, first_seed=first + SEEDS_APART), sizes["train"], without=texts)
    rng = random.Random(seed)
    files = {
        "eval": [as_row(row) for row in held_out],
        "train": [as_row(row) for row in train],
        "sft": [as_demonstration(row, rng) for row in warm_up],
    }
    out.mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    scores = baselines([row["entry"] for row in held_out])
    (out / "baselines.json").write_text(json.dumps(scores) + "\n", encoding="utf-8")
    return scores


def main(argv: list[str] | None = None) -> int:
    """Command line; prints one JSON line. Returns 0, or 2 for a mistake in what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="Folder to write.")
    parser.add_argument("--seed", type=int, default=0, help="Another seed, other rows; the evaluation stays.")
    parser.add_argument("--statements", type=int, default=3, help="People in a text.")
    parser.add_argument("--train", type=int, default=2000, help="Rows of train.jsonl.")
    parser.add_argument("--warm-up", type=int, default=192, help="Rows of sft.jsonl.")
    parser.add_argument("--eval", type=int, default=64, help="Rows of eval.jsonl.")
    args = parser.parse_args(argv)
    sizes = {"sft": args.warm_up, "train": args.train, "eval": args.eval}
    try:
        scores = write(args.out, seed=args.seed, statements=args.statements, sizes=sizes)
    except UserError as error:
        print(f"needle_rows: {error}", file=sys.stderr)
        return 2
    print(json.dumps({"rows": sizes} | {name: round(score, 4) for name, score in scores.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
