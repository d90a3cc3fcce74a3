"""The rungs that time us against those who do less: benchmarks of ours, on a model that fills a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import loops
from answers import Answer, at_least

if TYPE_CHECKING:
    from rungs import Place

ROOT = Path(__file__).resolve().parents[2]
#: Of the other side's speed: what packing, losses and metrics, or the driver and the router, may cost.
GOAL = 0.97
#: A step of 0.45 billion weights, and one that a CPU does at once.
STEP = {
    "cuda": ["--bf16", "--hidden", "1024", "--head-size", "64", "--layers", "28", "--vocabulary", "32768",
             "--samples", "64", "--tokens", "8192", "--rounds", "5"],
    "pretend": ["--rounds", "1"],
}  # fmt: skip
REQUESTS = {
    "cuda": ["--requests", "1024", "--concurrency", "256", "--prompt-words", "16", "--new-tokens", "128"],
    "pretend": ["--requests", "16", "--concurrency", "8", "--prompt-words", "4", "--new-tokens", "8", "--turns", "1"],
}
RUN_S = 800.0


def train_step(place: Place) -> Answer:
    """Our train step against a bare Megatron loop over the same packs."""
    out = place.folder / "train-speed"
    result = _run(["benchmarks/train_step_ratio.py", *STEP[place.device], "--output", str(out)], out)
    numbers = {"shape": result["shape"], "our seconds": result["ours_s"], "bare seconds": result["bare_s"]}
    numbers |= {"bare TFLOP/s (6 x parameters x tokens)": result["bare_tflops"]}
    return _against(place, "train step, share of a bare loop's speed", result["ratio"], numbers)


def generate(place: Place) -> Answer:
    """Tokens a second through driver and router against those of the same server asked directly."""
    out, model = place.folder / "generate-speed", loops.large_model(place)
    command = ["-m", "benchmarks.peers.against_sglang", "--model", str(model), *REQUESTS[place.device]]
    result = _run([*command, "--output", str(out.with_suffix(".json"))], out)
    numbers = {f"tokens/s, {side}": rate for side, rate in result["tokens_per_second"].items()}
    return _against(place, "generation, share of the bare server's speed", result["ratio"], numbers)


def _run(command: list[str], out: Path) -> dict:
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True, timeout=RUN_S)
    return json.loads(out.with_suffix(".json").read_text(encoding="utf-8"))


def _against(place: Place, what: str, ratio: float, numbers: dict) -> Answer:
    """On a CPU, with a model of no size, the ratio is told and no goal."""
    checks = [at_least(what, ratio, GOAL)] if place.on_cuda else []
    return Answer(f"{ratio:.2f} of it", place.where, numbers | {what: ratio}, checks)
