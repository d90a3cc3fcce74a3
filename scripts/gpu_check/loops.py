"""The rungs that are whole runs of train.py."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from answers import Answer, at_least, at_most
from memory import Meter

from benchmarks import fixed_seed_losses as recorded

if TYPE_CHECKING:
    from rungs import Place

ROOT = Path(__file__).resolve().parents[2]
TP2, PP2 = recorded.TP2, recorded.PP2
GIB = 2**30

FLAGS = [
    "--input-key", "prompt", "--label-key", "label", "--apply-chat-template", "--rollout-shuffle",
    "--custom-rm-path", "scripts.examples.rewards.even_tokens", "--num-rollout", "3", "--rollout-batch-size", "8",
    "--n-samples-per-prompt", "4", "--rollout-max-response-len", "16", "--use-dynamic-batch-size",
    "--max-tokens-per-gpu", "4096", "--advantage-estimator", "grpo", "--lr", "1e-5", "--verify-weight-sync-interval",
    "1", "--actor-num-gpus-per-node", "1",
]  # fmt: skip
#: What engines and trainers of the small model may differ by, mean over tokens.
LOGPROB_TOLERANCE = {"cuda": 2e-2, "pretend": 1e-4}
#: Bytes of a sync over those of a copy on the device: the goal where there is one.
IPC_GOAL = 0.5
RUN_S = 800.0
#: How soon a run must have ended after an engine died.
DEATH_S = 150.0
#: A shape of 0.3 billion parameters, and one that any kernel takes: heads of 64 channels.
LARGE = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 24, "num_attention_heads": 16,
         "num_key_value_heads": 8, "head_dim": 64}  # fmt: skip
SMALL = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}


def tiny_model(place: Place, name: str) -> Path:
    """A folder of recorded inputs: "model" or "moe"."""
    return _inputs(place) / name


def model_of(place: Place) -> Path:
    """What engines serve: the user's model, or one from a seed whose heads every kernel takes."""
    return Path(place.hf_checkpoint) if place.hf_checkpoint else _sized(place, "small", SMALL)


def large_model(place: Place) -> Path:
    """One that fills a GPU; on a CPU a small one."""
    return _sized(place, "large", LARGE if place.on_cuda else {})


def replay(place: Place, *flags: str) -> list[dict]:
    """Training metrics of recorded rollouts in fp32, a dict a rollout."""
    folder = _inputs(place)
    number = len(list(folder.glob("run-*")))
    return recorded.run_row(folder, number, [*recorded.REPLAY, "--no-bf16", *flags])


def colocated(place: Place) -> Answer:
    """Memory of each phase against the plan, and the log-probs of both sides."""
    run_dir, flags = place.folder / "colocate-run", [*_flags(place, model_of(place)), "--colocate"]
    with Meter(place.on_cuda) as meter:
        _train(flags, run_dir)
    metrics = _metrics(run_dir)
    differences = [line["train/logprob_abs_diff"] for line in metrics if line["kind"] == "train"]
    numbers: dict = {}
    checks = [
        at_least("train steps", len(differences), 3),
        at_most("|log-prob difference| of engine and trainer", max(differences), LOGPROB_TOLERANCE[place.device]),
    ]
    planned = _planned(run_dir)
    # A sync ends with the KV cache back, as engines have it while they generate.
    planned["sync"] = max(planned["sync"], planned["generate"])
    for phase, peak in meter.peaks(run_dir / "trace.json").items():
        numbers[f"{phase}: peak of {meter.what}, GiB (plan {planned.get(phase, 0) / GIB:.2f})"] = peak / GIB
        for name, most in meter.peaks_of_processes(run_dir / "trace.json", phase).items():
            numbers[f"{phase}: peak of {name}, GiB"] = most / GIB
        if place.on_cuda and phase in planned:
            checks.append(at_most(f"{phase}: measured over planned memory", peak / planned[phase], 1.1))
    return Answer(f"{len(differences)} steps, log-probs within {max(differences):.2g}", place.where, numbers, checks)


def sync_rate(place: Place, transport: str) -> Answer:
    """Bytes a second of proven syncs by a transport, after the first."""
    model = large_model(place)
    flags = [*_flags(place, model), "--update-weight-transport", transport]
    flags += ["--colocate"] if transport == "ipc" else ["--rollout-num-gpus", "1"]
    run_dir = place.folder / f"{transport}-run"
    _train(flags, run_dir)
    syncs = [line for line in _metrics(run_dir) if line["kind"] == "sync"]
    moving = [line["sync/send_seconds"] for line in syncs[1:]]
    rate, bound = syncs[-1]["sync/bytes"] / min(moving), copy_rate("cuda" if place.on_cuda else "cpu")
    numbers = {"bytes of a sync": syncs[-1]["sync/bytes"], "seconds of sending": [round(s, 3) for s in moving]}
    numbers |= {"seconds of the syncs with all that goes with them": [round(s["sync/seconds"], 3) for s in syncs[1:]]}
    numbers |= {"bytes/s": rate, "bytes/s of a copy on the device": bound}
    checks = [
        at_least("syncs", len(syncs), 4),
        at_least("engines proven by digest", min(line["sync/engines_proven"] for line in syncs), 1),
        at_most(
            "probe: |log-prob difference|",
            max(line["sync/probe_logprob_abs_diff"] for line in syncs),
            LOGPROB_TOLERANCE[place.device],
        ),
    ]
    if place.on_cuda and transport == "ipc":
        checks.append(at_least("share of a copy on the device", rate / bound, IPC_GOAL))
    return Answer(f"{rate / 1e9:.2f} GB/s, {rate / bound:.0%} of a copy", place.where, numbers, checks)


def killed_engine(place: Place) -> Answer:
    """Kill the engine of a run after its first step."""
    run_dir = place.folder / "killed-run"
    flags = [*_flags(place, model_of(place)), "--rollout-num-gpus", "1", "--num-rollout", "10000"]
    with _running(flags, run_dir) as run:
        _wait_for(lambda: any(line["kind"] == "step" for line in _metrics(run_dir)), run, "its first step")
        descendants = psutil.Process(run.pid).children(recursive=True)
        engines = [process for process in descendants if _serves(process)]
        for process in engines:
            process.kill()
        killed = time.monotonic()
        status = run.wait(timeout=DEATH_S)
        seconds = time.monotonic() - killed
    _, left = psutil.wait_procs(descendants, timeout=20)
    text = (place.folder / "killed-run.out").read_text(encoding="utf-8", errors="replace")
    checks = [
        at_least("engine processes killed", len(engines), 1),
        at_least("status of the run", status, 1),
        at_least("messages that name the engine", len(re.findall(r"engine 0", text)), 1),
        at_most("processes left", len(left), 0),
    ]
    return Answer(
        f"the run ended {seconds:.1f} s later with status {status}", place.where, {"seconds": seconds}, checks
    )


def copy_rate(device: str) -> float:
    """Bytes a second of one copy of 256 MiB on the device, the best of five."""
    import torch

    source = torch.ones(64 * 2**20, device=device)
    target, best = torch.empty_like(source), float("inf")
    for _ in range(5):
        if device == "cuda":
            torch.cuda.synchronize()
        started = time.monotonic()
        target.copy_(source)
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.monotonic() - started)
    return source.nbytes / best


def _inputs(place: Place) -> Path:
    """Tiny models, data and recorded rollouts, made once for all rungs."""
    folder = place.folder / "inputs"
    if not (folder / "done").is_file():
        folder.mkdir(exist_ok=True)
        recorded.make_inputs(folder)
        (folder / "done").touch()
    return folder


def _sized(place: Place, name: str, sizes: dict) -> Path:
    """A Qwen3 of these sizes from a seed, with the tiny tokenizer."""
    out, config = place.folder / "inputs" / name, place.folder / "inputs" / f"{name}-config"
    if (out / "model.safetensors").is_file():
        return out
    config.mkdir(parents=True, exist_ok=True)
    origin = json.loads((ROOT / "models/tiny-qwen3/config.json").read_text(encoding="utf-8"))
    layers = sizes.get("num_hidden_layers", origin["num_hidden_layers"])
    (config / "config.json").write_text(json.dumps(origin | sizes | {"max_window_layers": layers}), encoding="utf-8")
    command = [sys.executable, str(ROOT / "scripts/make_tiny_model.py"), str(out), "--model", str(config)]
    subprocess.run(command, check=True, timeout=300)
    return out


def _flags(place: Place, model: Path) -> list[str]:
    data = _inputs(place) / "data" / "train.jsonl"
    return [*FLAGS, "--hf-checkpoint", str(model), "--ref-load", str(model), "--prompt-data", str(data)]


def _train(flags: list[str], run_dir: Path) -> None:
    """A whole run; its output is in this rung's log. Raises CalledProcessError or TimeoutExpired."""
    command = [sys.executable, str(ROOT / "train.py"), *flags, "--run-dir", str(run_dir)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=RUN_S)


@contextlib.contextmanager
def _running(flags: list[str], run_dir: Path) -> Iterator[subprocess.Popen]:
    command = [sys.executable, str(ROOT / "train.py"), *flags, "--run-dir", str(run_dir)]
    with open(run_dir.parent / f"{run_dir.name}.out", "wb") as output:
        run = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        try:
            yield run
        finally:
            if run.poll() is None:
                run.send_signal(signal.SIGTERM)
                run.wait(timeout=60)


def _wait_for(happened, run: subprocess.Popen, what: str) -> None:
    end = time.monotonic() + RUN_S
    while not happened():
        if run.poll() is not None or time.monotonic() > end:
            raise SystemExit(f"the run did not come to {what}: status {run.returncode}")
        time.sleep(0.3)


def _serves(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        line = " ".join(process.cmdline())
        return "sglang.launch_server" in line or "sglang_backend.cpu_server" in line or line.startswith("sglang::")
    return False


def _metrics(run_dir: Path) -> list[dict]:
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]


def _planned(run_dir: Path) -> dict[str, int]:
    """Phase -> bytes of the fullest GPU."""
    per_gpu = json.loads((run_dir / "plan.json").read_text(encoding="utf-8"))["memory"]["per_gpu"]
    phases: dict[str, int] = {}
    for gpu in per_gpu:
        for phase in gpu["phases"]:
            phases[phase["name"]] = max(phases.get(phase["name"], 0), phase["total_bytes"])
    return phases
