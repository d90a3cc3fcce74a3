"""SGLang on one machine, training on another: the smoke script, with weights over the cable and over a folder that both
see.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.e2e.namespaces import Machine, two_machines, why_not
from tests.e2e.runs import RAY_TOKEN, ROOT, Finished, environment, stop_group
from tests.e2e.test_placements import check_run
from tests.e2e.version_proof import proven

pytestmark = pytest.mark.e2e

PORT = 10091
#: On top of the script's own flags: something to learn for an untrained model, and the proof of what was generated with
#: which weights.
PROOF = """--lr 1e-3 --rollout-max-response-len 12 --rollout-batch-size 4 --global-batch-size 16
--save {run_dir}-save --save-interval 1 --save-hf {run_dir}-hf/{{rollout_id}}
--save-debug-rollout-data {run_dir}-samples/{{rollout_id}}.npz"""


@pytest.fixture(scope="module")
def machines():
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with two_machines() as pair:
        yield pair


@pytest.fixture(scope="module")
def engine_url(machines, tiny_model_dir, tmp_path_factory):
    """SGLang on machine A, started by hand on its own address."""
    machine, folder = machines[0], tmp_path_factory.mktemp("engine")
    command = [
        sys.executable, "-m", "slime_like.sglang_backend.cpu_server", "--model-path", tiny_model_dir, "--host",
        machine.address, "--port", PORT,
        "--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32", "--max-total-tokens", "4096",
        "--sleep-on-idle",
        "--disable-overlap-schedule", "--skip-server-warmup", "--custom-weight-loader",
        "slime_like.weight_sync.in_engine.shm_loader.load",
    ]  # fmt: skip
    env = environment(OMP_NUM_THREADS="1", SGLANG_USE_CPU_ENGINE="1", GLOO_SOCKET_IFNAME=machine.interface)
    process = machine.start(command, env=env, log=folder / "engine.log")
    url = f"http://{machine.address}:{PORT}"
    try:
        wait_answer(machines[1], f"{url}/model_info", process, folder / "engine.log")
        yield url
        assert process.poll() is None, (
            "an external engine is never ended: " + (folder / "engine.log").read_text()[-3000:]
        )
    finally:
        stop_group(process, grace_s=0)


@pytest.fixture(scope="module")
def ray_on_b(machines, tmp_path_factory):
    """Ray on machine B, as the script would start it, but with an end."""
    machine, folder = machines[1], tmp_path_factory.mktemp("ray")
    sockets = tempfile.mkdtemp(prefix="slr")  # short: Ray makes sockets deep below it
    command = [
        Path(sys.executable).parent / "ray", "start", "--head", "--node-ip-address", "127.0.0.1", "--num-gpus", "2",
        "--disable-usage-stats",
        "--temp-dir", sockets, "--block",
    ]  # fmt: skip
    process = machine.start(command, env=environment(), log=folder / "ray.log")
    try:
        wait_answer(
            machine, "http://127.0.0.1:8265/api/jobs/", process, folder / "ray.log", key=RAY_TOKEN["RAY_AUTH_TOKEN"]
        )
        yield
    finally:
        stop_group(process, grace_s=3)
        shutil.rmtree(sockets, ignore_errors=True)


def wait_answer(machine: Machine, url: str, process: subprocess.Popen, log: Path, key: str | None = None) -> None:
    deadline = time.monotonic() + 120
    while True:
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
        try:
            machine.ask(url, key=key)
            return
        except (subprocess.CalledProcessError, json.JSONDecodeError):
            time.sleep(0.5)


def run_script(machine: Machine, flags: str, model: Path, data: Path, engine: str, run_dir: Path) -> Finished:
    """scripts/run-external.sh on `machine`."""
    env = environment(
        HF_CHECKPOINT=str(model), PROMPT_DATA=str(data / "train.jsonl"), ENGINE_ADDRS=engine.removeprefix("http://"),
        RUN_DIR=str(run_dir),
        CUSTOM_RM_PATH="tests.e2e.rewards.even_tokens", PYTHON=sys.executable,
        RAY=str(Path(sys.executable).parent / "ray"),
    )  # fmt: skip
    del env["RAY_ADDRESS"]
    command = machine.command(
        ["bash", ROOT / "scripts/run-external.sh", *PROOF.format(run_dir=run_dir).split(), *flags.split()]
    )
    done = subprocess.run(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240
    )
    return Finished(done.returncode, done.stdout, run_dir)


@pytest.mark.long_run
def test_answers_of_another_machine_live_through_a_change_of_weights(
    machines, engine_url, ray_on_b, tiny_model_dir, tiny_data_dir, tmp_path
):
    flags = "--update-weight-transport broadcast --async-mode full --max-staleness 2"
    flags += " --rollout-max-response-len 100 --num-rollout 4"
    run = run_script(machines[1], flags, tiny_model_dir, tiny_data_dir, engine_url, tmp_path / "run")
    assert run.returncode == 0, run.logs()
    proof = proven(run, tiny_model_dir, f"{tmp_path}/run-", 4)
    assert proof.worst(later=False) < 1e-4 and proof.worst(later=True) < 1e-4
    assert max(proof.spreads) >= 1 and max(proof.ages) <= 2


@pytest.mark.parametrize("transport", [pytest.param("disk", marks=pytest.mark.long_run), "broadcast"])
def test_engine_on_another_machine(machines, engine_url, ray_on_b, tiny_model_dir, tiny_data_dir, tmp_path, transport):
    here = machines[1]
    before = here.ask(f"{engine_url}/weights_checker", {"action": "checksum"})
    run = run_script(
        here, f"--update-weight-transport {transport}", tiny_model_dir, tiny_data_dir, engine_url, tmp_path / "run"
    )
    check_run(run, tiny_model_dir, transport, engines_proven=1)
    assert "mode external: 2 GPUs" in run.output
    assert here.ask(f"{engine_url}/model_info")["weight_version"] == "4", "it lives on, with the last weights"
    after = here.ask(f"{engine_url}/weights_checker", {"action": "checksum"})
    assert after["success"] and after["ranks"] != before["ranks"]
