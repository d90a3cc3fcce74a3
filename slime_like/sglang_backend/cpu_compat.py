"""Lets an unmodified sglang 0.5.23 wheel be imported where there is no CUDA. Call `install()` before importing sglang.

Each workaround names what it is for and when it can go. All are for sglang 0.5.23 with the CPU build of torch 2.13;
none changes torch's functions: replacing its constructors leaves transformers' rotary tables uninitialised and gives
wrong log-probs.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types

#: Not installed on a CPU host. torchvision: the published wheel is built against CUDA torch and breaks transformers on
#: import. Remove when sglang imports neither unless it uses it.
_ABSENT = ("triton", "torchvision")

#: Names that sglang imports from sgl_kernel (CUDA wheels only, no source distribution) although only speculative
#: decoding calls them. Remove when sglang guards these imports, or when sgl_kernel has a CPU wheel.
_KERNELS = (
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
)

#: Variable of an engine's environment: whatever is not empty makes its answers independent of each other.
BATCH_INVARIANT = "SLIME_LIKE_BATCH_INVARIANT"


def install() -> None:
    """Put the stand-ins in place; does nothing for a package that is really installed."""
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    # sglang's debug dumper imports megatron.core when it is installed: 0.7 s for nothing. Remove when that import is
    # lazy.
    sys.modules.setdefault("megatron", None)  # type: ignore[arg-type]
    _install_absent_packages()
    _install_sgl_kernel()


class _Placeholder:
    """Stands for any class of an absent package: can be subclassed, takes any arguments."""

    def __init__(self, *args, **kwargs):
        pass

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__()


class _Constexpr:
    """triton.language.constexpr: sglang reads `.value` of module-level constants."""

    def __init__(self, value=None):
        self.value = value


class _AbsentModule(types.ModuleType):
    """A module that is not there.

    CamelCase attributes are classes, others are submodules; calling one decorates nothing.
    """

    def __init__(self, name: str):
        super().__init__(name)
        self.__path__ = []
        self.__file__ = __file__
        self.__spec__ = importlib.machinery.ModuleSpec(name, _AbsentFinder(), is_package=True)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        value: object
        if name[0].isupper():
            value = type(name, (_Placeholder,), {"__module__": self.__name__})
        else:
            full = f"{self.__name__}.{name}"
            value = sys.modules.setdefault(full, _AbsentModule(full))
        setattr(self, name, value)
        return value

    def __call__(self, *args, **kwargs):
        """`@triton.jit` returns the function; `@triton.autotune(...)` returns a decorator that does."""
        if len(args) == 1 and not kwargs and callable(args[0]):
            return args[0]
        return lambda function: function

    def __contains__(self, item):  # `"cpu" in triton.backends.backends`
        return False

    def __iter__(self):
        return iter(())

    def __bool__(self):
        return False


class _AbsentFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module below the absent packages; asked last, so it never hides a real one."""

    names: frozenset[str] = frozenset()

    def find_spec(self, fullname, path=None, target=None):
        if fullname.split(".")[0] in self.names:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        return _AbsentModule(spec.name)

    def exec_module(self, module):
        pass


def _install_absent_packages() -> None:
    missing = frozenset(name for name in _ABSENT if importlib.util.find_spec(name) is None)
    if not missing:
        return
    _let_others_record_the_truth()
    _AbsentFinder.names = missing
    sys.meta_path.append(_AbsentFinder())
    if "triton" in missing:
        triton = importlib.import_module("triton")
        triton.__version__ = "0.0.0"  # type: ignore[attr-defined]
        triton.cdiv = lambda a, b: -(a // -b)  # type: ignore[attr-defined]
        triton.next_power_of_2 = lambda n: 1 << (n - 1).bit_length() if n > 0 else 1  # type: ignore[attr-defined]
        triton.language.constexpr = _Constexpr


def _let_others_record_the_truth() -> None:
    """torch and transformers cache whether triton and torchvision exist: let them look before the stand-ins appear."""
    import torch.utils._triton as torch_triton
    import transformers.utils.import_utils as transformers_imports

    torch_triton.has_triton_package()
    for name in ("is_torchvision_available", "is_torchvision_v2_available", "is_triton_available"):
        probe = getattr(transformers_imports, name, None)
        if probe is not None:
            probe()


def _install_sgl_kernel() -> None:
    if "sgl_kernel" in sys.modules or importlib.util.find_spec("sgl_kernel") is not None:
        return
    module = types.ModuleType("sgl_kernel", "CPU stand-in: sglang needs the names at import, not the kernels.")
    module.__spec__ = importlib.machinery.ModuleSpec("sgl_kernel", None)
    module.__file__ = __file__
    module.__version__ = "0.0.0"  # type: ignore[attr-defined]
    for name in _KERNELS:
        setattr(module, name, _unavailable(name))
    module.assign_req_to_token_pool_cpu = _assign_req_to_token_pool  # type: ignore[attr-defined]
    sys.modules["sgl_kernel"] = module


def kernels_are_absent() -> bool:
    """Whether sgl_kernel is our stand-in, which computes nothing."""
    return getattr(sys.modules.get("sgl_kernel"), "__file__", None) == __file__


def resolve(server_args) -> None:
    """Fill in what the server's arguments leave open.

    Before it had resolve_once (0.5.17 has not), making the arguments did.
    Remove when setup.py's range is the only one that a CPU host may meet.
    """
    if hasattr(server_args, "resolve_once"):
        server_args.resolve_once()


def keep_host_memory_pageable() -> None:
    """Register an allocator for the device "cpu": sglang's default pins host memory with a call of the CUDA runtime
    (routed experts need it).

    Call after sglang is imported. Remove when sglang's table (0.5.23: mem_cache/pool_host/common.py) has a "cpu" of its
    own.
    """
    import torch
    from sglang.srt.mem_cache.pool_host import common

    def allocate(shape, *, dtype, device="cpu", **_):
        return torch.empty(shape, dtype=dtype, device=device)

    common.ALLOC_MEMORY_FUNCS.setdefault("cpu", allocate)


def keep_adapters_pageable() -> None:
    """Let sglang.srt.lora make its host tensors without pinning them, which wants CUDA: its modules see a stand-in for
    torch that drops `pin_memory`, and tensors that are asked for it (Tensor.pin_memory) stay as they are, in this
    process.

    Call before these modules are imported. Remove when sglang asks for CUDA before it pins (0.5.23: lora/mem_pool.py,
    lora/utils.py, lora/backend/).
    """
    import torch

    if not torch.accelerator.is_available():
        torch.Tensor.pin_memory = lambda self, device=None: self
        sys.meta_path.insert(0, _PageableFinder())


class _PageableFinder(importlib.abc.MetaPathFinder):
    """Exchanges torch in each module of sglang's adapters once it was executed."""

    def find_spec(self, fullname, path=None, target=None):
        if not fullname.startswith("sglang.srt.lora."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or not isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            return spec
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            torch = sys.modules["torch"]
            if getattr(module, "torch", None) is torch:
                module.torch = _Unpinned(torch)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


class _Unpinned(types.ModuleType):
    """torch whose constructors pin nothing."""

    def __init__(self, torch):
        super().__init__("torch[pageable]")
        self._torch = torch

    def __getattr__(self, name):
        value = getattr(self._torch, name)
        if name not in ("tensor", "empty", "zeros", "ones", "full", "arange", "empty_like", "zeros_like"):
            return value

        def make(*args, **kwargs):
            kwargs.pop("pin_memory", None)
            return value(*args, **kwargs)

        return make


def take_seeds() -> None:
    """Let sglang's --enable-deterministic-inference be used without CUDA: requests' seeds hold (`sampling_seed`).

    With BATCH_INVARIANT in the environment nothing of an answer depends on the rest of the batch, either; that costs a
    single answer several times as much (cpu_invariance.py). Without it log-probs may differ by 1e-6 from run to run.
    Call before the server's arguments are made. Remove when sglang's list of attention backends has torch_native,
    sgl_kernel has a CPU wheel, and batch_invariant_ops has operators for the CPU (0.5.23: arg_groups/choices.py,
    kernels/ops/sampling/murmur_hash.py, batch_invariant_ops).
    """
    import torch
    from sglang.srt import batch_invariant_ops
    from sglang.srt.arg_groups import choices

    from slime_like.sglang_backend import cpu_invariance

    choices.add_deterministic_attention_backend_choices(["torch_native"])
    choices.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])
    invariant = bool(os.environ.get(BATCH_INVARIANT))
    batch_invariant_ops.enable_batch_invariant_mode = cpu_invariance.enable if invariant else lambda *_, **__: None
    global _SEED_LIBRARY
    _SEED_LIBRARY = torch.library.Library("sgl_kernel", "FRAGMENT")
    _SEED_LIBRARY.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor columns) -> Tensor")
    _SEED_LIBRARY.impl("murmur_hash32_cpu", murmur_hash32, "CompositeExplicitAutograd")


#: Holds the operator of `take_seeds`: torch forgets it with its library.
_SEED_LIBRARY = None


def murmur_hash32(seed, positions, columns):
    """[N, M] int64: MurmurHash3 (x86, 32 bit, seed 0) of 16 bytes for each row and column: a row's 64-bit seed, low
    half first, its position, and the column's number.

    seed and positions: [N], columns: [M].
    """
    import torch

    mask = 0xFFFFFFFF

    def rotated(value, bits):
        return ((value << bits) | (value >> (32 - bits))) & mask

    seed = seed.to(torch.int64)[:, None]
    blocks = (seed, seed >> 32, positions.to(torch.int64)[:, None], columns.to(torch.int64)[None, :])
    value = torch.zeros_like(seed)
    for block in blocks:
        # Products overflow 64 bits; the 32 that count are right all the same.
        mixed = (rotated(((block & mask) * 0xCC9E2D51) & mask, 15) * 0x1B873593) & mask
        value = (rotated(value ^ mixed, 13) * 5 + 0xE6546B64) & mask
    value = value ^ 16
    value = ((value ^ (value >> 16)) * 0x85EBCA6B) & mask
    value = ((value ^ (value >> 13)) * 0xC2B2AE35) & mask
    return value ^ (value >> 16)


def _unavailable(name: str):
    def kernel(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} (speculative decoding) is not available without CUDA")

    return kernel


def _assign_req_to_token_pool(
    req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len
) -> None:
    """The one kernel that plain decoding calls: row `req_pool_indices[i]`, columns start..end, get the next cache
    locations.
    """
    taken = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        req_to_token[row, start:end] = out_cache_loc[taken : taken + end - start].to(req_to_token.dtype)
        taken += end - start
