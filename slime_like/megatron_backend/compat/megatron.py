"""Lets megatron-core 0.16.1 run where CUDA, transformer-engine or apex are missing, and mends what is wrong in it on
any host.

Megatron's sources stay untouched, and so does the global `torch` namespace apart from Tensor.cuda() and Tensor.type():
on a CPU host every megatron module sees a stand-in for `torch` that maps CUDA devices to the CPU. Each patch names the
upstream place (all 0.16.1) and when it can go; the last column of _MODULE_PATCHES says which ones a GPU host gets too.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import queue
import sys
import types
import warnings

import torch

from slime_like.megatron_backend.compat.buffers import BUFFER_PATCHES
from slime_like.megatron_backend.compat.experts import EXPERT_PATCHES
from slime_like.megatron_backend.compat.transformer_engine import why_not

_PACKAGE = "megatron"
#: Functions that megatron calls with device="cuda" or device=torch.cuda.current_device().
_FACTORIES = (
    "tensor",
    "as_tensor",
    "zeros",
    "ones",
    "empty",
    "full",
    "arange",
    "linspace",
    "rand",
    "randn",
    "randint",
    "randperm",
    "eye",
    "zeros_like",
    "ones_like",
    "empty_like",
    "full_like",
    "rand_like",
    "randn_like",
    "empty_strided",
)
#: Said by every rank at every start, and true of every CPU host: (start of the message, category).
_EXPECTED_WARNINGS = (
    ("Transformer Engine and Apex are not installed", UserWarning),
    ("Apex is not installed", UserWarning),
    ("The .grad attribute of a Tensor that is not a leaf", UserWarning),
    ("full scope is deprecated", UserWarning),
    ("`load_state_dict` is deprecated", FutureWarning),
    ("Please use DTensor instead", FutureWarning),
    ("`torch.distributed.(reduce_scatter_tensor|all_gather_into_tensor)` is deprecated", FutureWarning),
)
_installed = False


def install() -> None:
    """Prepare this process for `import megatron`. Idempotent; must run first in every process.

    Without CUDA: the stand-in and all patches. With CUDA: the patches that are not marked "only without CUDA", for
    mistakes of megatron's that a GPU host meets too: torch's AdamW in checkpoints (where transformer-engine is
    missing), the ends of buckets, two of its routers.
    """
    global _installed
    if _installed:
        return
    _installed = True
    why_not()  # hides a transformer-engine that Megatron could not import
    on_cpu = not torch.cuda.is_available()
    if on_cpu:
        # jit_fuser is torch.compile, which would run a C++ compiler. Goes when megatron asks for CUDA before compiling.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        _patch_tensor_methods()
        for message, category in _EXPECTED_WARNINGS:
            warnings.filterwarnings("ignore", message=message, category=category)
    stand_in = _torch_stand_in() if on_cpu else None

    def fix(module: types.ModuleType) -> None:
        if stand_in is not None and module.__dict__.get("torch") is torch:
            module.__dict__["torch"] = stand_in
        for name, patch, cpu_only in _MODULE_PATCHES:
            if module.__name__ == name and (on_cpu or not cpu_only):
                patch(module)

    for name, module in list(sys.modules.items()):
        if _is_megatron(name) and module is not None:
            fix(module)
    sys.meta_path.insert(0, _Finder(fix))


def _is_megatron(name: str) -> bool:
    return name == _PACKAGE or name.startswith(_PACKAGE + ".")


class _Finder(importlib.abc.MetaPathFinder):
    """Import hook: runs `fix` on each megatron module right after it was executed."""

    def __init__(self, fix):
        self._fix, self._busy = fix, set()

    def find_spec(self, name, path, target=None):
        if not _is_megatron(name) or name in self._busy:
            return None
        self._busy.add(name)
        try:
            spec = (
                importlib.util.find_spec(name)
                if path is None
                else importlib.machinery.PathFinder.find_spec(name, path, target)
            )
        finally:
            self._busy.discard(name)
        if spec is None or spec.loader is None or not hasattr(spec.loader, "exec_module"):
            return spec
        run, fix = spec.loader.exec_module, self._fix

        def exec_module(module):
            run(module)
            fix(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


# ------------------------------------------------------------------ the stand-in for torch


class _NoStream:
    """Stands for a CUDA stream or event: accepts everything, does nothing."""

    def __init__(self, *args, **kwargs):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        return False

    def record_event(self, *args):
        return self

    def query(self):
        return True

    def elapsed_time(self, other):
        return 0.0

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing

    def __eq__(self, other):
        return isinstance(other, _NoStream)

    __hash__ = object.__hash__


def _nothing(*args, **kwargs):
    return None


def _zero(*args, **kwargs):
    return 0


def _no_context(*args, **kwargs):
    return contextlib.nullcontext()


def _cuda_stand_in() -> types.ModuleType:
    """`torch.cuda` of a host whose only device is the CPU."""
    cuda = types.ModuleType("torch.cuda[cpu]")
    stream = _NoStream()
    cuda.__dict__.update(
        dict.fromkeys(("set_device", "synchronize", "empty_cache", "ipc_collect", "reset_peak_memory_stats"), _nothing)
    )
    cuda.__dict__.update(
        dict.fromkeys(
            ("device_count", "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"),
            _zero,
        )
    )
    cuda.__dict__.update(
        current_device=lambda: "cpu",
        is_available=lambda: False,
        memory_stats=lambda *a: {},
        mem_get_info=lambda *a: (0, 0),
        is_current_stream_capturing=lambda: False,
        Stream=_NoStream,
        Event=_NoStream,
        current_stream=lambda *a: stream,
        default_stream=lambda *a: stream,
        stream=_no_context,
        device=_no_context,
        manual_seed=lambda seed: torch.manual_seed(seed),
        get_rng_state=lambda *a, **k: torch.get_rng_state(),
        set_rng_state=lambda state, *a, **k: torch.set_rng_state(state),
        nvtx=types.SimpleNamespace(
            range_push=_nothing,
            range_pop=_nothing,
            range_start=_nothing,
            range_end=_nothing,
            mark=_nothing,
            range=_no_context,
        ),
    )
    cuda.__dict__["__getattr__"] = lambda name: getattr(torch.cuda, name)  # PEP 562: types, amp, …
    return cuda


def _cpu_for_cuda(device):
    """'cuda', 'cuda:1', torch.device('cuda') -> 'cpu'; everything else unchanged."""
    return "cpu" if device is not None and str(device).split(":")[0] == "cuda" else device


def _torch_stand_in() -> types.ModuleType:
    """`torch` whose CUDA devices are the CPU. Goes when megatron takes its device from one place."""
    proxy = types.ModuleType("torch[cpu]")

    def on_cpu(factory):
        def make(*args, **kwargs):
            if "device" in kwargs:
                kwargs["device"] = _cpu_for_cuda(kwargs["device"])
            kwargs.pop("pin_memory", None)
            return factory(*args, **kwargs)

        make.__name__ = factory.__name__
        return make

    for name in _FACTORIES:
        setattr(proxy, name, on_cpu(getattr(torch, name)))

    class DeviceType(type):
        """Serves torch.device("cuda") and isinstance(x, torch.device)."""

        def __instancecheck__(cls, instance):
            return isinstance(instance, torch.device)

        def __call__(cls, *args, **kwargs):
            if args and isinstance(args[0], (str, torch.device)):
                args = (_cpu_for_cuda(args[0]), *(args[1:] if _cpu_for_cuda(args[0]) is args[0] else ()))
            return torch.device(*args, **kwargs)

    proxy.__dict__.update(
        device=DeviceType("device", (), {}),
        cuda=_cuda_stand_in(),
        autocast=lambda device_type="cuda", *a, **k: torch.autocast(_cpu_for_cuda(device_type), *a, **k),
        __getattr__=lambda name: getattr(torch, name),
    )
    return proxy


class _TypeName(str):
    """'torch.FloatTensor' that also equals 'torch.cuda.FloatTensor'."""

    def __eq__(self, other):
        return isinstance(other, str) and str.__eq__(self, other.replace("torch.cuda.", "torch."))

    def __ne__(self, other):
        return not self == other

    __hash__ = str.__hash__


def _patch_tensor_methods() -> None:
    # clip_grads.py:167, optimizer.py and distrib_optimizer.py compare Tensor.type() with 'torch.cuda.FloatTensor'.
    # Goes when they ask for the dtype.
    real_type = torch.Tensor.type

    def tensor_type(self, dtype=None, *args, **kwargs):
        return _TypeName(real_type(self)) if dtype is None else real_type(self, dtype, *args, **kwargs)

    torch.Tensor.type = tensor_type
    torch.Tensor.cuda = lambda self, *args, **kwargs: self


# ------------------------------------------------------------------ patches of single modules


def _patch_rng(module) -> None:
    """tensor_parallel/random.py:55,235 read CUDA's generator. Goes when the tracker takes a device."""
    module._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    module._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    module.logging = _QuietLogging(module.logging)


class _QuietLogging:
    """`logging` without "CPU RNG state changed within GPU RNG context": here both are one generator."""

    def __init__(self, real):
        self._real = real

    def __getattr__(self, name):
        return getattr(self._real, name)

    def getLogger(self, *args):  # logging's name
        return types.SimpleNamespace(warning=_nothing)


def _patch_writer(module) -> None:
    """dist_checkpointing/strategies/filesystem_async.py: each save forks writers and the first spawns a manager process
    (2.6 to 15 s for a tiny model), and a fork next to gloo's threads can deadlock. Write in this process instead.

    Goes when the synchronous save of megatron does not start processes.
    """
    writer = module.FileSystemWriterAsync

    def write_in_process(transforms, use_msc, rank, write_buckets, results) -> None:
        done: queue.Queue = queue.Queue()
        outcome: dict = {}
        for index, bucket in enumerate(write_buckets):
            pending: queue.Queue = queue.Queue()
            pending.put(index)
            writer.write_preloaded_data(
                transforms,
                local_proc_idx=index,
                write_bucket=bucket,
                results_queue=done,
                count_queue=pending,
                use_fsync=True,
                use_msc=use_msc,
            )
            number, written = done.get_nowait()
            if isinstance(written, Exception):
                results.put(written)
                return
            outcome[number] = written
        results.put(outcome)

    writer.write_preloaded_data_multiproc = staticmethod(write_in_process)
    module._get_write_results_queue = queue.Queue


def _patch_torch_adam(module) -> None:
    """optimizer/distrib_optimizer.py with torch.optim.AdamW (no TE, no apex): no state exists before the first step
    (`assert len(steps) == 1`), loading misses 'step' (KeyError), and a load gives ALL parameters one step tensor, which
    each of them then increments. Goes when upstream saves and clones the step per parameter.
    """
    cls = module.DistributedOptimizer
    if module.HAVE_APEX_OR_TE:
        return
    sharded, load, put = cls.sharded_state_dict, cls.load_state_dict, cls._set_main_param_and_optimizer_states

    def sharded_state_dict(self, *args, **kwargs):
        _prime_adam(self)
        return sharded(self, *args, **kwargs)

    def load_state_dict(self, *args, **kwargs):
        _prime_adam(self)
        result = load(self, *args, **kwargs)
        for state in self.optimizer.state.values():
            if "step" in state:
                state["step"] = state["step"].clone()
        return result

    def set_states(self, model_param, tensors):
        if "step" not in tensors:
            group, order = self.model_param_group_index_map[model_param]
            main = self.optimizer.param_groups[group]["params"][order]
            tensors = {**tensors, "step": self.optimizer.state[main]["step"].clone()}
        return put(self, model_param, tensors)

    cls.sharded_state_dict, cls.load_state_dict = sharded_state_dict, load_state_dict
    cls._set_main_param_and_optimizer_states = set_states


def _prime_adam(optimizer) -> None:
    """Give torch.optim.AdamW its zero state, `step` included, where no step has run yet."""
    inner = getattr(optimizer, "optimizer", None)
    if not isinstance(inner, (torch.optim.Adam, torch.optim.AdamW)):
        return
    for group in inner.param_groups:
        for parameter in group["params"]:
            state = inner.state[parameter]
            state.setdefault("step", torch.tensor(0.0))
            state.setdefault("exp_avg", torch.zeros_like(parameter))
            state.setdefault("exp_avg_sq", torch.zeros_like(parameter))


#: (module, patch, only without CUDA)
_MODULE_PATCHES = (
    ("megatron.core.tensor_parallel.random", _patch_rng, True),
    ("megatron.core.dist_checkpointing.strategies.filesystem_async", _patch_writer, True),
    ("megatron.core.optimizer.distrib_optimizer", _patch_torch_adam, False),
    *BUFFER_PATCHES,
    *EXPERT_PATCHES,
)
