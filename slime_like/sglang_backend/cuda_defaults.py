"""Arguments that a server on CUDA needs where parts of SGLang's kernels are not installed. Imports none of them."""

from __future__ import annotations

import glob
import importlib.util
import os
import subprocess

#: FlashAttention 3. A wheelhouse leaves it out: 1.1 GB (scripts/wheelhouse/wheels.py, STRIPS).
FLASH_ATTENTION_3 = "flash_ops*.so"
#: Compute capability of Hopper, for which SGLang (0.5.17 and 0.5.23) chooses fa3 by itself, for MLA models too.
_HOPPER = 9
_NVIDIA_SMI_S = 30.0


def attention_default(kernels: str | None, capability: int | None) -> dict[str, str]:
    """{"attention_backend": "flashinfer"} where SGLang would choose FlashAttention 3 and has none, else nothing.

    kernels: the folder of the installed sgl_kernel, None without one (then nothing runs on CUDA anyway); capability:
    the card's major compute capability, None if it is not known.
    """
    if kernels is None or glob.glob(os.path.join(kernels, "**", FLASH_ATTENTION_3), recursive=True):
        return {}
    return {"attention_backend": "flashinfer"} if capability in (None, _HOPPER) else {}


def kernels_folder() -> str | None:
    """Where sgl_kernel is installed; it is not imported, which would need the GPU's driver."""
    try:
        spec = importlib.util.find_spec("sgl_kernel")
    except ValueError:  # a half-imported module without a spec
        return None
    return None if spec is None else next(iter(spec.submodule_search_locations or []), None)


def card_capability() -> int | None:
    """Major compute capability of the first card, as the driver's own tool says."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=_NVIDIA_SMI_S, check=True).stdout
        return int(text.split(".")[0])
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
