"""What trainer and engine do alike with a GPU: wait for one stream alone, and open each other's memory. Imports nothing
heavy at the start.

Never torch.cuda.synchronize(): it waits for every stream of the card. A thread that receives from one trainer source
would wait for the kernel that receives from another one, which waits for another engine, whose thread may be waiting
for us in the same way: for good.
"""

from __future__ import annotations

import base64
from typing import Any

#: What of torch's rebuild_cuda_tensor arguments a handle carries as they are, and which of them are bytes.
_NUMBERS = {"size": 8, "offset": 9, "counter_offset": 12, "event_required": 14}
_BYTES = {"memory": 7, "counter": 11, "event": 13}
_DEVICE, _FIRST = 6, 3


def settle(device: Any) -> None:
    """Wait until a GPU has done all that this thread's current stream was given; nothing to wait for on the host."""
    import torch

    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def handle_of(flat: Any) -> dict:
    """What another process needs to open this memory, for JSON. flat: uint8 [bytes] on a GPU.

    For one reader, which has to open it: torch counts readers, and keeps the memory until each has let go. It names the
    GPU by its UUID, because processes that see other GPUs give other numbers to the same one.
    """
    from torch.multiprocessing import reductions

    _, args = reductions.reduce_tensor(flat)
    device = args[_DEVICE]  # SGLang's patch of torch, where it is in place, has put the UUID there
    handle = {name: args[place] for name, place in _NUMBERS.items()}
    handle |= {name: base64.b64encode(args[place]).decode() for name, place in _BYTES.items()}
    return handle | {
        "gpu": device if isinstance(device, str) else gpu_uuid(device),
        "first": args[_FIRST],
        "length": flat.numel(),
    }


def open_handle(handle: dict) -> Any:
    """The memory that handle_of described, uint8 [length]: the trainer's own bytes, open until the last tensor over
    them is gone.

    Raises RuntimeError naming the GPUs if this process does not see the one that it is on.
    """
    import torch
    from torch.multiprocessing import reductions

    seen = [gpu_uuid(number) for number in range(torch.cuda.device_count())]
    if handle["gpu"] not in seen:
        raise RuntimeError(
            f"the trainer's weights are on GPU {handle['gpu']}, and this process sees {', '.join(seen) or 'none'}"
        )
    raw = {name: base64.b64decode(handle[name]) for name in _BYTES}
    return reductions.rebuild_cuda_tensor(
        torch.Tensor, torch.Size([handle["length"]]), (1,), handle["first"], torch.storage.TypedStorage, torch.uint8,
        seen.index(handle["gpu"]), raw["memory"], handle["size"], handle["offset"], False, raw["counter"],
        handle["counter_offset"], raw["event"], handle["event_required"],
    )  # fmt: skip


def gpu_uuid(number: int) -> str:
    """The same in every process, whichever GPUs it sees."""
    import torch

    return str(torch.cuda.get_device_properties(number).uuid)
