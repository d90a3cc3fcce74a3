"""The reward model's processes as one object that scores samples: each GPU of the role holds a whole copy and takes
batches in turn.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayActorError, RayTaskError

from slime_like.cluster.bundles import Bundles
from slime_like.cluster.gpu_environment import device_number
from slime_like.cluster.ray_session import Wait, call_error, kill_actors
from slime_like.cluster.train_group import redirect_output, threads_of
from slime_like.config.run import RunConfig
from slime_like.errors import ConfigError, WaitTimeout
from slime_like.planning.placement import PlacementPlan
from slime_like.records import Prompt, Sample
from slime_like.reward_model.inputs import RewardInput
from slime_like.rollout.data_source import context_tokens
from slime_like.utils.logs import start_logging

logger = logging.getLogger(__name__)


class RewardActor:
    """One copy of the reward model in its own process; forwards to reward_model.model.RewardModel."""

    def __init__(self, log_path: str, num_threads: int, log_level: str | None):
        redirect_output(log_path)
        start_logging(log_level)
        # before torch is imported; Ray's own value counts only this actor's CPU share
        os.environ["OMP_NUM_THREADS"] = str(num_threads)
        self._model: Any = None  # RewardModel, whose import needs torch

    def build(self, config: RunConfig) -> dict:
        """Load the model; returns what it is like."""
        from slime_like.reward_model.model import RewardModel

        started = time.monotonic()
        gpu_ids = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        model = RewardModel(
            str(config.checkpoint.reward_load),
            policy_folder=str(config.checkpoint.hf_checkpoint),
            batch_size=config.reward.reward_batch_size,
            bf16=config.optimizer.bf16,
            device_number=device_number(gpu_ids, os.environ.get("CUDA_VISIBLE_DEVICES")),
        )
        self._model = model
        logger.info(
            "reward model %s: %d parameters loaded in %.1f s",
            config.checkpoint.reward_load,
            model.num_parameters,
            time.monotonic() - started,
        )
        return {
            "reads_tokens": model.reads_tokens,
            "context_tokens": model.context_tokens,
            "num_parameters": model.num_parameters,
        }

    def score(self, inputs: Sequence[RewardInput]) -> np.ndarray:
        """[N] float64."""
        return self._model.score(inputs)

    def pid(self) -> int:
        """Answers while the process lives."""
        return os.getpid()


@dataclasses.dataclass(frozen=True)
class _Waiting:
    """A sample in the queue, and whom to tell its score."""

    reward_input: RewardInput
    answer: asyncio.Future


class RewardGroup:
    """All copies of the reward model. score() belongs to one event loop, the rollout's; the rest to the driver.

    Samples queue up in the order in which they are generated. A copy that is free takes what waits there, at most
    --reward-batch-size: under load batches are full, and a lone sample does not wait for others. A sample's score does
    not depend on its batch.
    """

    def __init__(self, config: RunConfig, plan: PlacementPlan, bundles: Bundles, log_dir: str):
        self._config = config
        role = plan.roles["reward"]
        nodes = [bundles.gpus[index].node_id for index in role.bundles]
        actor_class = ray.remote(RewardActor)
        self.actors = []
        for rank, index in enumerate(role.bundles):
            options = bundles.options(index, plan.bundles[index].roles["reward"])
            threads, level = threads_of(nodes.count(nodes[rank])), config.observability.log_level
            self.actors.append(actor_class.options(**options).remote(f"{log_dir}/reward-{rank}.log", threads, level))
        self._builds: dict = {}
        self._queue: asyncio.Queue[_Waiting] | None = None
        self._tasks: list[asyncio.Task] = []

    def start(self) -> None:
        """Begin loading every copy; `wait_started` waits."""
        self._builds = {
            f"reward model rank {i}": actor.build.remote(self._config) for i, actor in enumerate(self.actors)
        }

    def wait_started(self) -> dict:
        """What the model is like.

        Raises CheckpointError for a folder that is no reward model, ConfigError if samples may be too long for it.
        """
        description = Wait(self._config.engine.engine_start_timeout_s, whom="the reward model", phase="start").gather(
            self._builds
        )[0]
        longest, limit = context_tokens(self._config), description["context_tokens"]
        if self._config.data.rollout_max_prompt_len:
            longest = min(
                longest, self._config.data.rollout_max_prompt_len + self._config.rollout.rollout_max_response_len
            )
        if description["reads_tokens"] and limit is not None and longest > limit:
            what = f"--reward-load {self._config.checkpoint.reward_load} takes {limit} tokens (max_position_embeddings)"
            raise ConfigError(
                [f"{what}, and prompt and response may have {longest}. Fix: --rollout-max-context-len {limit}."]
            )
        return description

    async def score(self, prompt: Prompt, sample: Sample) -> float:
        """The model's number for one sample.

        Raises RewardError naming the sample, RunError or WaitTimeout naming the copy that died or hangs.
        """
        if self._queue is None or all(task.done() for task in self._tasks):  # the loop before this one has ended
            self._queue = asyncio.Queue()
            self._tasks = [asyncio.create_task(self._serve(rank)) for rank in range(len(self.actors))]
        name = f"prompt {sample.prompt_index}, sample {sample.sample_index}"
        reward_input = RewardInput(
            name=name, tokens=sample.tokens, prompt=prompt.text, response=sample.response, messages=prompt.messages
        )
        waiting = _Waiting(reward_input, asyncio.get_running_loop().create_future())
        self._queue.put_nowait(waiting)
        return await waiting.answer

    async def _serve(self, rank: int) -> None:
        """Feed one copy until cancelled (by the rollout manager's end, with all other tasks of its loop)."""
        assert self._queue is not None
        while True:
            batch = [await self._queue.get()]
            while len(batch) < self._config.reward.reward_batch_size and not self._queue.empty():
                batch.append(self._queue.get_nowait())
            batch = [one for one in batch if not one.answer.cancelled()]
            if not batch:
                continue
            try:
                scores = await self._call(rank, [one.reward_input for one in batch])
            except Exception as error:  # noqa: BLE001 each sample that waits for this batch raises it
                for one in batch:
                    if not one.answer.done():
                        one.answer.set_exception(error)
                continue
            for one, score in zip(batch, scores, strict=True):
                if not one.answer.done():
                    one.answer.set_result(float(score))

    async def _call(self, rank: int, inputs: list[RewardInput]) -> np.ndarray:
        name, seconds = f"reward model rank {rank}", self._config.reward.reward_model_timeout_s
        future = self.actors[rank].score.remote(inputs).future()
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), seconds)
        except TimeoutError:
            last = (
                f"{len(inputs)} samples were sent to it, the first {inputs[0].name} (--reward-model-timeout-s,"
                " --reward-batch-size)"
            )
            raise WaitTimeout(who="rollout", whom=name, phase="score", seconds=seconds, last=last) from None
        except (RayTaskError, RayActorError) as error:
            raise call_error(error, name, "score") from None

    def pings(self) -> dict[str, ray.ObjectRef]:
        """A call to each copy that answers when it is free; it fails if the copy is dead."""
        return {f"reward model rank {i}": actor.pid.remote() for i, actor in enumerate(self.actors)}

    def close(self) -> None:
        """End every copy."""
        kill_actors(self.actors)
