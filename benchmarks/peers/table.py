"""The table of benchmarks/results/peers.md from the files that the comparisons wrote.

usage: python -m benchmarks.peers.table benchmarks/results/peers/*.json > benchmarks/results/peers.md
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

HEAD = """| against | work | ours | theirs | ratio | goal | |
|---|---|---|---|---|---|---|"""


def rows(result: dict) -> list[str]:
    """One comparison, as rows."""
    if result.get("what") != "driver":
        return [_one(result)]
    return [
        _row(
            "slime's rollout driver",
            f"{row['samples']} samples of 512 tokens, scripted engine",
            *(
                f"{row[who]['per_second']:.0f} samples/s ({row[who]['cpu_us']:.0f} us of CPU)"
                for who in ("ours", "slime")
            ),
            row["ratio"],
            result["goal"],
            higher=True,
        )
        for row in result["rows"]
    ]


def _one(result: dict) -> str:
    if "tokens_per_second" in result:
        work = (
            f"{result['requests']} requests of {result['prompt_tokens']} + {result['new_tokens']} tokens,"
            f" {result['concurrency']} at a time, {result['model']}"
        )
        ours, theirs = (f"{result['tokens_per_second'][name]:.0f} tokens/s" for name in ("ours", "bare"))
        return _row("raw SGLang, same server", work, ours, theirs, result["ratio"], result["goal"], higher=True)
    work = f"{result['shape']} of {result['model']}, {result['hardware']}"
    if result["what"] == "loss":
        ours, theirs = (
            f"loss {result[name]['loss']:.7g}, gradient {result[name]['grad_norm']:.7g}" for name in ("ours", "trl")
        )
        return _row("TRL, loss apart", work, ours, theirs, result["apart"]["loss"], result["goal"], higher=False)
    ours, theirs = (
        f"{result[name]['step_s']:.1f} s a step ({result[name]['generate_s']:.1f} generating, "
        f"{result[name]['train_s']:.1f} training)"
        for name in ("ours", "trl")
    )
    return _row("TRL GRPOTrainer", work, ours, theirs, result["faster"]["step_s"], result["goal"], higher=True)


def _row(against: str, work: str, ours: str, theirs: str, ratio: float, goal: float | None, *, higher: bool) -> str:
    met = "" if goal is None else "met" if (ratio >= goal if higher else ratio <= goal) else "MISSED"
    aim = "" if goal is None else f"{'≥' if higher else '≤'} {goal:g}"
    shown = f"{ratio:.2f}" if higher else f"{ratio:.1e}"
    return f"| {against} | {work} | {ours} | {theirs} | {shown} | {aim} | {met} |"


def main() -> None:
    """Command line."""
    results = [json.loads(Path(name).read_text(encoding="utf-8")) for name in sys.argv[1:]]
    hardware = sorted({result["hardware"] for result in results})
    print("; ".join(hardware), "", HEAD, *(row for result in results for row in rows(result)), sep="\n")


if __name__ == "__main__":
    main()
