"""What the processes of a run are told about GPUs: the NCCL settings that trainer and engines must share, and the
number of a process's own device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slime_like.errors import RunError

#: NCCL's switch -> SGLang's flags that turn it on whatever the environment says (srt/entrypoints/engine.py,
#: _set_envs_and_config; 0.5.17 and 0.5.23). Without them SGLang takes the environment's value, and 0 where it has none;
#: NCCL itself would take 1.
_NCCL_SWITCHES = {
    "NCCL_CUMEM_ENABLE": ("enable_symm_mem",),
    "NCCL_NVLS_ENABLE": ("enable_nccl_nvls", "enable_symm_mem"),
}


def nccl_environment(environ: Mapping[str, str], engine_flags: Mapping[str, object]) -> dict[str, str]:
    """NCCL's switches for every process of a run: trainer and engines are ranks of one communicator in a weight sync by
    broadcast, which hangs or fails where they differ.

    environ: train.py's, whose values win over SGLang's defaults; engine_flags: --sglang-* by underscored name.
    Example: nccl_environment({"NCCL_NVLS_ENABLE": "1"}, {}) -> {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "1"}
    """
    return {
        name: "1" if any(_is_on(engine_flags.get(flag)) for flag in flags) else environ.get(name, "0")
        for name, flags in _NCCL_SWITCHES.items()
    }


def _is_on(value: object) -> bool:
    return value is True or str(value).lower() == "true"


def device_number(gpu_ids: Sequence[str], visible: str | None) -> int:
    """The number by which CUDA calls the first of the GPUs that Ray gave a process.

    Ray shows a process its own GPUs only, unless RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES=1: then it sees all, and
    number 0 is somebody else's.

    gpu_ids: Ray's (get_accelerator_ids()["GPU"]), as CUDA_VISIBLE_DEVICES would name them; visible: that variable, None
    where it is not set. Raises RunError where the process cannot see its GPU;
    one that is to see none gets 0.
    Example: device_number(["5"], "5") -> 0; device_number(["5"], "4,5,6,7") -> 1; device_number(["5"], None) -> 5
    """
    if not gpu_ids or visible == "":
        return 0
    mine = gpu_ids[0]
    if visible is None:
        if mine.isdigit():
            return int(mine)
        raise RunError(f"Ray gave this process GPU {mine}, whose number cannot be known without CUDA_VISIBLE_DEVICES.")
    names = [name.strip() for name in visible.split(",")]
    if mine not in names:
        raise RunError(
            f"Ray gave this process GPU {mine}, but CUDA_VISIBLE_DEVICES={visible} hides it. Fix: start the node with"
            " the same CUDA_VISIBLE_DEVICES as its processes have."
        )
    return names.index(mine)
