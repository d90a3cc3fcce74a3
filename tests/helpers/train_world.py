"""Runs a function on several trainer ranks (gloo) in one go, with a deadline."""

from __future__ import annotations

import dataclasses
import itertools
import os
import queue
import random
import time
import traceback

import numpy as np

from slime_like.config.batch import BatchConfig
from slime_like.config.checkpoint import CheckpointConfig
from slime_like.config.data import DataConfig
from slime_like.config.hf_model import model_from_hf, read_hf_config
from slime_like.config.lora import LoraConfig
from slime_like.config.loss import LossConfig
from slime_like.config.model import ModelConfig
from slime_like.config.optimizer import OptimizerConfig
from slime_like.config.parallel import ParallelConfig
from slime_like.config.placement import PlacementConfig
from slime_like.config.rollout import RolloutConfig
from slime_like.config.run import RunConfig
from slime_like.records import BASE, TrainSample, WeightsRef, per_token
from slime_like.utils.net import port_is_free
from slime_like.weight_sync.session import PublishOrder


def make_config(
    hf_checkpoint: str, *, num_ranks: int = 1, num_samples: int = 8, num_steps: int = 1, **groups
) -> RunConfig:
    """A RunConfig for a tiny model; `groups` are keyword dicts that change a group:
    parallel={"tensor_model_parallel_size": 2}.
    """
    options = {
        name: dict(groups.get(name, {}))
        for name in ("parallel", "checkpoint", "batch", "loss", "optimizer", "rollout", "lora", "model")
    }
    return RunConfig(
        placement=PlacementConfig(actor_num_gpus_per_node=num_ranks),
        model=dataclasses.replace(model_from_hf(read_hf_config(hf_checkpoint), ModelConfig()), **options["model"]),
        parallel=ParallelConfig(**{"distributed_timeout_minutes": 1} | options["parallel"]),
        checkpoint=CheckpointConfig(**{"hf_checkpoint": hf_checkpoint} | options["checkpoint"]),
        data=DataConfig(num_rollout=10),
        rollout=RolloutConfig(
            **{"rollout_batch_size": num_samples // 2, "n_samples_per_prompt": 2} | options["rollout"]
        ),
        batch=BatchConfig(**{"num_steps_per_rollout": num_steps} | options["batch"]),
        loss=LossConfig(**options["loss"]),
        optimizer=OptimizerConfig(**{"lr": 1e-2, "weight_decay": 0.0, "bf16": False} | options["optimizer"]),
        lora=LoraConfig(**options["lora"]),
    )


def disk_order(folder: str, version: int) -> PublishOrder:
    """A sync to a folder, which no engine loads."""
    return PublishOrder(
        weights=WeightsRef(version=version), endpoints=(), transport="disk", timeout_s=60.0, directory=folder
    )


def make_samples(num_samples: int = 8, *, vocab_size: int = 101, seed: int = 0) -> list[TrainSample]:
    """Ragged samples of 5 to 24 tokens with random advantages and engine log-probs; a hole in some loss masks."""
    generator = np.random.default_rng(seed)
    samples = []
    for index in range(num_samples):
        length = int(generator.integers(5, 25))
        mask = np.ones(length, dtype=np.int8)
        mask[: int(generator.integers(1, 4))] = 0
        if length > 12:
            mask[length // 2] = 0
        samples.append(
            TrainSample(
                prompt_index=index // 2,
                sample_index=index % 2,
                tokens=generator.integers(0, vocab_size, length).astype(np.int32),
                loss_mask=mask,
                engine_logprobs=(-4.6 + generator.normal(size=length) * mask).astype(np.float32) * mask,
                weight_versions=np.where(mask, 0, -1).astype(np.int32),
                reward=0.0,
                advantages=per_token(float(generator.normal()), mask),
                weights=per_token(1.0, mask),
            )
        )
    return samples


def advantage_of(sample: TrainSample) -> float:
    """The one advantage of all trained tokens; 0 without any."""
    trained = sample.advantages[sample.loss_mask != 0]
    return float(trained[-1]) if len(trained) else 0.0


def recipe_of(worker):
    """What the ranks of the worker's role do with a rollout."""
    from slime_like.megatron_backend import rl_recipe

    return rl_recipe.recipe_of(worker)


def add_gradients(worker, samples) -> dict[str, float]:
    """One train step's gradients as the policy's recipe takes them, and their metrics.

    The optimizer is not asked to step.
    """
    from slime_like.megatron_backend.step.loss_spec import LossSpec

    (batch,) = recipe_of(worker).ready([samples])
    return worker.forward_backward(batch, LossSpec(), weights=BASE).metrics


def optimizer_step(worker) -> dict[str, float]:
    """A step by the flags' numbers."""
    return worker.optim_step(None, weights=BASE)


def free_ports(count: int) -> list[int]:
    """Different ports below the range that outgoing connections use, so that nobody is given one by chance before we
    listen.
    """
    candidates = random.SystemRandom().sample(range(20_000, 32_000), min(50 * count, 12_000))
    return list(itertools.islice((port for port in candidates if port_is_free("127.0.0.1", port)), count))


def run_ranks(function, num_ranks: int, *args, timeout_s: float = 120.0) -> list:
    """[function(place, *args) of each rank], where place holds TrainWorker's keyword arguments. One process per rank.

    Raises RuntimeError with a rank's traceback, or TimeoutError naming the ranks that did not answer; no process is
    left behind.
    """
    import torch.multiprocessing as processes

    # One process imports everything, once for all tests, and forks the ranks: torch, megatron and transformers take
    # seconds.
    context = processes.get_context("forkserver")
    context.set_forkserver_preload(["slime_like.megatron_backend.worker", "transformers.models.auto.modeling_auto"])
    answers = context.Queue()
    port = free_ports(1)[0]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    world = []
    for rank in range(num_ranks):
        place = {
            "rank": rank,
            "world_size": num_ranks,
            "local_rank": rank,
            "master_address": "127.0.0.1",
            "master_port": port,
        }
        world.append(context.Process(target=_answer, args=(function, place, args, answers), daemon=True))
    for process in world:
        process.start()
    results: dict = {}
    end = time.monotonic() + timeout_s
    try:
        while len(results) < num_ranks:
            try:
                rank, value, error = answers.get(timeout=min(1.0, max(0.01, end - time.monotonic())))
            except queue.Empty:
                dead = [r for r, p in enumerate(world) if p.exitcode not in (None, 0) and r not in results]
                if dead:
                    raise RuntimeError(f"ranks {dead} died with {[world[r].exitcode for r in dead]}") from None
                if time.monotonic() > end:
                    raise TimeoutError(
                        f"ranks {sorted(set(range(num_ranks)) - set(results))} did not answer within {timeout_s} s"
                    ) from None
                continue
            if error:
                raise RuntimeError(f"rank {rank}:\n{error}")
            results[rank] = value
        for process in world:
            process.join(timeout=20)
    finally:
        for process in world:
            if process.is_alive():
                process.kill()
            process.join(timeout=10)
    return [results[rank] for rank in range(num_ranks)]


def _answer(function, place: dict, args: tuple, answers) -> None:
    try:
        import torch

        torch.set_num_threads(1)
        answers.put((place["rank"], function(place, *args), None))
    except BaseException:  # noqa: BLE001 - the parent raises it
        answers.put((place["rank"], None, traceback.format_exc()))
