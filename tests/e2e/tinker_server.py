"""A Tinker server as users start it, the SDK, and clients in processes of their own."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from tests.e2e.runs import ROOT, environment

#: Room enough for the tests' adapters, and too little for all of them at once.
FLAGS = ["--max-lora-rank", "16", "--max-loras", "2", "--max-cpu-loras", "2", "--max-adapters-resident", "2"]
SHARED = ["--backend-config", '{"trainer.placement.colocate_all": true}']
START_S = 150.0


@dataclasses.dataclass
class Server:
    """One that is up."""

    process: subprocess.Popen
    url: str
    log: Path
    state: Path

    def text(self) -> str:
        """The end of its log and of its processes', for a failing assertion."""
        parts = [self.log.read_text(errors="replace")[-6000:]]
        runs = sorted(self.state.glob("runs/*/logs/*.log"))
        parts += [f"--- {path.name}\n{path.read_text(errors='replace')[-1500:]}" for path in runs]
        return "\n".join(parts)

    def children(self, *words: str) -> list[psutil.Process]:
        """Of its processes those whose command line has all these words."""
        processes = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                line = " ".join(process.cmdline())
                if all(word in line for word in words):
                    processes.append(process)
        return processes


def start_server(model: Path, state: Path, *flags: str, port: int = 0, serve_s: float = START_S) -> Server:
    """Start one and wait until it serves; it goes on with what is in `state`."""
    state.mkdir(parents=True, exist_ok=True)
    log = state / f"server-{len(list(state.glob('server-*.log')))}.log"
    command = [sys.executable, "-m", "slime_like.tinker.server", "--base-model", str(model), "--port", str(port)]
    command += ["--state-folder", str(state), *FLAGS, *flags]
    with open(log, "w") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment(), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    server = Server(process, "", log, state)
    deadline = time.monotonic() + serve_s
    while (match := re.search(r"^serving .* at (http\S+)$", log.read_text(), re.MULTILINE)) is None:
        if process.poll() is not None or time.monotonic() > deadline:
            text = server.text()
            stop_server(server)
            raise AssertionError(f"the server did not come up: {text}")
        time.sleep(0.1)
    return dataclasses.replace(server, url=match[1])


def stop_server(server: Server) -> int:
    """TERM, and KILL where that does not do; its exit status."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(server.process.pid, signal.SIGTERM)
    try:
        return server.process.wait(60)
    except subprocess.TimeoutExpired:
        os.killpg(server.process.pid, signal.SIGKILL)
        return server.process.wait(10)


@contextlib.contextmanager
def running_server(model: Path, state: Path, *flags: str) -> Iterator[Server]:
    """One for the block; ended with status 0."""
    server = start_server(model, state, *flags)
    try:
        yield server
    except BaseException:
        stop_server(server)
        raise
    assert stop_server(server) == 0, server.text()


#: tinker-cookbook and what it imports, beside what is installed here (torch, transformers, ...).
COOKBOOK = (
    "tinker-cookbook==0.6.1", "blobfile", "chz", "datasets", "dill", "lxml", "math-verify", "multiprocess", "pandas",
    "pycryptodomex", "pylatexenc", "pyrage", "termcolor", "tiktoken", "tml-renderers", "xxhash",
    "latex2sympy2_extended", "antlr4-python3-runtime==4.13.2",
)  # fmt: skip


def install_sdk(folder: Path, *more: str) -> Path:
    """The SDK, and what it needs beside this interpreter's packages: in seconds, not in a minute as a venv."""
    packages = ["tinker==0.38.0", "h2", "hpack", "hyperframe", "pyqwest", *more]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *packages]
    subprocess.run(command, check=True, timeout=300, capture_output=True)
    return folder


@dataclasses.dataclass
class Client:
    """A client in a process of its own: a Python file that prints one JSON object a line."""

    process: subprocess.Popen
    output: Path

    def lines(self) -> list[dict]:
        """What it has printed so far."""
        return [json.loads(line) for line in self.output.read_text().splitlines() if line.startswith("{")]

    def wait(self, timeout_s: float, server: Server | None = None) -> list[dict]:
        """All that it printed. Fails where it did."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = None
        end = self.output.read_text()[-5000:]
        assert code == 0, f"client: {code}\n{end}\n{server.text() if server else ''}"
        return self.lines()


def start_client(output: Path, sdk: Path | str, script: str, server_url: str, *arguments: str) -> Client:
    """A client of tests/e2e. sdk: a folder with it, or an interpreter that has it."""
    python, extra = (sys.executable, {"PYTHONPATH": str(sdk)}) if isinstance(sdk, Path) else (sdk, {})
    keys = {"TINKER_API_KEY": "tml-nobody", "TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1"}
    with open(output, "w") as file:
        process = subprocess.Popen(
            [python, str(ROOT / "tests/e2e" / script), server_url, *arguments],
            env=environment(**keys, **extra), stdout=file, stderr=subprocess.STDOUT, cwd=output.parent,
        )  # fmt: skip
    return Client(process, output)
