"""Whole train.py runs of the tiny model with a real engine, in any async mode, and the processor that each side took.

usage: python -m benchmarks.real_runs [--cases NAME…] [--modes NAME…] FOLDER

One trainer and one SGLang engine of models/tiny-qwen3 on two processes of this host. Answers end at one of a few tokens
or at the limit, so their lengths have a tail. Run directories stay in FOLDER, for benchmarks.async_modes,
benchmarks.simulated_modes and slime_like.observability.timeline; runs that are there are kept.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from slime_like.utils.guard import start_guarded

ROOT = Path(__file__).resolve().parents[1]
RUN_S = 400.0
GROUP = 4
#: Part of a command line -> whose process it is; the first that fits.
SIDES = (("train.py", "driver"), ("sglang", "engine"), ("ray::Train", "trainer"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class RealCase:
    """The same work in every mode. stop_tokens: of 256 or so, that end an answer; train: flags that make the trainer's
    side longer or shorter.
    """

    name: str
    batch: int
    steps: int
    max_tokens: int = 160
    stop_tokens: int = 4
    train: tuple[str, ...] = ()


CASES = {
    case.name: case
    for case in (
        RealCase(name="engine longer", batch=8, steps=24, train=("--num-steps-per-rollout", "4")),
        #: for the simulator: other batches and lengths, in mode off
        RealCase(name="small batch", batch=4, steps=12, max_tokens=80),
        RealCase(name="large batch", batch=16, steps=12),
    )
}
#: name -> flags. Engines of "partial" are on the trainer's card.
APART = ("--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1")
TOGETHER = ("--actor-num-gpus-per-node", "1", "--colocate")
MODES: dict[str, tuple[str, ...]] = {
    "off": APART,
    "one-step": (*APART, "--async-mode", "one-step"),
    "full, 1": (*APART, "--async-mode", "full", "--max-staleness", "1"),
    "full, 2": (*APART, "--async-mode", "full", "--max-staleness", "2"),
    "colocated": TOGETHER,
    "partial": (*TOGETHER, "--partial-rollout", "--over-sampling-batch-size", "12"),
}


def run_folder(case: RealCase, mode: str, folder: Path) -> Path:
    """Where a run lies."""
    return folder / f"{case.name}-{mode}".replace(", ", "-").replace(" ", "-")


def real_run(case: RealCase, mode: str, folder: Path) -> Path:
    """Its run directory, with processors.json in it: made here unless it is there."""
    run_dir = run_folder(case, mode, folder)
    if (run_dir / "processors.json").exists():
        return run_dir
    make_inputs(folder)
    answers = ["--rollout-max-response-len", str(case.max_tokens)]
    answers += ["--rollout-stop-token-ids", *(str(10 + number) for number in range(case.stop_tokens))]
    size = ["--rollout-batch-size", str(case.batch), "--n-samples-per-prompt", str(GROUP)]
    size += ["--num-rollout", str(case.steps), "--log-samples", "1000"]
    # As many requests at a time as the batch of mode off has.
    size += ["--sglang-server-concurrency", str(case.batch * GROUP)]
    data = ["--hf-checkpoint", str(folder / "model"), "--prompt-data", str(folder / "data" / "train.jsonl")]
    data += ["--input-key", "prompt", "--label-key", "label", "--apply-chat-template", "--rm-type", "exact"]
    learn = ["--advantage-estimator", "grpo", "--lr", "1e-5", "--use-dynamic-batch-size"]
    learn += ["--max-tokens-per-gpu", "1024"]
    command = [sys.executable, str(ROOT / "train.py"), *data, *answers, *size, *learn, *case.train, *MODES[mode]]
    command += ["--verify-weight-sync-interval", "0", "--run-dir", str(run_dir)]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1", "RAY_ADDRESS": "local", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1",
        "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }  # fmt: skip
    log = folder / f"{run_dir.name}.log"
    process = start_guarded(command, env=environment, log_path=str(log), cwd=str(ROOT))  # it ends with this process
    meter, deadline = ProcessorMeter(process.pid), time.monotonic() + RUN_S
    try:
        while (status := process.poll()) is None and time.monotonic() < deadline:
            time.sleep(0.2)
    finally:
        samples = meter.stop()
        process.close(grace_s=30.0)
    if status != 0:
        what = f"did not end within {RUN_S:g} s" if status is None else f"ended with status {status}"
        raise SystemExit(f"{' '.join(command)}\n{what}:\n{process.log_tail(60)}")
    (run_dir / "processors.json").write_text(json.dumps(samples) + "\n", encoding="utf-8")
    return run_dir


def make_inputs(folder: Path) -> None:
    """The tiny model with weights from a seed, and prompts."""
    folder.mkdir(parents=True, exist_ok=True)
    scripts = ((folder / "model", "make_tiny_model.py", ()), (folder / "data", "make_tiny_data.py", ("sort4",)))
    for target, script, words in scripts:
        if not target.exists():
            command = [sys.executable, str(ROOT / "scripts" / script), *words, str(target), "--seed", "0"]
            subprocess.run(command, check=True, capture_output=True, timeout=120)


class ProcessorMeter:
    """Every half second: what the processes below one have used of processors so far, by side."""

    def __init__(self, pid: int):
        self._root, self._over = psutil.Process(pid), threading.Event()
        self._used: dict[tuple[int, float], tuple[str, float]] = {}
        self._samples: list[dict[str, float]] = []
        self._thread = threading.Thread(target=self._run, name="processor meter", daemon=True)
        self._thread.start()

    def stop(self) -> list[dict[str, float]]:
        """The samples: {"time": unix seconds, side: processor seconds}; side "host" is all of the host's."""
        self._over.set()
        self._thread.join(10.0)
        return self._samples

    def _run(self) -> None:
        while not self._over.wait(0.5):
            self._sample()

    def _sample(self) -> None:
        try:
            processes = [self._root, *self._root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return
        for process in processes:
            try:
                with process.oneshot():
                    times, line = process.cpu_times(), " ".join(process.cmdline())
                    key = (process.pid, process.create_time())
            except psutil.Error:
                continue  # it ended between two looks
            side = next((name for word, name in SIDES if word in line), "other")
            self._used[key] = (side, times.user + times.system)
        busy = psutil.cpu_times()
        sample = {"time": time.time(), "host": busy.user + busy.nice + busy.system}
        for side, seconds in self._used.values():
            sample[side] = sample.get(side, 0.0) + seconds
        self._samples.append(sample)


def used_between(samples: Sequence[Mapping[str, float]], begin: float, end: float) -> dict[str, float]:
    """Processor seconds by side from one moment (unix seconds) to another, read off between the samples.

    Example: samples at 0 and 10 s of 0 and 5 s of an engine; from 2 to 4 s it used 1 s.
    """
    times = [sample["time"] for sample in samples]

    def at(side: str, moment: float) -> float:
        after = next((number for number, when in enumerate(times) if when >= moment), len(times) - 1)
        before = max(0, after - 1)
        low, high = samples[before].get(side, 0.0), samples[after].get(side, 0.0)
        span = times[after] - times[before]
        share = min(1.0, (moment - times[before]) / span) if span > 0 else 1.0
        return low + share * (high - low)

    sides = {side for sample in samples for side in sample} - {"time"}
    return {side: at(side, end) - at(side, begin) for side in sorted(sides)}


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cases", nargs="+", default=list(CASES)[:1], choices=list(CASES), help="Which.")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES), help="Which; all by default.")
    args = parser.parse_args(argv)
    for name in args.cases:
        for mode in args.modes:
            started = time.monotonic()
            run_dir = real_run(CASES[name], mode, args.folder)
            load = os.getloadavg()[0]
            print(f"{run_dir}: {time.monotonic() - started:.0f} s, load average {load:.2f}", flush=True)


if __name__ == "__main__":
    main()
