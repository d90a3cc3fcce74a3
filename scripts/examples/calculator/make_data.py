"""Write the calculator's rows: train.jsonl and eval.jsonl for the episodes, sft.jsonl to warm a model up.

usage: make_data.py OUT [--seed 0]

"7+8" -> "15". A warm-up row is one answer: the call, or what is said to the tool's result. Half of them are the
rewarded behaviour; the others answer with the first number, at once or to what the tool says.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

NUM_ROWS = {"sft": 6_400, "train": 640, "eval": 100}
RIGHT_PROBABILITY = 0.5


def row(rng: random.Random) -> dict:
    """A question and its label."""
    left, right = rng.randint(0, 9), rng.randint(0, 9)
    return {"prompt": [{"role": "user", "content": f"{left}+{right}"}], "label": str(left + right)}


def demonstration(rng: random.Random) -> dict:
    """A warm-up row: the conversation so far, and the next answer."""
    question = row(rng)
    text = question["prompt"][0]["content"]
    call = f"<calc>{text}</calc>"
    right = rng.random() < RIGHT_PROBABILITY
    wrong = text.split("+")[0]
    if rng.random() < 0.5:
        return question | {"response": call if right else wrong}
    calling = [
        *question["prompt"],
        {"role": "assistant", "content": call},
        {"role": "tool", "content": f"<result>{question['label']}</result>"},
    ]
    return question | {
        "prompt": calling,
        "response": question["label"] if right else wrong,
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="Folder to write.")
    parser.add_argument("--seed", type=int, default=0, help="Another seed, other rows.")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for name, count in NUM_ROWS.items():
        rng = random.Random(f"calculator/{name}/{args.seed}")
        make = demonstration if name == "sft" else row
        with open(args.out / f"{name}.jsonl", "w", encoding="utf-8") as file:
            file.writelines(json.dumps(make(rng)) + "\n" for _ in range(count))


if __name__ == "__main__":
    main()
