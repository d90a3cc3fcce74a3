"""Placement on a Ray cluster of several (logical) machines: what the plan says is where Ray puts it.

An engine over two of them.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.e2e.runs import ROOT, SMALL_RUN, Finished, assert_nothing_left, environment, our_processes

pytestmark = pytest.mark.e2e

SCRIPT = """
import dataclasses, json, os, sys, time
import ray
from ray.cluster_utils import Cluster
from slime_like.cluster.bundles import reserve
from slime_like.cluster.nodes import cluster_nodes
from slime_like.cluster.ray_session import Wait, connect
from slime_like.config.run import RunConfig
from slime_like.config.placement import PlacementConfig
from slime_like.planning.placement import make_plan

cluster = Cluster()
for number in range(4):
    cluster.add_node(num_cpus=4, num_gpus=2, include_dashboard=False)
cluster.add_node(num_cpus=1, num_gpus=0)
cluster.wait_for_nodes(60)
os.environ["RAY_ADDRESS"] = cluster.address
said = {}
assert connect(0) is False

def planned(*, loss=(), checkpoint=(), **placement):
    base = RunConfig()
    parts = {"loss": dict(loss), "checkpoint": dict(checkpoint), "placement": {"num_gpus_per_node": 2} | placement}
    groups = {name: dataclasses.replace(getattr(base, name), **values) for name, values in parts.items()}
    layout = make_plan(dataclasses.replace(base, **groups))
    assert not layout.problems, layout.problems
    return layout

class Seat:
    def where(self):
        context = ray.get_runtime_context()
        return context.get_node_id(), context.get_accelerator_ids()["GPU"]

def compare(name, plan):
    '''An actor for each role and bundle; the node and GPU that Ray reports for each, as numbers in the plan's order.'''
    bundles = reserve(plan, 60)
    seats, refs = ray.remote(Seat), {}
    for bundle in plan.bundles:
        for role, share in bundle.roles.items():
            if share:
                refs[f"{role} {bundle.index}"] = seats.options(**bundles.options(bundle.index, share)).remote()
    asked = {key: actor.where.remote() for key, actor in refs.items()}
    reported = dict(zip(refs, Wait(60, whom="seats", phase="test").gather(asked)))
    order = list(dict.fromkeys(gpu.node_id for gpu in bundles.gpus))
    real = {key: (order.index(node), int(gpus[0])) for key, (node, gpus) in reported.items()}
    want = {f"{role} {b.index}": (b.node, b.gpu) for b in plan.bundles for role, share in b.roles.items() if share}
    said[name] = f"{'SAME' if real == want else f'DIFFERENT {real} {want}'} {len(real)} seats on {len(order)} machines"
    for actor in refs.values():
        ray.kill(actor)
    bundles.close()

def attempt(name, function):
    started = time.monotonic()
    try:
        function()
        said[name] = "no error"
    except Exception as error:
        said[name] = f"{type(error).__name__} after {time.monotonic() - started:.0f} s: {error}"

compare(
    "colocated",
    planned(actor_num_nodes=2, actor_num_gpus_per_node=2, colocate=True, rollout_num_gpus_per_engine=2),
)
compare(
    "disaggregated",
    planned(actor_num_nodes=2, actor_num_gpus_per_node=2, rollout_num_gpus=4, rollout_num_gpus_per_engine=4),
)
granular = planned(
    loss={"advantage_estimator": "ppo", "use_kl_loss": True}, checkpoint={"reward_load": "r"},
    colocate_policy_ref=False, actor_num_gpus_per_node=2,
    colocate_critic_reward=True, rollout_num_gpus=2,
)
compare("granular", granular)
compare("all training", planned(
    loss={"advantage_estimator": "ppo", "use_kl_loss": True}, checkpoint={"reward_load": "r"},
    colocate_training=True, colocate=True, actor_num_gpus_per_node=1,
    actor_num_nodes=1, num_gpus_per_node=1,
))
held = reserve(planned(actor_num_nodes=3, actor_num_gpus_per_node=2, rollout_num_gpus=1), 60)
attempt("held", lambda: reserve(planned(actor_num_gpus_per_node=2, rollout_num_gpus=2), 2))
held.close()
attempt("too many", lambda: reserve(planned(actor_num_nodes=4, actor_num_gpus_per_node=2, rollout_num_gpus=1), 60))
too_large = planned(num_gpus_per_node=8, actor_num_gpus_per_node=4, rollout_num_gpus=4, rollout_num_gpus_per_engine=4)
attempt("too large", lambda: reserve(too_large, 60))
# The plan believes in machines of 8, so whether Ray tears an engine is chance; in either case nothing stays reserved.
odd = planned(num_gpus_per_node=8, actor_num_gpus_per_node=1, rollout_num_gpus=4, rollout_num_gpus_per_engine=2)
attempt("perhaps torn", lambda: reserve(odd, 60).close())
attempt("freed", lambda: reserve(planned(actor_num_nodes=4, actor_num_gpus_per_node=2, colocate=True), 30).close())
ray.shutdown()
cluster.shutdown()
with open(sys.argv[1], "w") as file:
    json.dump(said, file)
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What the script found; in a file, for Ray's threads write to stdout too, in the middle of a line."""
    file = tmp_path_factory.mktemp("multinode") / "said.json"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(file)],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return json.loads(file.read_text())


@pytest.mark.parametrize(
    ("name", "seats", "machines"),
    [("colocated", 8, 2), ("disaggregated", 8, 4), ("granular", 10, 4), ("all training", 4, 1)],
)
def test_roles_sit_where_the_plan_says(said, name, seats, machines):
    assert said[name] == f"SAME {seats} seats on {machines} machines"


def test_waiting_ends_at_the_deadline_and_says_which_machine_has_what(said):
    line = said["held"]
    assert "PlacementError after" in line and "--placement-timeout 2" in line and "4 GPUs and 4 CPUs are needed" in line
    assert line.count("0 of 2 GPUs free") == 3 and line.count("1 of 2 GPUs free") == 1, line


def test_more_gpus_than_the_cluster_has(said):
    assert "PlacementError after 0 s: the plan needs 9 GPUs, but the Ray cluster has 8 on 4 nodes" in said["too many"]


def test_enough_gpus_but_no_machine_large_enough_for_an_engine(said):
    line = said["too large"]
    assert (
        "PlacementError after 0 s: each engine needs 4 GPUs on one machine, but no machine has them, though there are 8"
        " GPUs in all" in line
    )
    assert line.count("of 2 GPUs free") == 4 and "--rollout-num-gpus-per-engine 4" in line


def test_nothing_stays_reserved(said):
    assert said["perhaps torn"] == "no error" or "Ray spread engine" in said["perhaps torn"]
    assert said["freed"] == "no error"


RUN = """
import os, subprocess, sys
from ray.cluster_utils import Cluster
cluster = Cluster()
for number in range(3):
    cluster.add_node(num_cpus=2, num_gpus=1, include_dashboard=False)
cluster.wait_for_nodes(60)
status = subprocess.run(
    [sys.executable, "train.py", *sys.argv[1:]], env=os.environ | {"RAY_ADDRESS": cluster.address}
).returncode
cluster.shutdown()
sys.exit(status)
"""


@pytest.mark.long_run  # 80 s; beside it test_two_machines.py and the ranks of one engine in tests/contract
def test_one_engine_over_two_machines_is_trained_and_synced(tiny_model_dir, tiny_data_dir, tmp_path):
    before = our_processes()
    flags = [
        *SMALL_RUN, "--hf-checkpoint", tiny_model_dir, "--prompt-data", tiny_data_dir / "train.jsonl",
        "--num-gpus-per-node", "1",
        "--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "2", "--rollout-num-gpus-per-engine", "2", "--run-dir",
        tmp_path / "run",
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", RUN, *map(str, flags)],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    run = Finished(done.returncode, done.stdout, tmp_path / "run")
    assert run.returncode == 0, run.logs()
    assert "engine 0 spans nodes 1 (rank 0), 2 (rank 1)" in run.output
    first, second = ((tmp_path / "run/logs" / name).read_text() for name in ("engine-0.log", "engine-0.1.log"))
    assert "TP0" in first and "TP1" not in first and "TP1" in second and "TP0" not in second
    assert [line["sync/version"] for line in run.metrics("sync")] == [1, 2, 3, 4]
    assert len({line["sync/digest"] for line in run.metrics("sync")}) == 4
    assert max(line["train/logprob_abs_diff_max"] for line in run.metrics("train")) <= 1e-4
    assert_nothing_left(before)
