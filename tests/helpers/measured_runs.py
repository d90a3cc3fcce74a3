"""Run directories as a run leaves them, with the numbers that a test wants."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path


def write_run(
    folder: Path,
    lengths: Sequence[Sequence[float]],
    *,
    group_size: int = 1,
    prompt_tokens: float = 10.0,
    generate_s: Callable[[Sequence[float]], float],
    train_s: Callable[[float], float],
    engines: int = 1,
    log: bool = True,
) -> str:
    """A run directory. lengths: of every step's answers; generate_s of them, train_s of a step's tokens. log: answers
    are in samples/. Syncs take 0.2 s, the driver 0.05 s.
    """
    (folder / "samples").mkdir(parents=True)
    config = {
        "rollout": {"rollout_batch_size": len(lengths[0]) // group_size, "n_samples_per_prompt": group_size},
        "engine": {"sglang_server_concurrency": 512},
        "sync": {},
    }
    plan = {
        "mode": "disaggregated",
        "roles": {"actor": {"num_gpus": 1}},
        "engines": [{"bundles": [1 + index]} for index in range(engines)],
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "plan.json").write_text(json.dumps(plan))
    with open(folder / "metrics.jsonl", "w", encoding="utf-8") as file:
        for step, answers in enumerate(lengths):
            total = sum(answers)
            tokens = total + prompt_tokens * len(answers)
            times = {"generate": generate_s(answers), "train": train_s(tokens), "sync": 0.2, "overhead": 0.05}
            rollout = {
                "rollout/response_tokens_mean": total / len(answers),
                "rollout/response_tokens_max": max(answers),
                "rollout/tokens": total,
                "rollout/generated_tokens": total,
                "rollout/truncated_ratio": 0.0,
            }
            lines = [
                {"kind": "rollout", **rollout},
                {"kind": "train", "train/tokens": tokens},
                {
                    "kind": "step",
                    "step/seconds": sum(times.values()),
                    **{f"step/{name}_seconds": value for name, value in times.items()},
                },
            ]
            for line in lines:
                file.write(json.dumps({"step": step, "time": 0.0, **line}) + "\n")
            if log:
                rows = [
                    {"prompt_index": i // group_size, "sample_index": i % group_size, "trained_tokens": length}
                    for i, length in enumerate(answers)
                ]
                text = "".join(json.dumps(row) + "\n" for row in rows)
                (folder / "samples" / f"rollout-{step}.jsonl").write_text(text)
    return str(folder)
