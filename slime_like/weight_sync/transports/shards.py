"""Whether the safetensors files of a folder are whole, from their headers alone. No torch."""

from __future__ import annotations

import json
import os

from slime_like.errors import WeightSyncError


def check_whole(folder: str) -> None:
    """Raise WeightSyncError naming a file of `folder` that is not as long as its header says, or that the index names
    and is not there.

    SGLang (0.5.23) does not survive such a file: the server ends. A folder that this machine does not see is not looked
    at.
    """
    if not os.path.isdir(folder):
        return
    present = sorted(name for name in os.listdir(folder) if name.endswith(".safetensors"))
    wrong = next(
        (
            f"{os.path.join(folder, name)} {problem}"
            for name in present
            if (problem := _problem(os.path.join(folder, name)))
        ),
        None,
    )
    index = os.path.join(folder, "model.safetensors.index.json")
    if wrong is None and os.path.exists(index):
        with open(index, encoding="utf-8") as file:
            missing = sorted(set(json.load(file)["weight_map"].values()) - set(present))
        wrong = f"{os.path.join(folder, missing[0])} is missing" if missing else None
    if wrong is not None:
        raise WeightSyncError(f"{wrong}. No engine was told to load it: all keep the weights that they have.")


def _problem(path: str) -> str | None:
    """A safetensors file: 8 bytes with the length of a JSON header, the header, and the tensors' bytes at the offsets
    that it tells.
    """
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 + length:
            return f"is cut off: {size} bytes, less than its header"
        try:
            table = json.loads(file.read(length))
            expected = (
                8
                + length
                + max((entry["data_offsets"][1] for name, entry in table.items() if name != "__metadata__"), default=0)
            )
        except (ValueError, KeyError, TypeError) as error:
            return f"has no readable header: {error}"
    return (
        None
        if size == expected
        else f"is {'cut off' if size < expected else 'too long'}: {size} bytes instead of {expected}"
    )
