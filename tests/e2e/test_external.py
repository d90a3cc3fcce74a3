"""Engines of somebody else: https, IPv6, keys, a router that is not ours, the wrong model, one that hangs and one that
dies.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import requests

from slime_like.sglang_backend.router import Router, launch_router
from slime_like.utils.net import host_port
from tests.e2e.conftest import free_ports
from tests.e2e.runs import (
    ROOT,
    SMALL_RUN,
    assert_nothing_left,
    environment,
    our_processes,
    run_train,
    start_train,
    stop_group,
    wait_for,
)

pytestmark = pytest.mark.e2e

KEY = "key-of-somebody-else"


@dataclasses.dataclass
class Server:
    """SGLang, started by hand."""

    url: str
    process: subprocess.Popen
    log: Path
    key: str | None = None
    certificate: Path | None = None

    def get(self, path: str) -> requests.Response:
        return self._session().get(self.url + path, timeout=10)

    def post(self, path: str, body: dict) -> None:
        assert self._session().post(self.url + path, json=body, timeout=10).ok

    def _session(self) -> requests.Session:
        session = requests.Session()
        session.trust_env = False
        session.verify = str(self.certificate) if self.certificate else True
        if self.key:
            session.headers["Authorization"] = f"Bearer {self.key}"
        return session

    def wait(self) -> Server:
        """Until it answers."""
        deadline = time.monotonic() + 120
        while True:
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()[-3000:]
            try:
                if self.get("/model_info").ok:
                    return self
            except requests.RequestException:
                time.sleep(0.3)

    def signal(self, number: int) -> None:
        os.killpg(self.process.pid, number)


@pytest.fixture(scope="module")
def servers(tiny_model_dir, tmp_path_factory):
    """Two servers: one behind https on IPv6 with a key, one as plain as can be."""
    if not shutil.which("openssl"):
        pytest.skip("needs the openssl command to make a certificate")
    folder = tmp_path_factory.mktemp("servers")
    # CA:FALSE: the router takes no authority's certificate for a server's own.
    extensions = ["-addext", "subjectAltName=IP:::1", "-addext", "basicConstraints=critical,CA:FALSE"]
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
        "-days", "2", "-subj", "/CN=test",
               *extensions, "-keyout", folder / "key.pem", "-out", folder / "cert.pem"]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, timeout=30)
    ports = free_ports(2)
    loader = ["--custom-weight-loader", "slime_like.weight_sync.in_engine.shm_loader.load"]
    tls = [*loader, "--api-key", KEY, "--ssl-keyfile", folder / "key.pem", "--ssl-certfile", folder / "cert.pem"]
    started = []
    try:
        for (name, host, more), port in zip([("safe", "::1", tls), ("plain", "127.0.0.1", [])], ports, strict=True):
            command = [
                sys.executable, "-m", "slime_like.sglang_backend.cpu_server", "--model-path", tiny_model_dir, "--host",
                host, "--port", port, *more,
                "--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32", "--max-total-tokens",
                "4096", "--sleep-on-idle",
                "--disable-overlap-schedule", "--skip-server-warmup",
            ]  # fmt: skip
            with open(folder / f"{name}.log", "w") as log:
                env = environment(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
                process = subprocess.Popen(
                    list(map(str, command)),
                    cwd=ROOT,
                    env=env,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            scheme = "https" if more else "http"
            secret = (KEY, folder / "cert.pem") if more else (None, None)
            started.append(Server(f"{scheme}://{host_port(host, port)}", process, folder / f"{name}.log", *secret))
        yield {"safe": started[0].wait(), "plain": started[1].wait()}
    finally:
        for server in started:
            stop_group(server.process, grace_s=0)


@pytest.fixture
def base(tiny_model_dir, tiny_data_dir):
    """Flags of an external run on one trainer rank, without the addresses."""
    return [
        *SMALL_RUN,
        "--hf-checkpoint",
        tiny_model_dir,
        "--prompt-data",
        f"{tiny_data_dir}/train.jsonl",
        "--actor-num-gpus-per-node",
        "1",
        "--rollout-external",
    ]


def many_rollouts(flags):
    flags = list(flags)
    flags[flags.index("--num-rollout") + 1] = "1000"
    return flags


def test_https_ipv6_and_key(servers, base, tmp_path):
    safe, before = servers["safe"], our_processes()
    env = environment(SLIME_LIKE_ENGINE_API_KEY=KEY, REQUESTS_CA_BUNDLE=str(safe.certificate))
    run = run_train(*base, "--rollout-external-engine-addrs", safe.url, run_dir=tmp_path / "run", env=env)
    assert run.returncode == 0, run.logs()
    assert max(line["train/logprob_abs_diff_max"] for line in run.metrics("train")) <= 1e-4
    assert [(line["sync/transport"], line["sync/engines_proven"]) for line in run.metrics("sync")] == [
        ("broadcast", 1)
    ] * 4
    assert safe.get("/model_info").json()["weight_version"] == "4", "it lives on, with the last weights"
    left = [path for path in run.run_dir.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]
    assert KEY not in run.output and not left, "the key is written nowhere"
    assert_nothing_left(before)


def test_wrong_key_is_refused_before_anything_starts(servers, base, tmp_path):
    safe = servers["safe"]
    env = environment(MY_KEY="wrong-one", REQUESTS_CA_BUNDLE=str(safe.certificate))
    flags = ["--rollout-external-engine-addrs", safe.url, "--rollout-external-api-key-env", "MY_KEY"]
    run = run_train(*base, *flags, run_dir=tmp_path / "run", env=env)
    assert run.returncode in (1, 2) and "environment variable MY_KEY" in run.output and safe.url in run.output, (
        run.logs()
    )
    assert "wrong-one" not in run.output
    assert not list(tmp_path.rglob("actor-*.log")), "no trainer was started"


def test_another_model_is_refused_before_anything_starts(servers, base, tmp_path):
    plain, other = servers["plain"], tmp_path / "other"
    other.mkdir()
    flags = list(base)
    model = Path(flags[flags.index("--hf-checkpoint") + 1])
    for path in model.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    (other / "config.json").write_text(
        (model / "config.json").read_text().replace('"hidden_size": 128', '"hidden_size": 64')
    )
    flags[flags.index("--hf-checkpoint") + 1] = other
    run = run_train(*flags, "--rollout-external-engine-addrs", plain.url, run_dir=tmp_path / "run")
    assert run.returncode == 2, run.logs()
    assert "hidden_size 128, not 64" in run.output and plain.url in run.output
    assert not list(tmp_path.rglob("actor-*.log")), "no trainer was started"


@pytest.fixture
def router_of_somebody_else(tmp_path):
    router = launch_router(
        policy="round_robin", log_path=f"{tmp_path}/router.log", timeout_s=60, api_key="key-of-the-router"
    )
    yield router
    router.close()


def test_a_router_that_is_not_ours(servers, base, tmp_path, router_of_somebody_else: Router):
    plain, router = servers["plain"], router_of_somebody_else
    port = router.url.rsplit(":", 1)[1]
    flags = [
        "--rollout-external-engine-addrs",
        plain.url,
        "--sglang-router-ip",
        "127.0.0.1",
        "--sglang-router-port",
        port,
    ]
    env = environment(SLIME_LIKE_ROUTER_API_KEY="key-of-the-router")
    plain.post("/pause_generation", {"mode": "abort"})  # as a run that failed inside a sync leaves it
    run = run_train(
        *base, *flags, "--num-rollout", "1", "--update-weight-transport", "disk", run_dir=tmp_path / "run", env=env
    )
    assert run.returncode == 0, run.logs()
    assert not list((run.run_dir / "logs").glob("router-*")), "no router of our own beside it"
    router.check()
    assert router.engine_urls() == [], "our engine was taken out of it"
    assert plain.get("/model_info").json()["weight_version"] == "2"


def assert_named_and_over(
    process: subprocess.Popen, output: Path, words: str, before: dict[int, str], seconds: float
) -> None:
    """The run ends by itself with status 1, says which engine, and leaves nothing."""
    assert process.wait(seconds) == 1, output.read_text()[-3000:]
    text = output.read_text()
    assert words in text, text[-3000:]
    assert "Traceback" not in text
    assert_nothing_left(before)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        # Nobody answers in either case. What is heard sooner of one that died: contract/test_engine_fleet.py.
        pytest.param(signal.SIGSTOP, "is dead: no answer since", id="hangs"),
        pytest.param(signal.SIGKILL, "", id="dies", marks=pytest.mark.long_run),
    ],
)
def test_engine_that_hangs_or_dies_in_mid_run_is_named(servers, base, tmp_path, number, words):
    """In whatever phase it happens. The one that dies comes last: it does not come back."""
    plain, before = servers["plain"], our_processes()
    flags = ["--rollout-external-engine-addrs", plain.url, "--max-engine-restarts", "0"]
    process = start_train(*many_rollouts(base), *flags, run_dir=tmp_path / "run")
    try:
        wait_for(tmp_path / "run.out", "rollout 2/1000", 120, process)
        plain.signal(number)
        assert_named_and_over(
            process, tmp_path / "run.out", f"external engine 0 at {plain.url} {words}", before, seconds=60
        )
    finally:
        if number == signal.SIGSTOP:
            plain.signal(signal.SIGCONT)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
