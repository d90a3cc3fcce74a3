"""Write conversations with a tool: OUT, a Parquet file with the columns messages and tools.

usage: make_conversations.py OUT [--rows 640] [--seed 0]

A row has two questions ("7+8"); to each the assistant thinks, calls the tool, reads its result, and says it.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import pyarrow
import pyarrow.parquet

CALCULATOR = {"type": "function", "function": {"name": "calc", "description": "a sum"}}


def question(rng: random.Random, number: int) -> list[dict]:
    """What is asked, the call, the tool's result, and the answer."""
    left, right = rng.randint(0, 9), rng.randint(0, 9)
    text, call_id = f"{left}+{right}", f"call_{number}"
    call = {
        "id": call_id,
        "type": "function",
        "function": {"name": "calc", "arguments": json.dumps({"expression": text})},
    }
    return [
        {"role": "user", "content": text},
        {"role": "assistant", "content": None, "reasoning_content": "ask", "tool_calls": [call]},
        {"role": "tool", "content": str(left + right), "tool_call_id": call_id},
        {"role": "assistant", "content": str(left + right)},
    ]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="Parquet file to write.")
    parser.add_argument("--rows", type=int, default=640, help="Conversations.")
    parser.add_argument("--seed", type=int, default=0, help="Another seed, other rows.")
    args = parser.parse_args()
    rng = random.Random(f"conversations/{args.seed}")
    rows = [{"messages": question(rng, 1) + question(rng, 2), "tools": [CALCULATOR]} for _ in range(args.rows)]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), args.out)


if __name__ == "__main__":
    main()
