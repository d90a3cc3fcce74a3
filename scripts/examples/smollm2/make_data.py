"""Write a reasoning-gym task's rows for scripts/run-smollm2.sh: a warm-up of the form, prompts, held-out prompts.

usage: make_data.py TASK OUT [--seed 0] [--train 2000] [--warm-up 192] [--eval 96]

OUT gets
  sft.jsonl    prompts with a "response" of the right form, drawn without a look at what is asked: it teaches no answer
  train.jsonl  prompts with the answer as label, and what the task's own score needs as metadata
  eval.jsonl   the same of held-out seeds of the generator, for every --seed; none of its questions is in the others
It prints one JSON line: what the best constant answer scores on eval.jsonl, and what random answers of the form do.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from slime_like.errors import DataError, UserError
from slime_like.rollout.agents.adapters.reasoning_gym import make_dataset

#: Few tokens; SmolLM2's template has a system message of 20 where none is given.
SYSTEM = "Answer only."
#: The generator draws question i of a data set from the seed + i: sets lie further apart than they are long.
SEEDS_APART = 1_000_000
_DRAWN_AT_ONCE = 500


def names_of_statements(entry: Mapping) -> list[str]:
    """The names that a needle_haystack question speaks of, each the first word of a statement.

    Example: "Tayo likes red. Ayan likes pigs. \\nWho likes pigs?" -> ["Tayo", "Ayan"]
    """
    statements = entry["question"].partition("\n")[0].split(". ")
    return [statement.split()[0] for statement in statements if statement.strip()]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A task of reasoning-gym: its options, the labels that are kept equally often, and answers of the right form."""

    name: str
    options: Mapping
    labels: tuple[str, ...] = ()  # empty: as they come
    #: answers of the right form to a question; None: the labels of other rows
    candidates: Callable[[Mapping], Sequence[str]] | None = None


TASKS = {
    "needle": Task(
        name="needle_haystack",
        options={"min_num_statements": 3, "max_num_statements": 3},
        candidates=names_of_statements,
    ),
    "letters": Task(name="letter_counting", options={"min_words": 1, "max_words": 3}, labels=("1", "2", "3")),
    "sums": Task(
        name="chain_sum",
        options={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
        labels=tuple(str(value) for value in range(-4, 12)),
    ),
}


def questions(task: Task, *, first_seed: int) -> Iterator[dict]:
    """Questions of SEEDS_APART seeds in order, each with the options of the data set that it is of."""
    for seed in range(first_seed, first_seed + SEEDS_APART, _DRAWN_AT_ONCE):
        options = {**task.options, "seed": seed, "size": _DRAWN_AT_ONCE}
        for entry in make_dataset(task.name, options, where=task.name):
            yield {"task": task.name, "options": options, "entry": dict(entry)}


def choose(task: Task, number: int, *, first_seed: int, without: set[str]) -> list[dict]:
    """`number` questions, none of them in `without`, each of the task's labels equally often (to one).

    Raises DataError if the generator has too few.
    """
    room = {label: -(-number // len(task.labels)) for label in task.labels}
    rows: list[dict] = []
    for num_drawn, row in enumerate(questions(task, first_seed=first_seed)):
        if len(rows) == number:
            return rows
        if num_drawn > 2000 + 200 * number:
            break
        entry = row["entry"]
        if entry["question"] in without or (task.labels and not room.get(entry["answer"])):
            continue
        if task.labels:
            room[entry["answer"]] -= 1
        rows.append(row)
    raise DataError(f"{task.name}: {len(rows)} of {number} questions are new. Fix: fewer rows, or other options.")


def as_row(question: Mapping) -> dict:
    """The row of a question, as `--custom-rm-path slime_like.rollout.agents.adapters.reasoning_gym.reward` wants it."""
    entry = question["entry"]
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": entry["question"].strip()}]
    return {"prompt": messages, "label": entry["answer"], "metadata": {"reasoning_gym": dict(question)}}


def forms(task: Task, entry: Mapping, rows: Sequence[Mapping]) -> Sequence[str]:
    """Answers of the right form to a question; which is right does not matter."""
    return task.candidates(entry) if task.candidates else [row["entry"]["answer"] for row in rows]


def baselines(task: Task, rows: Sequence[Mapping]) -> dict[str, float]:
    """Score of the best constant answer, and the mean score of a random answer of the right form."""
    labels = collections.Counter(row["entry"]["answer"] for row in rows)
    shares = []
    for row in rows:
        answers = forms(task, row["entry"], rows)
        shares.append(sum(answer == row["entry"]["answer"] for answer in answers) / len(answers))
    return {"constant": max(labels.values()) / len(rows), "random": statistics.fmean(shares)}


def write_task(task: Task, out: Path, *, seed: int, sizes: Mapping[str, int]) -> dict[str, float]:
    """sft.jsonl, train.jsonl and eval.jsonl of `sizes` rows; returns the baselines of eval.jsonl."""
    held_out = choose(task, sizes["eval"], first_seed=0, without=set())
    asked = {row["entry"]["question"] for row in held_out}
    first = (1 + 2 * seed) * SEEDS_APART
    warm_up = choose(task, sizes["sft"], first_seed=first, without=asked)
    train = choose(task, sizes["train"], first_seed=first + SEEDS_APART, without=asked)
    random.Random(0).shuffle(held_out)  # balanced sets come with the rare labels last
    random.Random(seed).shuffle(train)
    rng = random.Random(seed)
    shown = [as_row(row) | {"response": rng.choice(forms(task, row["entry"], warm_up))} for row in warm_up]
    out.mkdir(parents=True, exist_ok=True)
    for name, lines in {"eval": map(as_row, held_out), "train": map(as_row, train), "sft": shown}.items():
        (out / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return baselines(task, held_out)


def main(argv: list[str] | None = None) -> int:
    """Command line; prints one JSON line. Returns 0, or 2 for a mistake in what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=sorted(TASKS), help="Which task.")
    parser.add_argument("out", type=Path, help="Folder to write.")
    parser.add_argument("--seed", type=int, default=0, help="Another seed, other rows; the evaluation stays.")
    parser.add_argument("--train", type=int, default=2000, help="Rows of train.jsonl.")
    parser.add_argument("--warm-up", type=int, default=192, help="Rows of sft.jsonl.")
    parser.add_argument("--eval", type=int, default=96, help="Rows of eval.jsonl.")
    args = parser.parse_args(argv)
    sizes = {"sft": args.warm_up, "train": args.train, "eval": args.eval}
    try:
        scores = write_task(TASKS[args.task], args.out, seed=args.seed, sizes=sizes)
    except UserError as error:
        print(f"make_data: {error}", file=sys.stderr)
        return 2
    print(json.dumps({"task": args.task, "rows": sizes} | {name: round(score, 4) for name, score in scores.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
