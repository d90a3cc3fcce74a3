"""cudaIpc handles between pretending processes: torch.multiprocessing's own way of sending a device tensor, with the
numbers in shared host memory instead of a device's.

What is sent is what torch sends (rebuild_cuda_tensor and its 15 arguments), so that SGLang's serializer, which changes
the device's place among them, works as it is. The receiver sees what the sender writes later, as with the real thing; a
process whose card is another cannot open the handle.
"""

from __future__ import annotations

import pickle
from multiprocessing.reduction import ForkingPickler

import torch
from torch.multiprocessing import reductions

from tests.pretend_gpu.device import PretendTensor
from tests.pretend_gpu.record import RECORD


def install() -> None:
    """Let this process send and receive device tensors."""
    real = reductions.reduce_tensor

    def reduce_tensor(tensor):
        return _reduce(tensor) if isinstance(tensor, PretendTensor) else real(tensor)

    def rebuild_cuda_tensor(*args):
        return _rebuild(*args)

    rebuild_cuda_tensor.__module__, rebuild_cuda_tensor.__qualname__ = reductions.__name__, "rebuild_cuda_tensor"
    reductions.reduce_tensor, reductions.rebuild_cuda_tensor = reduce_tensor, rebuild_cuda_tensor
    # SGLang's monkey_patch_torch_reductions() puts its own around ours; looked up when something is sent.
    ForkingPickler.register(PretendTensor, lambda tensor: reductions.reduce_tensor(tensor))


def _reduce(tensor: PretendTensor) -> tuple:
    if tensor.requires_grad and not tensor.is_leaf:
        raise RuntimeError("Cowardly refusing to serialize non-leaf tensor which requires_grad")
    storage = tensor.host.untyped_storage()
    manager, name, size = storage._share_filename_cpu_()
    RECORD.note("ipc_share", bytes=size, name=name.decode())
    handle = pickle.dumps((RECORD.card, manager, name))
    arguments = (
        PretendTensor,
        tensor.size(),
        tensor.stride(),
        tensor.storage_offset(),
        torch.storage.TypedStorage,
        tensor.dtype,
        0,  # the device's index
        handle,
        size,
        0,
        tensor.requires_grad,
        b"",
        0,
        b"",
        False,
    )
    return reductions.rebuild_cuda_tensor, arguments


def _rebuild(
    _cls, size, stride, offset, _storage, dtype, device, handle, nbytes, storage_offset, requires_grad, *_
) -> torch.Tensor:
    owner, manager, name = pickle.loads(handle)
    if owner != RECORD.card:
        raise RuntimeError(
            f"CUDA error: invalid device context: a handle of card {owner}, opened on card {RECORD.card}"
        )
    assert device == 0, f"a handle for device {device}, and this process has one device"
    storage = torch.UntypedStorage._new_shared_filename_cpu(manager, name, nbytes)
    RECORD.note("ipc_open", bytes=nbytes, name=name.decode())
    with torch.utils._python_dispatch._disable_current_modes():
        host = torch.empty(0, dtype=dtype).set_(storage, storage_offset // dtype.itemsize + offset, size, stride)
    tensor = PretendTensor(host)
    tensor.requires_grad_(requires_grad)
    return tensor
