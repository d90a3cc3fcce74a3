"""Buckets that stay on the GPU: the engine gets a CUDA IPC handle of the flat bytes and SGLang's description of the
tensors in them.

The protocol is tested on the host, where the handle is the bytes themselves; with CUDA it has not been run.
"""

from __future__ import annotations

import base64
import pickle

import torch

from slime_like.weight_sync.buckets import PublisherOptions
from slime_like.weight_sync.transports.slots import BucketSlot

#: SGLang's name of {"flattened_tensor": uint8 [bytes], "metadata": [FlattenedTensorMetadata]}.
LOAD_FORMAT = "flattened_bucket"


def is_possible(options: PublisherOptions) -> bool:
    """Whether the engine can open memory of this process's GPU.

    With one source and one engine the source is the trainer's first rank, whose GPU is among the engine's, as placement
    puts both at the start. Other engines see other GPUs only, on which nobody has gathered the weights.
    """
    return torch.cuda.is_available() and options.num_sources == 1 and len(options.endpoints) == 1


def handle_of(slot: BucketSlot) -> str:
    """The request's text for one rank, base64. The slot must not change until the engine has answered.

    An engine answers after it has let go of the handle, and torch waits for the device's copies before that.
    """
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

    metadata = [
        FlattenedTensorMetadata(
            name=entry.name,
            shape=torch.Size(entry.shape),
            dtype=getattr(torch, entry.dtype),
            start_idx=entry.start,
            end_idx=entry.stop,
            numel=entry.stop - entry.start,
        )
        for entry in slot.entries
    ]
    flat = slot.filled()
    if not flat.is_cuda:
        # SGLang's serializer would send a file descriptor, which its server cannot receive (0.5.23: it ends).
        return base64.b64encode(pickle.dumps({"flattened_tensor": flat.clone(), "metadata": metadata})).decode()
    from sglang.srt.utils import MultiprocessingSerializer

    torch.cuda.synchronize(flat.device)
    return MultiprocessingSerializer.serialize({"flattened_tensor": flat, "metadata": metadata}, output_str=True)
