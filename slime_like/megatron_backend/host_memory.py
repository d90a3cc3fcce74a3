"""Memory of the host for what a GPU gives away for a while: page-locked, so that copies run at the wire's speed and the
processor may go on meanwhile.
"""

from __future__ import annotations

import logging
import mmap
import weakref
from collections.abc import Callable

import torch

logger = logging.getLogger(__name__)

#: (address, bytes) -> how to undo it.
PageLock = Callable[[int, int], Callable[[], object]]


def cuda_page_lock(address: int, num_bytes: int) -> Callable[[], object]:
    """Keep this memory in place for the GPU. Raises RuntimeError if the driver cannot."""
    cudart = torch.cuda.cudart()
    torch.cuda.check_error(int(cudart.cudaHostRegister(address, num_bytes, 0)))
    return lambda: cudart.cudaHostUnregister(address)


def host_memory(num_bytes: int, device: torch.device, lock: PageLock = cuda_page_lock) -> torch.Tensor:
    """[num_bytes] uint8 on the host for copies of what lies on `device`: page-locked beside a GPU, else plain.

    Exactly as large as asked for: torch's own pinned memory is rounded up to a power of two, up to twice as much. Where
    locking fails, as with too little memory, it stays plain, which is slower only.
    """
    if device.type != "cuda" or not num_bytes:
        return torch.empty(num_bytes, dtype=torch.uint8)
    pages = mmap.mmap(-1, num_bytes)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    try:
        unlock = lock(memory.data_ptr(), num_bytes)
    except RuntimeError as error:
        logger.warning(
            "%.2f GiB of host memory could not be page-locked, copies are slow: %s", num_bytes / 2**30, error
        )
        return memory
    # The pages outlive every view of them. At the process' end the driver undoes it itself, and may be gone already.
    weakref.finalize(pages, unlock).atexit = False
    return memory


def wait_for_copies(device: torch.device) -> None:
    """Until copies between host and device that were begun in this thread are done."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
