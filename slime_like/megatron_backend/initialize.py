"""Process groups and seeds of one trainer rank."""

from __future__ import annotations

import datetime
import os
import random
import time

import numpy as np
import torch
from megatron.core import parallel_state, tensor_parallel

from slime_like.config.parallel import ParallelConfig
from slime_like.errors import RunError, WaitTimeout
from slime_like.utils.net import host_port, interface_of, own_address
from slime_like.weight_sync.stores import join_store, meet_at_address, meet_in_file

#: Pipeline stages draw from different streams, tensor parallel ranks of one stage from megatron's own tracker.
_SEED_STEP_PER_STAGE = 100


def initialize(
    parallel: ParallelConfig,
    *,
    rank: int,
    world_size: int,
    local_rank: int,
    master_address: str,
    master_port: int,
    store_path: str | None = None,
    virtual_pipeline_size: int | None = None,
) -> None:
    """Join the world and make Megatron's groups: NCCL with CUDA (on device `local_rank`), gloo without.

    store_path: a file, not there yet, in a private folder, where ranks of one machine meet instead of at the address:
    nobody else can.
    virtual_pipeline_size: model chunks of a rank, with an interleaved pipeline.
    Raises WaitTimeout if the other ranks do not show up within --distributed-timeout-minutes, RunError if the address
    cannot be used.
    """
    minutes = parallel.distributed_timeout_minutes
    if torch.cuda.is_available():
        # A launcher that shows each process one device only leaves just device 0.
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
    # gloo would otherwise resolve this host's name, which may lead to an interface that the others cannot reach.
    interface = interface_of(own_address(master_address))
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    started, meeting = time.monotonic(), f"{world_size} ranks at {store_path or host_port(master_address, master_port)}"
    try:
        torch.distributed.init_process_group(
            "nccl" if torch.cuda.is_available() else "gloo",
            store=_meet(rank, world_size, master_address, master_port, store_path, 60.0 * minutes),
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(minutes=minutes),
        )
    except (RuntimeError, OSError) as error:  # DistError, or a plain one of a FileStore
        waited = time.monotonic() - started
        if waited < 60.0 * minutes - 1:
            raise RunError(f"trainer rank {rank} cannot join {meeting} during start: {error}") from error
        raise WaitTimeout(
            who=f"trainer rank {rank}", whom=meeting, phase="start", seconds=waited, last=str(error)
        ) from error
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=virtual_pipeline_size,
        context_parallel_size=parallel.context_parallel_size,
        expert_model_parallel_size=parallel.expert_model_parallel_size,
        expert_tensor_parallel_size=parallel.expert_tp_size,
        distributed_timeout_minutes=minutes,
    )


def _meet(
    rank: int, world_size: int, address: str, port: int, path: str | None, timeout_s: float
) -> torch.distributed.Store:
    """The store of the world."""
    if path is not None or world_size == 1:
        return meet_in_file(path or "", world_size=world_size, timeout_s=timeout_s)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun serves it
        return join_store(address, port, timeout_s=timeout_s, world_size=world_size)
    return meet_at_address(address, port, rank=rank, world_size=world_size, timeout_s=timeout_s)


def set_seeds(seed: int, *, deterministic: bool = False) -> None:
    """Seed every generator of this rank from the run's seed. deterministic: and keep sums in one order, too.

    Before anything is built.
    """
    if deterministic:
        _fix_orders()
    stage_seed = seed + _SEED_STEP_PER_STAGE * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(stage_seed)
    np.random.seed(stage_seed)
    torch.manual_seed(stage_seed)
    tensor_parallel.model_parallel_cuda_manual_seed(stage_seed)


def shut_down() -> None:
    """Leave the groups and the world. Safe to call twice."""
    if torch.distributed.is_initialized():
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def _fix_orders() -> None:
    """Let torch, Megatron and NCCL add up in an order that does not change from run to run; for this whole process.

    CUDA's and NCCL's libraries read their variables at their first use, which comes later. An operation that has no
    such order raises RuntimeError, by torch.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("NCCL_ALGO", "Ring")
    os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    torch.use_deterministic_algorithms(True)
    # Only who reads memory that nobody has written would see a difference.
    torch.utils.deterministic.fill_uninitialized_memory = False
