"""Only the adapters, through a folder that trainer and engines both see: a PEFT folder for each version.

Engines load it beside the base that they serve, under the name of the weights, in session.EngineSide.load. The files
are written as DiskPublisher writes a model's; the last step makes one file of them, as PEFT has it.
"""

from __future__ import annotations

import json
import os

from safetensors.torch import load_file, save_file

from slime_like.config.lora import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from slime_like.errors import WeightSyncError
from slime_like.weight_sync.transports.disk import DiskPublisher


class AdapterPublisher(DiskPublisher):
    """See the module."""

    def _complete(self, folder: str) -> None:
        """Join what all writers wrote. Raises WeightSyncError if two sent the same tensor."""
        parts = sorted(name for name in os.listdir(folder) if name.endswith(".safetensors"))
        if len(parts) == 1:
            os.rename(os.path.join(folder, parts[0]), os.path.join(folder, ADAPTER_WEIGHTS))
        else:
            _join(folder, parts)
        with open(os.path.join(folder, ADAPTER_CONFIG), "w", encoding="utf-8") as file:
            json.dump(self._options.adapter_config, file, indent=1)


def _join(folder: str, parts: list[str]) -> None:
    whole: dict = {}
    for name in parts:
        path = os.path.join(folder, name)
        part = load_file(path)
        again = sorted(set(part) & set(whole))
        if again:
            raise WeightSyncError(f"{again[0]} was sent twice ({name} in {folder})")
        whole |= part
        os.remove(path)
    save_file(whole, os.path.join(folder, ADAPTER_WEIGHTS), metadata={"format": "pt"})
