"""Tensors that say cuda:0, hold their numbers on the host, and refuse to be mixed with the host's.

Every operation is run on the held numbers by torch's CPU kernels, so results are the CPU's to the last bit where the
program is the same. Where a real device would make the host wait for a value, the record counts it with its line.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from tests.pretend_gpu import collectives, kernels
from tests.pretend_gpu.record import RECORD, caller

DEVICE = torch.device("cuda", 0)
#: Operations that take tensors of both devices on a real one.
_MIXES = {"aten::copy_", "aten::_to_copy", "aten::set_.source_Tensor"}
#: Their host tensors are indices, which a real device takes too; with bool ones it has to count on the host.
_INDEXES = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index"}
#: The size of their result depends on values, for which the host waits.
_SIZED_BY_VALUES = {
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::bincount",
    "aten::equal",
    "aten::repeat_interleave",
}
#: id -> the wrappers that are alive: what memory_allocated() adds up.
_alive: dict[int, weakref.ref] = {}


class PretendTensor(torch.Tensor):
    """A tensor on cuda:0 whose numbers are in `host`, a tensor of the CPU with the same sizes, strides and type."""

    host: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, host: torch.Tensor):
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=DEVICE,
        )
        tensor.host = host
        key = id(tensor)
        _alive[key] = weakref.ref(tensor, lambda _: _alive.pop(key, None))
        return tensor

    def __repr__(self, **_) -> str:
        return f"on the pretended device: {self.host}"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})

    # Methods that never reach the dispatcher.

    @property
    def data(self):
        return PretendTensor(self.host)

    @data.setter
    def data(self, value):
        if not isinstance(value, PretendTensor):
            raise RuntimeError(f"a device tensor's data set from the {value.device.type} ({caller()})")
        self.host = value.host
        if (self.shape, self.dtype, self.stride()) != (value.shape, value.dtype, value.stride()):
            torch.Tensor.data.__set__(self, value)

    def tolist(self):
        RECORD.read("tolist")
        return self.host.tolist()

    def numpy(self, *_, **__):
        raise TypeError(
            "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory"
            " first."
        )

    def pin_memory(self, *_):
        raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")

    def is_pinned(self, *_):
        return False

    def record_stream(self, stream):
        RECORD.note("record_stream", stream=getattr(stream, "name", str(stream)))

    def data_ptr(self):
        return self.host.data_ptr()

    def untyped_storage(self):
        return self.host.untyped_storage()

    def is_shared(self):
        return True

    def type(self, dtype=None, *args, **kwargs):
        if dtype is None:
            return torch.Tensor.type(self.host).replace("torch.", "torch.cuda.")
        return torch.Tensor.type(self, dtype, *args, **kwargs)


class PretendMode(TorchDispatchMode):
    """Catches the operations without device tensors that make some: torch.zeros(…, device="cuda")."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})


def live_bytes() -> int:
    """Bytes of the storages that device tensors hold just now, each counted once."""
    sizes = {}
    for reference in list(_alive.values()):
        tensor = reference()
        if tensor is not None:
            storage = tensor.host.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def run(func, args: tuple, kwargs: dict) -> Any:
    """One operation on the held numbers; its results are on the device if its operands, or `device`, are."""
    flat, spec = tree_flatten((args, kwargs))
    has_device = any(isinstance(x, PretendTensor) for x in flat)
    name, wanted = func._schema.name, kwargs.get("device")
    is_target = torch.device(wanted).type == "cuda" if wanted is not None else has_device
    is_collective = name.startswith("c10d::")
    if has_device:
        if not is_collective:
            _refuse_mixed(name, func, flat)
        _count_reads(name, func, args, kwargs)
        if is_collective:
            collectives.note(func, args, kwargs)
    elif is_target and name == "aten::_to_copy" and not _is_pinned(args[0]):
        RECORD.upload()
    originals: dict[int, PretendTensor] = {}
    host_args, host_kwargs = tree_unflatten([_to_host(x, originals) for x in flat], spec)
    pinned = bool(host_kwargs.get("pin_memory"))
    if "pin_memory" in host_kwargs:
        host_kwargs["pin_memory"] = False
    if host_kwargs.get("device") is not None and is_target:
        host_kwargs["device"] = torch.device("cpu")
    if host_kwargs.get("generator") is not None and (is_target or has_device):
        host_kwargs["generator"] = torch.default_generator
    kernel = kernels.KERNELS.get(name) if has_device else None
    if kernel is not None:
        RECORD.note("kernel", operation=name)
        out = kernel(**kernels.bound(func, host_args, host_kwargs))
    else:
        out = func(*host_args, **host_kwargs)
    if not is_target and not has_device:
        if pinned:
            out._is_pretended_pinned = True
        return out

    def wrap(x):
        if not isinstance(x, torch.Tensor) or isinstance(x, PretendTensor):
            return x
        if id(x) in originals:
            return originals[id(x)]
        return PretendTensor(x) if is_target else x

    return tree_map(wrap, out)


def _to_host(x, originals: dict[int, PretendTensor]):
    if isinstance(x, PretendTensor):
        originals[id(x.host)] = x
        return x.host
    if isinstance(x, torch.device) and x.type == "cuda":
        return torch.device("cpu")
    return x


def _is_pinned(tensor) -> bool:
    return getattr(tensor, "_is_pretended_pinned", False)


def _refuse_mixed(name: str, func, flat: Iterable) -> None:
    if name in _MIXES or name in _INDEXES:
        return
    for x in flat:
        if isinstance(x, torch.Tensor) and not isinstance(x, PretendTensor) and x.dim() > 0:
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and"
                f" {x.device}! ({func.name()}, {caller()})"
            )


def _count_reads(name: str, func, args: tuple, kwargs: dict) -> None:
    """What a real device makes the host wait for."""
    if name == "aten::_local_scalar_dense":
        RECORD.read("item")
    elif name == "aten::_to_copy":
        target = kwargs.get("device")
        # Without blocking, torch copies into pinned memory, and whoever looks at it has to wait by himself.
        if target is not None and torch.device(target).type == "cpu" and not kwargs.get("non_blocking"):
            RECORD.read("cpu")
    elif name == "aten::copy_":
        here, there = (isinstance(x, PretendTensor) for x in args[:2])
        blocks = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
        if there and not here and (blocks or not _is_pinned(args[0])):
            RECORD.read("copy_")
        elif here and not there and not _is_pinned(args[1]):
            RECORD.upload()
    elif name in _SIZED_BY_VALUES:
        if kwargs.get("output_size") is None:
            RECORD.read(name.removeprefix("aten::"))
    elif name in _INDEXES and any(
        isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1] if i is not None
    ):
        # A number put where a mask is true goes by masked_fill, which knows its size.
        if not ("put" in name and args[2].dim() == 0 and len(args[1]) == 1):
            RECORD.read("index by mask")
