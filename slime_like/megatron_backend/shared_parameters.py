"""Where engines on the same host take weights in, the trainer's parameters lie in memory that they can map."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from slime_like.config.run import RunConfig
from slime_like.weight_sync.buckets import aligned_bytes
from slime_like.weight_sync.shared_weights import SharedWeights

logger = logging.getLogger(__name__)


def share_parameters(config: RunConfig, model: Sequence[torch.nn.Module]) -> SharedWeights | None:
    """Move a policy's parameters to shared memory, where its weight syncs are by ipc on a CPU host. To be called before
    anything but Megatron's data parallel wrapper has looked at their memory.

    None where they stay: another role or transport, a GPU, adapters, several ranks a tensor (what is sent is gathered
    from them), or no room (which is logged).
    """
    parameters = list(dict.fromkeys(parameter for chunk in model for parameter in chunk.parameters()))
    on_host = all(parameter.device.type == "cpu" for parameter in parameters)
    is_sent = config.role == "actor" and config.sync.update_weight_transport == "ipc" and config.adapters is None
    parallel = config.parallel
    is_whole = parallel.tensor_model_parallel_size == parallel.pipeline_model_parallel_size == 1
    if not (on_host and is_sent and is_whole) or config.offloads_train(on_gpu=False):
        return None
    buffers = [buffer for chunk in model for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    buffers = [buffer for buffer in buffers if buffer.param_data is not None]
    in_buffers = {parameter for buffer in buffers for parameter in buffer.param_index_map}
    alone = [parameter for parameter in parameters if parameter not in in_buffers]
    size = sum(aligned_bytes(tensor) for tensor in (*alone, *(buffer.param_data for buffer in buffers)))
    try:
        shared = SharedWeights(size)
    except OSError as error:
        logger.info("parameters stay in private memory, from which each weight sync copies them: %s", error)
        return None
    for parameter in alone:
        parameter.data = shared.take(parameter)
    for buffer in buffers:
        _move(buffer, shared)
    return shared


def _move(buffer, shared: SharedWeights) -> None:
    """Megatron's buffer (0.16.1, _ParamAndGradBuffer), and all that its constructor made as views of it."""
    memory = shared.take(buffer.param_data)
    for parameter, (start, stop, _) in buffer.param_index_map.items():
        parameter.data = memory[start:stop].view(parameter.shape)
    for bucket in buffer.buckets:
        bucket.param_data = memory[bucket.offset : bucket.offset + bucket.param_data.numel()]
    buffer.param_data = memory
