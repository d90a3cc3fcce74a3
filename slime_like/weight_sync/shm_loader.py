"""Runs inside the engine: `--custom-weight-loader slime_like.weight_sync.shm_loader.load` loads weights from a file in shared memory,
and tells digests of those that the engine holds (engine_receipt).

A request carries only the file's path and the place of its table, or what to digest, as a uint8 tensor. Imports nothing heavy at the start.
"""

from __future__ import annotations

import json
import os
import stat

from slime_like.weight_sync.engine_receipt import RECEIPT_NAME, take
from slime_like.weight_sync.shm_slots import tensors

#: The folder that the launcher announced; equal to sglang_backend.shared_memory.DIRECTORY_VARIABLE (not imported: this stays light).
DIRECTORY_VARIABLE = "SLIME_LIKE_SHM_DIR"
#: Name of the one "tensor" of the request.
SLOT_NAME = "__slot__"


def load(model, named_tensors) -> None:
    """SGLang's interface of a custom loader: [(SLOT_NAME, shm_slots.request as uint8)], whose tensors go to the model's own loader, or
    [(RECEIPT_NAME, JSON as uint8)].
    """
    ((name, data),) = named_tensors
    request = bytes(data.cpu().numpy())
    if name == RECEIPT_NAME:
        take(model, request)
        return
    if name != SLOT_NAME:
        raise ValueError(f"a request of this loader is {SLOT_NAME} or {RECEIPT_NAME}, not {name}")
    path, start, stop = json.loads(request)
    model.load_weights(tensors(checked_path(path, os.environ.get(DIRECTORY_VARIABLE)), start, stop))


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
