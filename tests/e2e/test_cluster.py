"""Ray sessions, reservations and waits on a real local Ray: bounded, named, and closed to strangers."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from tests.e2e.runs import ROOT, environment, has_token
from tests.helpers.other_user import heard, needs_root, stranger_listening

pytestmark = pytest.mark.e2e

#: What it finds goes to a file: Ray writes to stdout too, from threads of its own, in the middle of a line.
SCRIPT = """
import dataclasses, json, os, signal, subprocess, sys, time
import ray
from slime_like.cluster.bundles import reserve
from slime_like.cluster.ray_session import Wait, connect, deaths
from slime_like.config.run import RunConfig
from slime_like.config.placement import PlacementConfig
from slime_like.errors import DataError
from slime_like.planning.placement import make_plan

outcomes = {}

def attempt(name, function):
    started = time.monotonic()
    try:
        function()
        outcomes[name] = "no error"
    except Exception as error:
        notes = getattr(error, "__notes__", "")
        outcomes[name] = f"{type(error).__name__} after {time.monotonic() - started:.0f} s: {error} {notes}"

class Actor:
    def work(self, what):
        if what == "user error":
            raise DataError("file.jsonl line 3 is bad")
        if what == "bug":
            return {}["missing"]
        if what == "death":
            os._exit(1)
        time.sleep(300 if what == "late" else 0)
        return what

signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
handler = signal.getsignal(signal.SIGTERM)
outcomes["started here"] = connect(4)
outcomes["handler kept"] = signal.getsignal(signal.SIGTERM) is handler
session = ray._private.worker._global_node.get_session_dir_path()
outcomes["session"], outcomes["sockets"] = session, os.listdir(session + "/sockets")
if os.geteuid() == 0:  # only root can be another user
    listing = subprocess.run(["ls", session], user=65534, group=65534, extra_groups=[], capture_output=True, text=True)
    outcomes["another user"] = [listing.returncode, listing.stdout, listing.stderr]
two_and_two = PlacementConfig(actor_num_gpus_per_node=2, rollout_num_gpus=2)
plan = make_plan(dataclasses.replace(RunConfig(), placement=two_and_two))
bundles = reserve(plan, 60)
outcomes["slots"], outcomes["on one host"] = [gpu.gpu_id for gpu in bundles.gpus], bundles.on_one_host()
attempt("held", lambda: reserve(plan, 2))
bundles.close()
five_and_one = PlacementConfig(actor_num_gpus_per_node=5, rollout_num_gpus=1)
large = make_plan(dataclasses.replace(RunConfig(), placement=five_and_one))
attempt("impossible", lambda: reserve(large, 60))
again = reserve(plan, 60)
remote = ray.remote(Actor).options(num_cpus=0)
actors, waiting = [remote.remote() for _ in range(3)], remote.remote().work.remote("late")
refs = {name: actor.work.remote(name) for name, actor in zip("abc", actors)}
outcomes["in order"] = Wait(20, whom="x", phase="y").gather(refs)
for what in ("user error", "bug", "death"):
    refs = {"rank 1": waiting, "rank 0": actors[0].work.remote(what)}
    attempt(what, lambda: Wait(20, whom="the trainer", phase="train").gather(refs))
lost = deaths({f"rank {number}": actors[number].work.remote("fine") for number in (0, 1)}, "check")
outcomes["lost"] = {name: [type(error).__name__, error.pid] for name, error in lost.items()}
outcomes["lost machines"] = again.lost_machines()
refs = {"rank 0": actors[1].work.remote("fine"), "rank 7": waiting}
attempt("late", lambda: Wait(5, whom="the trainer", phase="train").gather(refs))
stranger = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
address = ray.get_runtime_context().gcs_address
code = f"import ray; ray.init(address={address!r}, logging_level='ERROR'); print('JOINED')"
done = subprocess.run([sys.executable, "-c", code], env=stranger, capture_output=True, text=True, timeout=60)
outcomes["stranger refused"] = done.returncode != 0 and "JOINED" not in done.stdout
with open(sys.argv[1], "w") as file:
    json.dump(outcomes, file)
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    file = tmp_path_factory.mktemp("cluster") / "outcomes.json"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(file)],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(file.read_text())


def test_reserved_bundles_are_sorted_and_given_back(outcomes):
    assert (outcomes["slots"], outcomes["on one host"]) == (["0", "1", "2", "3"], True)


def test_gpus_held_by_another_end_at_the_deadline_with_numbers(outcomes):
    line = outcomes["held"]
    assert (
        "PlacementError after" in line
        and "4 GPUs and" in line
        and "0 of 4 GPUs free" in line
        and "--placement-timeout 2" in line
    )


def test_what_can_never_be_placed_is_said_at_once(outcomes):
    assert "PlacementError after 0 s: the plan needs 6 GPUs, but the Ray cluster has 4" in outcomes["impossible"]


def test_first_failure_wins_over_a_rank_that_hangs(outcomes):
    assert (
        "DataError after" in outcomes["user error"]
        and "line 3 is bad" in outcomes["user error"]
        and "rank 0 during train" in outcomes["user error"]
    )
    assert "RunError" in outcomes["bug"] and "rank 0 failed during train: KeyError: 'missing'" in outcomes["bug"]
    assert "ProcessLost" in outcomes["death"] and "rank 0 died during train" in outcomes["death"]


def test_those_whose_process_has_ended_are_known_and_their_machines_are_there(outcomes):
    ((name, (kind, pid)),) = outcomes["lost"].items()
    assert (name, kind, pid > 1) == ("rank 0", "ProcessLost", True) and outcomes["lost machines"] == []


def test_timeout_names_who_is_missing(outcomes):
    line = outcomes["late"]
    assert "WaitTimeout after 5 s" in line and "1 of 2 had answered; missing: rank 7" in line and "during train" in line


def test_results_keep_their_order(outcomes):
    assert outcomes["in order"] == ["a", "b", "c"]


def test_a_stranger_cannot_join_the_private_cluster(outcomes):
    assert outcomes["started here"] is True and outcomes["stranger refused"] is True


@needs_root
def test_another_user_cannot_enter_the_folder_of_its_sockets(outcomes):
    status, listed, why = outcomes["another user"]
    assert len(outcomes["sockets"]) >= 2 and status != 0 and listed == "" and "Permission denied" in why


def test_its_folder_is_gone_with_the_process_and_the_signal_handler_is_ours(outcomes):
    assert outcomes["session"].startswith("/tmp/slr-") and not os.path.exists(outcomes["session"])
    assert outcomes["handler kept"] is True


@needs_root
def test_the_run_scripts_start_a_ray_of_ours_beside_another_users(tmp_path):
    """The real `ray start` and `ray job submit`: another user holds the job port, is not spoken to, and cannot enter
    what ours keeps.
    """
    before = {process.pid for process in psutil.process_iter()}
    # pytest's own are too long for sockets
    with tempfile.TemporaryDirectory(prefix="slt", dir="/tmp") as folder, stranger_listening() as (port, pipe):
        env = environment(
            RAY_TMPDIR=folder,
            RAY_JOB_ADDRESS=f"http://127.0.0.1:{port}",
            RAY=f"{Path(sys.executable).parent}/ray",
            PYTHON=sys.executable,
        )
        del env["RAY_ADDRESS"]
        (tmp_path / "job.py").write_text("import os\nfrom slime_like.cluster.ray_trust import recorded_cluster\n"
                                         "print('joins', os.environ['RAY_ADDRESS'], recorded_cluster())\n")  # fmt: skip
        code = (
            f"set -euo pipefail; ROOT={ROOT}; MODEL=tiny-qwen3; source scripts/lib/run_common.sh; ensure_ray 1\n"
            f'"$RAY" job submit --address="$RAY_JOB_ADDRESS" -- env PYTHONPATH={ROOT} "$PYTHON" {tmp_path}/job.py'
        )
        try:
            done = subprocess.run(["bash", "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=150)
        finally:
            for process in psutil.process_iter():
                if process.pid not in before and has_token(process):
                    process.kill()
        assert done.returncode == 0, done.stdout + done.stderr
        assert heard(pipe) == b""
        address, recorded = re.search(r"joins (\S+) (.*)", done.stdout).groups()
        assert recorded == f"Recorded(address='{address}', refused=None)", "train.py alone would join it too"
        private = Path(folder) / f"slime_like-{os.geteuid()}"
        assert stat.S_IMODE(private.stat().st_mode) == 0o700 and list((private / "ray").glob("session_2*/sockets/*"))
