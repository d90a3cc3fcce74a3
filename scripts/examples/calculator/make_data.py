"""Write the calculator's rows: train.jsonl and eval.jsonl for the episodes, sft.jsonl to warm a model up.

usage: make_data.py OUT [--seed 0]

"7+8" -> "15", "7+8+3" -> "18": the calculator adds two numbers at a time, so that the second sum takes two calls and
an answer. A warm-up row is the next answer of a conversation: with probability 0.6 the right one, which is a call as
long as there is something to add, and then what the tool said last; else the question's first number.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

NUM_ROWS = {"sft": 12_800, "train": 640, "eval": 100}
RIGHT_PROBABILITY = 0.6


def row(rng: random.Random) -> dict:
    """A question of two or three digits, and its label."""
    digits = [rng.randint(0, 9) for _ in range(rng.choice((2, 3)))]
    content = "+".join(map(str, digits))
    return {"prompt": [{"role": "user", "content": content}], "label": str(sum(digits))}


def calls(question: str) -> list[tuple[str, str]]:
    """What to ask the calculator, and what it says.

    Example: "7+8+3" -> [("<calc>7+8</calc>", "15"), ("<calc>15+3</calc>", "18")]
    """
    first, *others = map(int, question.split("+"))
    steps = []
    for number in others:
        steps.append((f"<calc>{first}+{number}</calc>", str(first + number)))
        first += number
    return steps


def demonstration(rng: random.Random) -> dict:
    """A warm-up row: the conversation so far, and the next answer."""
    question = row(rng)
    text = question["prompt"][0]["content"]
    steps = calls(text)
    num_past = rng.randint(0, len(steps))
    conversation = list(question["prompt"])
    for call, result in steps[:num_past]:
        conversation.append({"role": "assistant", "content": call})
        conversation.append({"role": "tool", "content": f"<result>{result}</result>"})
    right = steps[num_past][0] if num_past < len(steps) else question["label"]
    response = right if rng.random() < RIGHT_PROBABILITY else text.split("+")[0]
    return {"prompt": conversation, "label": question["label"], "response": response}


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
