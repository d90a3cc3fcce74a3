"""Runs inside the engine: `--custom-weight-loader slime_like.weight_sync.shm_loader.load` loads weights from a file in shared memory.

The request carries only the file's path, as a uint8 tensor. Imports nothing but the standard library and safetensors.
"""

from __future__ import annotations

import os
import stat

#: The folder that the launcher announced; equal to sglang_backend.shared_memory.DIRECTORY_VARIABLE (not imported: this stays light).
DIRECTORY_VARIABLE = "SLIME_LIKE_SHM_DIR"
#: Name of the one "tensor" of the request.
PATH_NAME = "__path__"


def load(model, named_tensors) -> None:
    """SGLang's interface of a custom loader: [(PATH_NAME, path as uint8)]; hands the file's tensors to the model's own loader."""
    from safetensors import safe_open

    path = checked_path(bytes(dict(named_tensors)[PATH_NAME].tolist()).decode(), os.environ.get(DIRECTORY_VARIABLE))
    with safe_open(path, framework="pt") as file:  # mapped into memory: nothing is copied before the model takes it
        names = file.keys()
        model.load_weights((name, file.get_tensor(name)) for name in names)


def checked_path(path: str, directory: str | None) -> str:
    """The path, if it is a plain file of ours below `directory`. Raises PermissionError otherwise: whoever has the API key sends it."""
    if not directory:
        raise PermissionError(f"{DIRECTORY_VARIABLE} is not set: this server was not started to load weights from shared memory")
    real = os.path.realpath(path)
    if os.path.commonpath([real, os.path.realpath(directory)]) != os.path.realpath(directory):
        raise PermissionError(f"{path} is outside of {directory}")
    info = os.lstat(real)
    if not stat.S_ISREG(info.st_mode) or info.st_uid != os.getuid():
        raise PermissionError(f"{path} is no plain file of ours")
    return real
