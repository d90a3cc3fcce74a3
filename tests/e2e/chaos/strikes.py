"""How a fault is done to a part of a run that goes on, from outside."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import requests

from slime_like.utils.net import free_port
from tests.e2e.runs import ROOT

#: Part -> words of its command line, or of its title. The trainer's last rank and the first engine are struck.
WORDS = {
    "engine": ("sglang::scheduler",),
    "router": ("sglang::router",),
    "trainer": ("ray::", "ChaosActor"),  # as announcing.py calls it
    "node": ("raylet/raylet",),
}
#: A file whose presence tears the next answer (announcing.py).
TEAR = "tear"
#: How long a slow part is slow: it runs for a quarter of this time, in turns.
SLOW_S, TURN_S = 6.0, 0.2
#: After this a driver, or a reward server, that was stopped goes on: nobody but its owner can know better.
STALL_S = {"driver": 12.0, "reward": 4.0}
#: After this the owner of a scripted engine ends one that was stopped, and starts another.
OWNER_S = 15.0
#: A reward server is started again by whoever looks after it.
RESTART_S = 2.0


class RewardServer:
    """A reward over HTTP in a process of its own; a context manager."""

    def __init__(self, folder: Path):
        self.port, self._corrupt = free_port(), folder / "corrupt-rewards"
        self.process = self._start()

    def _start(self) -> subprocess.Popen:
        script = ROOT / "tests/e2e/chaos/reward_server.py"
        return subprocess.Popen([sys.executable, "-I", "-S", script, str(self.port), str(self._corrupt)])

    @property
    def url(self) -> str:
        """For --rm-url."""
        return f"http://127.0.0.1:{self.port}"

    def wait(self) -> None:
        """Until it answers."""
        _wait_for(lambda: requests.post(self.url, json={"response": "ab"}, timeout=2).json() == 0.5)

    def kill(self, *, restart: bool = True) -> None:
        """End it; after a moment another is there."""
        self.process.kill()
        self.process.wait()
        if restart:
            time.sleep(RESTART_S)
            self.process = self._start()

    def lie(self, seconds: float) -> None:
        """Give answers that are no JSON for a while."""
        self._corrupt.touch()
        time.sleep(seconds)
        self._corrupt.unlink()

    def __enter__(self) -> RewardServer:
        self.wait()
        return self

    def __exit__(self, *_) -> None:
        self.process.kill()
        self.process.wait()


class ScriptedServers:
    """Engines of somebody else's, who starts one again a moment after it has died; a context manager."""

    def __init__(self, count: int = 2):
        self._ports = [free_port() for _ in range(count)]
        self.processes = [self._start(port) for port in self._ports]

    def _start(self, port: int) -> subprocess.Popen:
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        line = [sys.executable, ROOT / "tests/e2e/chaos/scripted_server.py", str(port)]
        return subprocess.Popen(line, env=environ, stderr=subprocess.DEVNULL)  # each HTTP/2 preface is an error there

    @property
    def urls(self) -> list[str]:
        """For --rollout-external-engine-addrs."""
        return [f"http://127.0.0.1:{port}" for port in self._ports]

    def stop_first(self) -> None:
        """Stop one; its owner notices after a while."""
        os.kill(self.processes[0].pid, signal.SIGSTOP)
        time.sleep(OWNER_S)
        self.kill_first()

    def kill_first(self) -> None:
        """End one; after a moment another is there."""
        self.processes[0].kill()
        self.processes[0].wait()
        time.sleep(RESTART_S)
        self.processes[0] = self._start(self._ports[0])

    def __enter__(self) -> ScriptedServers:
        for url in self.urls:
            _wait_for(lambda url=url: requests.get(f"{url}/health", timeout=2).ok)
        return self

    def __exit__(self, *_) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def _wait_for(answers: Callable[[], bool], seconds: float = 240.0) -> None:
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(requests.RequestException):
            if answers():
                return
        assert time.monotonic() < deadline, "a server does not start"
        time.sleep(0.05)


@dataclasses.dataclass
class Target:
    """A run that goes on. supervisor: the process that was started; driver: the one that says when. disks: folders of
    the run by whose they are. folder: where it and whoever strikes meet.
    """

    supervisor: int
    driver: int
    reward: RewardServer
    folder: Path
    disks: dict[str, Path]
    engines: ScriptedServers | None = None  # instead of SGLang's

    def pids(self, whom: str) -> list[int]:
        """The processes of a part."""
        if whom == "engine" and self.engines is not None:
            return [self.engines.processes[0].pid]
        if whom in ("driver", "reward"):
            return [self.driver if whom == "driver" else self.reward.process.pid]
        pids = []
        for process in psutil.Process(self.supervisor).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if all(word in " ".join(process.cmdline()) for word in WORDS[whom]):
                    pids.append(process.pid)
        return sorted(pids)


class NobodyThere(Exception):
    """The part that is to be struck is not running."""


def strike(target: Target, fault: str, whom: str) -> None:
    """Do it. What takes time goes on in the background."""
    if fault == "full disk":
        fill(target.disks[whom])
        return
    if fault == "corrupt reply":
        if whom == "reward":
            _in_background(target.reward.lie, 1.0)
        else:
            (target.folder / TEAR).touch()
        return
    if whom == "reward" and fault == "kill":
        _in_background(target.reward.kill)
        return
    if whom == "engine" and fault in ("kill", "stall") and target.engines is not None:
        _in_background(target.engines.kill_first if fault == "kill" else target.engines.stop_first)
        return
    pids = target.pids(whom)
    if not pids:
        raise NobodyThere(whom)
    pid = pids[-1] if whom == "trainer" else pids[0]
    if fault == "slow":
        _in_background(_slow, pid)
    elif fault == "kill":
        os.kill(pid, signal.SIGKILL)
    else:
        os.kill(pid, signal.SIGSTOP)
        if whom in STALL_S:
            _in_background(_continue_after, pid, STALL_S[whom])


def _in_background(function: Callable, *args) -> None:
    threading.Thread(target=function, args=args, daemon=True).start()


def _slow(pid: int) -> None:
    until = time.monotonic() + SLOW_S
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < until:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.75 * TURN_S)
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.25 * TURN_S)


def _continue_after(pid: int, seconds: float) -> None:
    time.sleep(seconds)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def fill(folder: Path) -> None:
    """Leave no byte free on a file system."""
    with open(folder / "filler", "ab", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"\0" * size)


@contextlib.contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[Path]:
    """A file system of its own. Raises PermissionError where that is not allowed (not root)."""
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m,mode=700", "tmpfs", str(folder)]
    if os.getuid() or subprocess.run(mount, capture_output=True).returncode:
        raise PermissionError("a small disk needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
