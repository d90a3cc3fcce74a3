"""A Ray cluster as a user starts it, and data for whole runs."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from tests.e2e.foreign_venvs import ForeignPythons
from tests.e2e.runs import RAY_TOKEN, ROOT, environment, our_processes, stop_group


@dataclasses.dataclass
class Cluster:
    """`ray start --head`, on loopback."""

    address: str
    dashboard: str

    @property
    def environment(self) -> dict[str, str]:
        """For a train.py that must join this cluster."""
        return environment(RAY_ADDRESS=self.address)


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago."""
    import socket

    sockets = [socket.socket() for _ in range(count)]
    for item in sockets:
        item.bind(("127.0.0.1", 0))
    ports = [item.getsockname()[1] for item in sockets]
    for item in sockets:
        item.close()
    return ports


@pytest.fixture(scope="session")
def ray_cluster(tmp_path_factory):
    with started_cluster(tmp_path_factory.mktemp("ray"), num_gpus=4) as cluster:
        yield cluster


@contextlib.contextmanager
def started_cluster(folder: Path, *, num_gpus: int) -> Iterator[Cluster]:
    """A cluster whose log lies in `folder`; it ends with the block."""
    port, dashboard, agent, agent_grpc = free_ports(4)
    command = [
        str(Path(sys.executable).parent / "ray"), "start", "--head", "--num-gpus", str(num_gpus), "--node-ip-address",
        "127.0.0.1", "--port", str(port),
        "--dashboard-host", "127.0.0.1", "--dashboard-port", str(dashboard), "--disable-usage-stats", "--block",
        # At its default port the agent, which takes jobs, may meet one of a cluster that is just ending, and then goes
        # on without listening.
        "--dashboard-agent-listen-port", str(agent), "--dashboard-agent-grpc-port", str(agent_grpc),
    ]  # fmt: skip
    before = our_processes()
    # A job joins the cluster that was recorded last in Ray's folder, whichever took the job: each has its own, with a
    # path that is short enough for sockets.
    own = tempfile.mkdtemp(prefix="slr-", dir="/tmp")
    with open(folder / "ray.log", "w") as log:
        process = subprocess.Popen(
            command, env=environment(RAY_TMPDIR=own), cwd=ROOT, stdout=log, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    try:
        cluster = Cluster(f"127.0.0.1:{port}", f"http://127.0.0.1:{dashboard}")
        wait_for_dashboard(cluster, process, folder / "ray.log")
        wait_for_agents(before, folder / "ray.log", agent)
        yield cluster
    finally:
        stop_group(process)
        shutil.rmtree(own, ignore_errors=True)


def wait_for_dashboard(cluster: Cluster, process: subprocess.Popen, log: Path) -> None:
    """Wait until jobs can be submitted."""
    token = {"Authorization": f"Bearer {RAY_TOKEN['RAY_AUTH_TOKEN']}"}
    deadline = time.monotonic() + 60
    while True:
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        try:
            if requests.get(f"{cluster.dashboard}/api/jobs/", headers=token, timeout=2).ok:
                return
        except requests.RequestException:
            pass
        time.sleep(0.3)


def wait_for_agents(before: dict[int, str], log: Path, port: int) -> None:
    """Wait for the last processes of the cluster, so that they do not pass for something that a run has left behind,
    and until the one that takes jobs listens: on a busy host half a minute after it is there.
    """
    deadline = time.monotonic() + 120
    while True:
        with contextlib.suppress(requests.RequestException):
            requests.get(f"http://127.0.0.1:{port}/api/local_raylet_healthz", timeout=2)
            break  # whatever it answers
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)
    while not {"ray::DashboardAgent", "ray::RuntimeEnvAgent"} <= {
        line.strip() for pid, line in our_processes().items() if pid not in before
    }:
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)


@pytest.fixture(scope="session")
def tiny_data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    subprocess.run([sys.executable, ROOT / "scripts/make_tiny_data.py", "sort4", folder], check=True, timeout=60)
    return folder


@pytest.fixture(scope="session")
def python_with(tmp_path_factory) -> ForeignPythons:
    """Makes virtual environments with a package. SLIME_LIKE_FOREIGN_VENVS: a folder to keep them in, which saves
    installing them again."""
    kept = os.environ.get("SLIME_LIKE_FOREIGN_VENVS")
    return ForeignPythons(Path(kept) if kept else tmp_path_factory.mktemp("venvs"))
