"""What runs of scripts/run-smollm2.sh learned, as one page: a table, the curves, answers before and after.

usage: python -m benchmarks.real_model RUN… [--host TEXT] [--answers N] > benchmarks/results/real-model.md

RUN is a directory of the script's, with its report.json. For three seeds of each form:
  for s in 0 1 2; do SEED=$s RUN=runs/real/plain-$s bash scripts/run-smollm2.sh; done
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from scripts.show_rise import rise
from slime_like.observability.console import sparkline

HEAD = (
    "run", "weights", "seed", "rollouts", "reward, first 3 -> last 5", "held-out before -> after", "best constant",
    "random", "trainer against engine", "seconds a step",
)  # fmt: skip


def form_of(config: Mapping) -> str:
    """What was trained in which type, and what the engine kept: as the run's own config.json has it."""
    rank = config["lora"]["lora_rank"]
    kept = config["sync"].get("rollout_quantization", "none")
    words = ["bf16" if config["optimizer"]["bf16"] else "fp32", f"LoRA {rank}" if rank else "whole"]
    return ", ".join(words + ([f"engine {kept}"] if kept != "none" else []))


def row(name: str, report: Mapping, config: Mapping) -> tuple[str, ...]:
    """A run's line of the table."""
    first, last = rise(report["rewards"])
    passed, floor = report["pass"], report["baselines"]
    return (
        name, form_of(config), str(config["observability"]["seed"]), str(len(report["rewards"])),
        f"{first:.2f} -> {last:.2f}", f"{passed['before']:.3f} -> {passed['after']:.3f}", f"{floor['constant']:.3f}",
        f"{floor['random']:.3f}", f"{report['logprob_abs_diff']['mean']:.1e}",
        f"{report['seconds']['step/seconds']:.0f}",
    )  # fmt: skip


def page(runs: Sequence[tuple[str, Mapping, Mapping]], host: str, most_answers: int | None = None) -> str:
    """The page of (name, report, config) of each run; most_answers: of a run, None: all."""
    lines = [host, ""] if host else []
    lines += [f"| {' | '.join(HEAD)} |", "|" + "---|" * len(HEAD)]
    lines += [f"| {' | '.join(row(*run))} |" for run in runs]
    lines += ["", "## Reward by rollout", "", "```"]
    for name, report, _ in runs:
        rewards = report["rewards"]
        bars = sparkline(rewards, width=40, low=0.0, high=1.0)
        lines.append(f"{name:12} {bars}  {' '.join(f'{reward:.2f}' for reward in rewards)}")
    lines += ["```", "", "## Answers before and after, greedy, of plain transformers"]
    for name, report, _ in runs:
        lines += ["", f"### {name}", "", "| question | right | before | after |", "|---|---|---|---|"]
        for answer in report["answers"][:most_answers]:
            cells = [answer["question"], answer["label"], *answer["said"]]
            lines.append("| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Command line; prints the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="Directories of scripts/run-smollm2.sh.")
    parser.add_argument("--host", default="", help="What it ran on, and what else ran there.")
    parser.add_argument("--answers", type=int, help="The most that are shown of a run; default: all that it has.")
    args = parser.parse_args(argv)
    runs = []
    for run in args.runs:
        files = (run / "report.json", run / "grpo/config.json")
        missing = [str(file) for file in files if not file.is_file()]
        if missing:
            print(f"real_model: no {', no '.join(missing)}: did the run end?", file=sys.stderr)
            return 2
        runs.append((run.name, *(json.loads(file.read_text(encoding="utf-8")) for file in files)))
    print(page(runs, args.host, args.answers), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
