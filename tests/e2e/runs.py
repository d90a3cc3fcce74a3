"""Starts train.py as users do, and reads what it left."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]

#: A rollout that takes a second on the tiny model.
SMALL_RUN = [
    "--input-key", "prompt", "--label-key", "label", "--apply-chat-template", "--rollout-shuffle",
    "--custom-rm-path", "tests.e2e.rewards.even_tokens",
    "--num-rollout", "3", "--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--num-steps-per-rollout", "2",
    "--rollout-max-response-len", "12",
    "--use-dynamic-batch-size", "--max-tokens-per-gpu", "256", "--balance-data", "--advantage-estimator", "grpo",
    "--lr", "1e-3", "--adam-beta2", "0.98", "--eps-clip-high", "0.28",
]  # fmt: skip


#: Ray asks for this token in every cluster of these tests, whether or not the user has one in ~/.ray.
RAY_TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


def environment(**extra: str) -> dict[str, str]:
    """The environment of a run: this interpreter first on PATH, no proxies, no cluster but the one asked for."""
    kept = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS" and "proxy" not in k.lower()}
    return (
        kept
        | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONUNBUFFERED": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ADDRESS": "local",
        }
        | RAY_TOKEN
        | extra
    )


@dataclasses.dataclass
class Finished:
    """A run that ended."""

    returncode: int
    output: str
    run_dir: Path

    def metrics(self, kind: str) -> list[dict]:
        """The metric lines of one kind."""
        lines = [json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()]
        return [line for line in lines if line["kind"] == kind]

    def logs(self) -> str:
        """The ends of all logs, for a failing assertion."""
        parts = [self.output[-4000:]]
        for path in sorted((self.run_dir / "logs").glob("*.log")):
            parts.append(f"--- {path.name}\n" + path.read_text(errors="replace")[-1500:])
        return "\n".join(parts)


def run_train(*flags, run_dir: Path, timeout: float = 180, env: dict | None = None) -> Finished:
    """`python train.py` with a deadline; output is standard output and error together."""
    command = [sys.executable, str(ROOT / "train.py"), *map(str, flags), "--run-dir", str(run_dir)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=env or environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )
    if "--share-run-dir" not in flags:
        assert open_to_others(run_dir) == [], "of every run"
    return Finished(done.returncode, done.stdout, run_dir)


def open_to_others(run_dir: Path) -> list[str]:
    """What of a run directory anybody but its owner can read, write or enter."""
    paths = [run_dir, *run_dir.rglob("*")] if run_dir.is_dir() else []
    return [
        f"{path} {path.lstat().st_mode:o}" for path in paths if path.lstat().st_mode & 0o077 and not path.is_symlink()
    ]


def start_train(*flags, run_dir: Path) -> subprocess.Popen:
    """`python train.py` in the background, for tests that interrupt it: it listens to SIGINT, also where the tests, in
    a background themselves, do not.
    """
    command = [sys.executable, str(ROOT / "train.py"), *map(str, flags), "--run-dir", str(run_dir)]
    listening = (
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    )
    with open(run_dir.parent / f"{run_dir.name}.out", "w") as output:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", listening, *command],
            cwd=ROOT,
            env=environment(),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def our_processes() -> dict[int, str]:
    """Engines, routers, trainers, guards and Ray processes that these tests started: pid -> command line.

    Known by the token in their environment. SGLang's children overwrite theirs with a title: they count by a parent of
    ours, or when they are orphans.
    """
    lines = {}
    for process in psutil.process_iter(["cmdline", "ppid"]):
        line = " ".join(process.info["cmdline"] or [])
        if (
            any(word in line for word in ("sglang", "slime_like", "train.py", "ray::", "raylet", "gcs_server"))
            and "pytest" not in line
        ):
            orphan = line.startswith("sglang::") and process.info["ppid"] == 1
            if orphan or any(has_token(relative) for relative in (process, *_parents(process))):
                lines[process.pid] = line[:200]
    return lines


def _parents(process: psutil.Process) -> list[psutil.Process]:
    try:
        return [parent for parent in process.parents() if parent.pid != os.getpid()]
    except psutil.NoSuchProcess:
        return []


def has_token(process: psutil.Process) -> bool:
    """Whether these tests started a process, or one of those that did."""
    try:
        return process.environ().get("RAY_AUTH_TOKEN") == RAY_TOKEN["RAY_AUTH_TOKEN"]
    except (psutil.Error, OSError):
        return False


def assert_nothing_left(before: dict[int, str], seconds: float = 30) -> None:
    """Every process started since `before` ends within `seconds`."""
    deadline = time.monotonic() + seconds
    left: dict[int, str] = {}
    while time.monotonic() < deadline:
        left = {pid: line for pid, line in our_processes().items() if pid not in before and "ray::IDLE" not in line}
        if not left:
            return
        time.sleep(0.5)
    raise AssertionError("left behind: " + "\n".join(f"{pid} {line}" for pid, line in left.items()))


def wait_for(path: Path, text: str, seconds: float, process: subprocess.Popen | None = None) -> str:
    """Wait until a file holds a text."""
    deadline = time.monotonic() + seconds
    content = ""
    while time.monotonic() < deadline:
        content = path.read_text(errors="replace") if path.exists() else ""
        if text in content:
            return content
        assert process is None or process.poll() is None, (
            f"ended with {process.returncode} before {text!r}:\n{content[-3000:]}"
        )
        time.sleep(0.2)
    raise AssertionError(f"{text!r} not in {path} after {seconds} s:\n{content[-3000:]}")


def stop_group(process: subprocess.Popen, grace_s: float = 10) -> None:
    """End a process group that a test started: TERM, then KILL what is left."""
    for number, seconds in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 10)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
