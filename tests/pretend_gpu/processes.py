"""Processes that have a pretended device: the guard is compiled once, one process imports everything, and each job is
run by forks of it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

_SOURCE = Path(__file__).with_name("guard.cpp")
_ROOT = Path(__file__).resolve().parents[2]
#: Of transformer_engine, pretended too.
_PACKAGES = Path(__file__).with_name("packages")
_COMPILE_TIMEOUT_S = 120.0
_START_TIMEOUT_S = 120.0
#: Beyond a job's own deadline, after which its ranks are killed, the server's answer.
_ANSWER_S = 20.0


def why_not() -> str | None:
    """Why this host cannot pretend; None if it can."""
    import torch

    if sys.platform != "linux":
        return f"the pretended device needs Linux's LD_PRELOAD, this is {sys.platform}"
    if torch.version.cuda is not None:
        return f"the pretended device needs a CPU build of torch, this is {torch.__version__}"
    if shutil.which(_compiler()) is None:
        return f"the pretended device needs a C++ compiler, there is no {_compiler()} (Debian: apt-get install g++)"
    return None


def _compiler() -> str:
    return os.environ.get("CXX", "g++")


def guard_library() -> Path:
    """The compiled guard, in the virtual environment's folder; made where it is missing (2 s). Raises RuntimeError with
    the compiler's words.
    """
    import torch

    about = _SOURCE.read_bytes() + f"{torch.__version__} {_compiler()}".encode()
    folder = Path(sys.prefix) / "pretend_gpu"
    if not os.access(sys.prefix, os.W_OK):
        folder = Path(tempfile.gettempdir()) / f"pretend_gpu-{os.getuid()}"
    folder.mkdir(exist_ok=True, mode=0o700)
    library = folder / f"guard-{hashlib.sha256(about).hexdigest()[:16]}.so"
    with open(folder / "lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            package = Path(torch.__file__).parent
            part = library.with_suffix(".part")
            command = [_compiler(), "-O0", "-std=c++20", "-shared", "-fPIC", str(_SOURCE), "-o", str(part)]
            command += [f"-I{package}/include", f"-L{package}/lib", f"-Wl,-rpath,{package}/lib", "-ltorch_cpu", "-lc10"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S, check=False)
            if done.returncode:
                raise RuntimeError(f"the guard does not compile: {' '.join(command)}\n{done.stderr}")
            part.rename(library)
    return library


class Pretender:
    """Runs functions in processes with a pretended device.

    transformer_engine: there is a pretended transformer-engine too, so Megatron's layers are those made of its.
    """

    def __init__(self, *, transformer_engine: bool = False) -> None:
        self._packages = [str(_PACKAGES)] if transformer_engine else []
        self._process: subprocess.Popen | None = None
        self._line: Connection | None = None

    def __call__(
        self,
        function: Callable,
        num_ranks: int = 1,
        *args,
        timeout_s: float = 120.0,
        cards: Sequence[str] | None = None,
    ) -> list:
        """[function(place, *args) of each rank], place being TrainWorker's keyword arguments: train_world.run_ranks
        with a device in every rank. The function is a module's, its answer plain values (tensors of the host).

        cards: each rank's card, for IPC handles; by default each has its own. Raises RuntimeError with a rank's
        traceback, TimeoutError naming the ranks that did not answer.
        """
        line = self._start()
        line.send(
            (
                function.__module__,
                function.__qualname__,
                num_ranks,
                args,
                timeout_s,
                list(cards or map(str, range(num_ranks))),
            )
        )
        if not line.poll(timeout_s + _ANSWER_S):
            self.close()
            raise TimeoutError(f"the pretending processes did not answer within {timeout_s + _ANSWER_S} s")
        results, error = pickle.loads(line.recv_bytes())
        if error is not None:
            raise (
                TimeoutError(error) if error.startswith("ranks ") and "did not answer" in error else RuntimeError(error)
            )
        return results

    def _start(self) -> Connection:
        if self._line is not None and self._process is not None and self._process.poll() is None:
            return self._line
        folder = tempfile.mkdtemp(prefix="pretend-")
        environment = os.environ | {
            "LD_PRELOAD": str(guard_library()),
            "OMP_NUM_THREADS": "1",
            # as pyproject.toml's pythonpath
            "PYTHONPATH": os.pathsep.join(
                [
                    *self._packages,
                    *(str(_ROOT), str(_ROOT / "tests" / "unit")),
                    *filter(None, [os.environ.get("PYTHONPATH")]),
                ]
            ),
        }
        try:
            with Listener(os.path.join(folder, "line"), family="AF_UNIX") as listener:
                listener._listener._socket.settimeout(_START_TIMEOUT_S)  # type: ignore[attr-defined]
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "tests.pretend_gpu.server", listener.address], cwd=_ROOT, env=environment
                )
                self._line = listener.accept()
        finally:
            shutil.rmtree(folder)
        return self._line

    def close(self) -> None:
        """End the processes. Harmless when called twice."""
        if self._line is not None:
            self._line.close()
            self._line = None
        if self._process is not None:
            try:
                self._process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None


def connect(address: str) -> Connection:
    """The server's end of the line."""
    return Client(address, family="AF_UNIX")


def end_with_parent() -> None:
    """The kernel kills this process when the one that made it ends."""
    import ctypes

    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def wait_for(pids: dict[int, int], seconds: float) -> None:
    """Reap these children (rank -> pid) within the time; whoever is still there is killed."""
    end = time.monotonic() + seconds
    left = set(pids.values())
    while left and time.monotonic() < end:
        left = {pid for pid in left if os.waitpid(pid, os.WNOHANG)[0] == 0}
        time.sleep(0.01)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
