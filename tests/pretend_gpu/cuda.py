"""install(): this process's torch has a CUDA device, which is pretended. To be called before anything of megatron,
slime_like's trainer or sglang is imported; the process must have been started with the guard preloaded.
"""

from __future__ import annotations

import os
import threading
import types
from collections.abc import Callable

import torch
import torch.distributed as dist

from tests.pretend_gpu import ipc, streams
from tests.pretend_gpu.device import PretendMode, PretendTensor, live_bytes
from tests.pretend_gpu.record import RECORD

#: Bytes of the pretended card.
CARD_BYTES = 80 << 30
_installed = False


def install() -> None:
    """Pretend; idempotent.

    Raises RuntimeError where the guard is not preloaded, or torch has a real device.
    """
    global _installed
    if _installed:
        return
    if torch.version.cuda is not None:
        raise RuntimeError(f"torch {torch.__version__} is a CUDA build: the pretended device needs a CPU build")
    if not torch._C._get_accelerator() == torch.device("cuda"):
        raise RuntimeError("the guard is not preloaded: start the process by tests.pretend_gpu.processes")
    _installed = True
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # nothing is compiled for a card that is not there
    _replace_module()
    _replace_generators()
    _replace_memory()
    _replace_groups()
    _replace_tensor_functions()
    ipc.install()
    _look_up_operations()
    _enter_in_every_thread()


def _replace_module() -> None:
    cuda = torch.cuda
    for name, value in {
        "_lazy_init": lambda: None,
        "_lazy_call": lambda function, **_: function(),
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda *_: True,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "set_device": lambda device: RECORD.note("set_device", device=str(device)) and None,
        "synchronize": lambda *_: streams.synchronized("device"),
        "get_device_capability": lambda *_: (9, 0),
        "get_device_properties": _properties,
        "get_device_name": lambda *_: _properties().name,
        "Stream": streams.Stream,
        "Event": streams.Event,
        "stream": streams.using,
        "current_stream": streams.current,
        "default_stream": lambda *_: streams.DEFAULT,
        "set_stream": streams.set_current,
        "is_current_stream_capturing": lambda: False,
        "device": _Device,
    }.items():
        setattr(cuda, name, value)
    for name in ("range_push", "range_pop", "mark"):
        setattr(cuda.nvtx, name, lambda *_, **__: None)
    torch._C._cuda_getDevice = lambda: 0


def _properties(*_) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        major=9,
        minor=0,
        name="pretended H100",
        uuid=f"GPU-pretended-{RECORD.card}",
        multi_processor_count=132,
        total_memory=CARD_BYTES,
        warp_size=32,
        L2_cache_size=50 << 20,
    )


class _Device:
    """torch.cuda.device(0) as a context."""

    def __init__(self, *_):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return False


def _replace_generators() -> None:
    # One generator for both devices, as on a CPU host: draws come in the same order, so numbers are equal.
    generator = torch.default_generator
    for module in (torch.cuda, torch.cuda.random):
        module.default_generators = (generator,)
        module.get_rng_state = lambda *_, **__: generator.get_state()
        module.set_rng_state = lambda state, *_, **__: generator.set_state(state)
        module.manual_seed = module.manual_seed_all = generator.manual_seed
    torch.cuda.initial_seed = generator.initial_seed


def _replace_memory() -> None:
    def noted(kind: str) -> Callable:
        return lambda *_, **__: RECORD.note(kind, live_bytes=live_bytes()) and None

    cuda = torch.cuda
    cuda.empty_cache, cuda.ipc_collect = noted("empty_cache"), noted("ipc_collect")
    cuda.reset_peak_memory_stats = noted("reset_peak_memory_stats")
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(cuda, name, lambda *_, **__: live_bytes())
        setattr(cuda.memory, name, getattr(cuda, name))
    cuda.memory.empty_cache = cuda.empty_cache
    cuda.memory_stats = lambda *_, **__: {}
    cuda.mem_get_info = lambda *_: (CARD_BYTES - live_bytes(), CARD_BYTES)
    # Pinned memory is memory that says so.
    torch.Tensor.pin_memory = _pinned
    torch.Tensor.is_pinned = lambda self, *_: getattr(self, "_is_pretended_pinned", False)


def _pinned(tensor: torch.Tensor, *_) -> torch.Tensor:
    if tensor.is_pinned():
        return tensor
    copy = tensor.detach().clone()
    copy._is_pretended_pinned = True
    return copy


def _replace_groups() -> None:
    """NCCL is gloo, which finds its numbers on the host."""
    real = dist.init_process_group

    def init_process_group(backend=None, *args, **kwargs):
        RECORD.note("init_process_group", backend=backend)
        return real(_gloo(backend), *args, **kwargs)

    real_group = dist.new_group

    def new_group(ranks=None, timeout=None, backend=None, pg_options=None, **kwargs):
        RECORD.note("new_group", ranks=tuple(ranks or ()), backend=backend)
        options = None if _gloo(backend) == "gloo" else pg_options
        return real_group(ranks, timeout, _gloo(backend), options, **kwargs)

    real_helper = dist.distributed_c10d._new_process_group_helper

    def new_process_group_helper(size, rank, ranks, backend, *args, **kwargs):
        # SGLang and we make groups beside the default one by this.
        return real_helper(size, rank, ranks, _gloo(str(backend)), *args, **kwargs)

    for module in (dist, dist.distributed_c10d):
        module.init_process_group, module.new_group = init_process_group, new_group
    dist.distributed_c10d._new_process_group_helper = new_process_group_helper
    wait = dist.Work.wait

    def noted_wait(self, *args, **kwargs):
        RECORD.note("wait_work", stream=streams.current().name)
        return wait(self, *args, **kwargs)

    dist.Work.wait = noted_wait


def _gloo(backend: str | None) -> str | None:
    if backend is None:
        return None
    return "gloo" if "nccl" in backend else backend


def _replace_tensor_functions() -> None:
    def apply(self, function, recurse=True):
        # As Module._apply, but a parameter that moves to the device becomes a new one: a tensor cannot change its type.
        for child in self.children() if recurse else ():
            child._apply(function)
        for key, parameter in self._parameters.items():
            if parameter is None:
                continue
            with torch.no_grad():
                moved = function(parameter)
            if isinstance(moved, PretendTensor) and not isinstance(parameter, PretendTensor):
                new = torch.nn.Parameter(moved, parameter.requires_grad)
                new.__dict__.update({k: v for k, v in parameter.__dict__.items() if k != "host"})
                self._parameters[key] = new
            else:
                parameter.data = moved
        for key, buffer in self._buffers.items():
            if buffer is not None:
                self._buffers[key] = function(buffer)
        return self

    torch.nn.Module._apply = apply
    torch._C._set_only_lift_cpu_tensors(True)
    make = torch.tensor

    def plain(x):
        if isinstance(x, PretendTensor):
            RECORD.read("tensor of tensors")
            return x.host.item()
        return [plain(y) for y in x] if isinstance(x, (list, tuple)) else x

    def tensor(data, *args, pin_memory=False, **kwargs):
        fresh = make(plain(data) if isinstance(data, (list, tuple)) else data, *args, **kwargs)
        return fresh.pin_memory() if pin_memory else fresh

    torch.tensor = tensor


def _look_up_operations() -> None:
    """Two threads that look one up for the first time make two objects for it: one is freed, and torch 2.13 may have
    kept its address (a crash in find_torch_dispatch_rule).
    """
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        if namespace in ("aten", "c10d"):
            packet, _, overload = rest.partition(".")
            getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")


def _enter_in_every_thread() -> None:
    """A mode is one thread's: threads to come enter it as they begin."""
    begin = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

    def with_mode(self):
        with PretendMode():
            begin(self)

    threading.Thread._bootstrap_inner = with_mode  # type: ignore[attr-defined]
    PretendMode().__enter__()
