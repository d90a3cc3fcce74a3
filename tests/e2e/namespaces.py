"""Two machines on one: network namespaces joined by a cable (veth).

Each has its own loopback and one address that the other sees.
They share files, process ids and memory. Nothing outside them is reached, and nothing outside reaches them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.e2e.runs import ROOT

_ASK = """
import json, sys, urllib.request
url, body, key = json.load(sys.stdin)
headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
request = urllib.request.Request(url, None if body is None else json.dumps(body).encode(), headers)
print(opener.open(request, timeout=30).read().decode())
"""


@dataclasses.dataclass(frozen=True)
class Machine:
    """One network namespace."""

    name: str
    address: str
    interface: str

    def command(self, argv: list) -> list[str]:
        """`argv` on this machine."""
        return ["ip", "netns", "exec", self.name, *map(str, argv)]

    def start(self, argv: list, *, env: dict[str, str], log: Path) -> subprocess.Popen:
        """A process on this machine, in a session of its own."""
        with open(log, "w") as output:
            return subprocess.Popen(
                self.command(argv), env=env, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    def ask(self, url: str, body: dict | None = None, key: str | None = None) -> dict:
        """A request from this machine; its JSON answer. Raises CalledProcessError if it is refused."""
        command = self.command([sys.executable, "-I", "-S", "-c", _ASK])
        done = subprocess.run(
            command, input=json.dumps([url, body, key]), capture_output=True, text=True, timeout=60, check=True
        )
        return json.loads(done.stdout)

    def pids(self) -> list[int]:
        """The processes on this machine."""
        done = subprocess.run(
            ["ip", "netns", "pids", self.name], capture_output=True, text=True, timeout=30, check=True
        )
        return [int(pid) for pid in done.stdout.split()]

    def remove(self) -> None:
        """End the processes on this machine, and the machine."""
        deadline = time.monotonic() + 10
        while (pids := self.pids()) and time.monotonic() < deadline:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)
        _ip("netns", "del", self.name)


def why_not() -> str | None:
    """Why there can be no namespaces here, or None."""
    if not shutil.which("ip"):
        return "needs iproute2's `ip` (apt-get install iproute2) to make two network namespaces"
    try:
        with two_machines() as (a, _):
            subprocess.run(a.command(["true"]), check=True, capture_output=True, text=True, timeout=30)
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not allowed here: {' '.join(error.cmd)}: {(error.stderr or '').strip()}"
    return None


@contextlib.contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """Machines A and B on one cable; removed with everything that runs on them."""
    tag = f"sl{os.getpid()}"
    machines = Machine(f"{tag}a", "10.77.0.1", f"{tag}va"), Machine(f"{tag}b", "10.77.0.2", f"{tag}vb")
    with contextlib.ExitStack() as undo:
        for machine in machines:
            _ip("netns", "add", machine.name)
            undo.callback(machine.remove)
        a, b = machines
        # Made inside the namespaces, so that the names and addresses never exist outside.
        _ip("link", "add", a.interface, "netns", a.name, "type", "veth", "peer", "name", b.interface, "netns", b.name)
        for machine in machines:
            _ip("-n", machine.name, "link", "set", "lo", "up")
            _ip("-n", machine.name, "addr", "add", f"{machine.address}/24", "dev", machine.interface)
            _ip("-n", machine.name, "link", "set", machine.interface, "up")
        yield machines


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=30)
