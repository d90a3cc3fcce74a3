"""Say what scripts/run-smollm2.sh learned: its curve, held-out pass rates against baselines, answers before and after.

usage: report.py RUN [--shown 6] [--judged-from 20]

Answers are those of plain transformers, greedy, with the folders that the warm-up and GRPO wrote. RUN/report.json holds
it all. Fails if the held-out pass rate did not rise above the warm-up's and the best constant answer's (shorter runs
than --judged-from rollouts are not judged).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from slime_like.rollout.agents.adapters.reasoning_gym import score

MOST_NEW_TOKENS = 10


def answers(folder: Path, conversations: Sequence[list[dict]]) -> list[str]:
    """What the model of an HF folder says to each conversation, greedily, in float32."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    said = []
    for messages in conversations:
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        with torch.no_grad():
            tokens = model.generate(**prompt, max_new_tokens=MOST_NEW_TOKENS, do_sample=False)
        said.append(tokenizer.decode(tokens[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))
    return said


def read_lines(path: Path) -> list[dict]:
    """The rows of a JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def of_metrics(lines: Sequence[dict]) -> dict:
    """What metrics.jsonl says of a run: rewards by rollout, held-out pass rates, mismatch with the engine, seconds."""
    passes = [line["eval/held-out/pass@1"] for line in lines if line["kind"] == "eval"]
    gaps = [line["train/logprob_abs_diff"] for line in lines if line["kind"] == "train"]
    seconds = {
        name: round(statistics.fmean(line[name] for line in lines if name in line), 2)
        for name in ("step/seconds", "rollout/seconds", "train/seconds", "sync/seconds")
    }
    return {
        "rewards": [round(line["rollout/reward_mean"], 4) for line in lines if line["kind"] == "rollout"],
        "pass": {"before": passes[0], "after": passes[-1]},
        "logprob_abs_diff": {"mean": statistics.fmean(gaps), "largest": max(gaps)},
        "seconds": seconds,
    }


def dialogues(run: Path, rows: Sequence[dict]) -> list[dict]:
    """Question, label, and what is said to it before and after, with its score."""
    conversations = [row["prompt"] for row in rows]
    before, after = (answers(run / name / "hf", conversations) for name in ("warm-up", "grpo"))
    lines = []
    for row, *said in zip(rows, before, after, strict=True):
        source = row["metadata"]["reasoning_gym"]
        scores = [score(source["task"], source["options"], source["entry"], text) for text in said]
        question = row["prompt"][-1]["content"]
        lines.append({"question": question, "label": row["label"], "said": said, "scores": scores})
    return lines


def show(report: dict) -> None:
    """The report for the console."""
    print("reward by rollout  " + " ".join(f"{reward:.2f}" for reward in report["rewards"]))
    passed, floor = report["pass"], report["baselines"]
    print(f"held-out pass rate {passed['before']:.3f} after the warm-up -> {passed['after']:.3f} after GRPO")
    print(f"  best constant answer {floor['constant']:.3f}, a name of the text at random {floor['random']:.3f}")
    gap = report["logprob_abs_diff"]
    print(f"trainer against engine, |log-prob difference|: mean {gap['mean']:.1e}, largest mean {gap['largest']:.1e}")
    print("seconds a step     " + "  ".join(f"{name} {value}" for name, value in report["seconds"].items()))
    for line in report["answers"]:
        print(
            f"\n{line['question']}\n  right: {line['label']}   before: {line['said'][0]!r}   after: {line['said'][1]!r}"
        )


def main(argv: list[str] | None = None) -> int:
    """Command line; returns 0, or 1 if the run was judged and did not learn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="Directory of the whole run, with data, warm-up and grpo in it.")
    parser.add_argument("--shown", type=int, default=6, help="Held-out questions to answer before and after.")
    parser.add_argument("--judged-from", type=int, default=20, help="Do not judge a run of fewer rollouts.")
    args = parser.parse_args(argv)
    transformers_logging.disable_progress_bar()
    rows = read_lines(args.run / "data/eval.jsonl")
    report = {"held_out": len(rows)} | of_metrics(read_lines(args.run / "grpo/metrics.jsonl"))
    report["baselines"] = json.loads((args.run / "data/baselines.json").read_text(encoding="utf-8"))
    report["answers"] = dialogues(args.run, rows[: args.shown])
    (args.run / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    show(report)
    least = max(report["pass"]["before"], report["baselines"]["constant"])
    if len(report["rewards"]) < args.judged_from:
        print(f"\nNot judged: {len(report['rewards'])} rollouts are fewer than {args.judged_from}.")
    elif report["pass"]["after"] <= least:
        print(
            f"\nreport: the held-out pass rate {report['pass']['after']:.3f} is not above {least:.3f}.", file=sys.stderr
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
