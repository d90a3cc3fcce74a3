"""Policy, critic and reference in processes of their own, on one rollout: its samples are in the object store once."""

import dataclasses
import os
import signal
import time

import numpy as np
import psutil
import pytest
import ray
from ray._private.internal_api import node_stats

from slime_like.cluster.bundles import reserve
from slime_like.cluster.ray_session import connect
from slime_like.cluster.sample_batch import SampleBatch, rows_of
from slime_like.cluster.train_group import TrainGroup
from slime_like.config.placement import PlacementConfig
from slime_like.errors import ProcessLost
from slime_like.planning.placement import make_plan
from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.train_world import make_config, make_samples

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(240)]

PPO = {"advantage_estimator": "ppo", "kl_coef": 0.1, "use_kl_loss": True}


def objects_created() -> int:
    """Objects that were ever put into this node's store, by Ray's own count; small answers of actors are not."""
    (node,) = ray.nodes()
    return node_stats(
        node["NodeManagerAddress"], node["NodeManagerPort"], include_memory_info=False
    ).store_stats.cumulative_created_objects


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    """role -> its started group, one rank each."""
    os.environ["RAY_ADDRESS"] = "local"
    root = tmp_path_factory.mktemp("groups")
    folder, other = (
        make_tiny_model(str(root / "model"), "qwen2", tied=True),
        make_tiny_model(str(root / "other"), "qwen2", tied=True, seed=1),
    )
    config = make_config(folder, loss=PPO, num_steps=2, checkpoint={"ref_load": other, "load": folder})
    config = dataclasses.replace(
        config, placement=PlacementConfig(actor_num_gpus_per_node=1, colocate_policy_ref=False, debug_train_only=True)
    )
    plan = make_plan(config)
    connect(plan.num_gpus)
    bundles = reserve(plan, 60)
    started = {role: TrainGroup(config, plan, bundles, str(root), role) for role in ("actor", "critic", "ref")}
    for group in started.values():
        group.start()
    for group in started.values():
        group.wait_started()
    yield started
    for group in started.values():
        group.close()
    bundles.close()
    ray.shutdown()


def test_samples_are_put_once_a_step_and_arrays_travel_beside_them(groups):
    samples = make_samples()
    before = objects_created()
    batch = groups["actor"].put(samples)
    assert isinstance(batch, SampleBatch) and len(batch) == len(samples)
    batch = groups["ref"].with_reference(batch)
    batch = groups["actor"].with_kl(batch)
    batch = groups["critic"].with_values(batch)
    fitted = groups["critic"].train(0, batch)
    report = groups["actor"].train(0, batch)
    assert objects_created() - before == 1
    assert fitted.num_train_steps == report.num_train_steps == 2 and fitted.num_samples == report.num_samples == len(
        samples
    )
    columns = {name: rows_of(ray.get(ref)) for name, ref in batch.columns}
    assert set(columns) == {"reference_logprobs", "kl", "values"}
    for rows in columns.values():
        assert [len(row) for row in rows] == [len(sample.tokens) for sample in samples] and rows[0].dtype == np.float32
    assert max(np.abs(row).max() for row in columns["kl"]) > 0.01 and np.isfinite(report.metrics["train/kl_loss"])


def test_a_rank_that_is_stopped_is_ended_by_name(groups, monkeypatch):
    """Long before the deadline of the call; the last test here, since the reference is gone afterwards."""
    group = groups["ref"]
    parallel = dataclasses.replace(group._config.parallel, trainer_hang_timeout_s=3.0)
    monkeypatch.setattr(group, "_config", dataclasses.replace(group._config, parallel=parallel))
    batch, pid = group.put(make_samples()), ray.get(group.actors[0].pid.remote())
    group.probe(make_samples())  # looked at, as in any wait
    os.kill(pid, signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(ProcessLost, match=rf"reference rank 0 \(process {pid}\) gave no sign of life for \d s during"):
        group._all("with_reference", "score", batch)
    assert time.monotonic() - started < 30 and list(group.lost_ranks()) == ["reference rank 0"]
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.1)
        assert time.monotonic() - started < 30
