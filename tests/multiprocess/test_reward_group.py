"""The reward model's processes: as many copies as GPUs, the same scores; a copy that dies or hangs is named.

One Ray for all cases.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time

import numpy as np
import pytest
import ray

from slime_like.cluster.bundles import Bundles, reserve
from slime_like.cluster.ray_session import LifeWatch, connect
from slime_like.cluster.reward_group import RewardGroup
from slime_like.config.checkpoint import CheckpointConfig
from slime_like.config.model import ModelConfig
from slime_like.config.placement import PlacementConfig
from slime_like.config.reward import RewardConfig
from slime_like.config.rollout import RolloutConfig
from slime_like.config.run import RunConfig
from slime_like.errors import CheckpointError, ConfigError, RunError, WaitTimeout
from slime_like.planning.placement import PlacementPlan, make_plan
from slime_like.records import Prompt, Sample
from tests.helpers.tiny_rewards import TINY, hf_scores, make_reward_model

PROMPT = Prompt(index=0, text="", tokens=np.array([3], dtype=np.int32))


def config_of(folder, **options) -> RunConfig:
    """Three bundles: the policy's, and two of the reward model."""
    rollout = RolloutConfig(rollout_max_context_len=options.pop("context", 512))
    return RunConfig(
        placement=PlacementConfig(
            actor_num_gpus_per_node=1, reward_num_gpus_per_node=options.pop("copies", 2), rollout_num_gpus=1
        ),
        checkpoint=CheckpointConfig(hf_checkpoint=str(TINY), reward_load=str(folder)),
        model=ModelConfig(max_position_embeddings=1024),
        rollout=rollout,
        reward=RewardConfig(**({"reward_batch_size": 3} | options)),
    )


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """(plan of two copies, its bundles)."""
    os.environ["RAY_ADDRESS"] = "local"
    plan = make_plan(config_of("anywhere"))
    connect(plan.num_gpus)
    bundles = reserve(plan, 60)
    yield plan, bundles
    bundles.close()
    ray.shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_reward_model(tmp_path_factory.mktemp("reward"))


def samples(count=20) -> list[Sample]:
    rng = np.random.default_rng(0)
    answers = []
    for index in range(count):
        length = int(rng.integers(2, 40))
        arrays = {
            "loss_mask": np.ones(length, np.int8),
            "engine_logprobs": np.zeros(length, np.float32),
            "weight_versions": np.zeros(length, np.int32),
        }
        answers.append(
            Sample(
                prompt_index=0,
                sample_index=index,
                tokens=rng.integers(3, 300, length).astype(np.int32),
                response="",
                **arrays,
            )
        )
    return answers


def elsewhere(bundles: Bundles) -> Bundles:
    """The same bundles in another order, so that two groups of one copy each do not want the same GPU."""
    return Bundles(bundles.group, [*bundles.gpus[2:], *bundles.gpus[:2]], bundles.cpus)


def scores(group: RewardGroup, batch: list[Sample]) -> list[float]:
    """All at once, in a loop of their own as the rollout has one."""

    async def run():
        return await asyncio.gather(*(group.score(PROMPT, sample) for sample in batch))

    group._queue = None  # a loop of the test's own each time
    return asyncio.run(run())


def test_two_copies_score_as_one_and_a_lost_one_is_named(cluster: tuple[PlacementPlan, Bundles], folder, tmp_path):
    plan, bundles = cluster
    batch, impatient = samples(), config_of(folder, copies=1, reward_model_timeout_s=0.5)
    both = RewardGroup(config_of(folder), plan, bundles, str(tmp_path))
    one = RewardGroup(impatient, make_plan(impatient), elsewhere(bundles), str(tmp_path))
    try:
        for group in (both, one):
            group.start()
        for group in (both, one):
            assert group.wait_started()["reads_tokens"]
        expected = hf_scores(folder, [sample.tokens for sample in batch])
        np.testing.assert_allclose(scores(both, batch), expected, atol=1e-5, rtol=0)
        pids = ray.get(list(both.pings().values()))
        assert len(set(pids)) == 2 and len(one.actors) == 1

        os.kill(ray.get(one.actors[0].pid.remote()), signal.SIGSTOP)
        with pytest.raises(
            WaitTimeout,
            match=(
                "rollout waited 0 s for reward model rank 0 during score. Last heard: 3 samples were sent to it, the"
                " first prompt"
            ),
        ):
            scores(one, batch)
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(RunError, match="reward model rank 1 died during score"):
            scores(both, batch)
        watch = LifeWatch(both.pings)
        with pytest.raises(RunError, match="reward model rank 1 died during train"):
            for _ in range(100):
                watch.check("train")
                time.sleep(0.1)
    finally:
        for group in (both, one):
            group.close()


def test_a_model_that_cannot_score_these_samples_ends_the_start(
    cluster: tuple[PlacementPlan, Bundles], folder, tmp_path
):
    _, bundles = cluster
    two_outputs = make_reward_model(tmp_path / "two", num_labels=2)
    cases = [
        (config_of(two_outputs, copies=1), bundles, CheckpointError, "has 2 outputs"),
        (
            config_of(folder, copies=1, context=900),
            elsewhere(bundles),
            ConfigError,
            r"takes 512 tokens .* have 900. Fix: --rollout-max-context-len 512",
        ),
    ]
    groups = [RewardGroup(config, make_plan(config), where, str(tmp_path)) for config, where, _, _ in cases]
    try:
        for group in groups:
            group.start()
        for group, (_, _, error, message) in zip(groups, cases, strict=True):
            with pytest.raises(error, match=message):
                group.wait_started()
    finally:
        for group in groups:
            group.close()
