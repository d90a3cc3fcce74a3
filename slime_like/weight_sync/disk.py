"""Weights through a folder that trainer and engines both see: any placement, no connection between them.

    <root>/.version-00000007.partial/    while sources write, one after another; source 0 begins, the last one finishes
    <root>/version-00000007/             complete: model-<source>-<number>.safetensors and model.safetensors.index.json

The engines load it in WeightUpdate.finish. Older versions are removed when a new one is complete.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from slime_like.errors import WeightSyncError
from slime_like.weight_sync.envelope import version_directory
from slime_like.weight_sync.stream import Digest, NamedTensor, PublisherOptions, SentReport, buckets


class DiskPublisher:
    """See the module."""

    def __init__(self, options: PublisherOptions):
        if not options.directory:
            raise WeightSyncError("the disk transport needs a folder. Fix: --update-weight-disk-dir.")
        self._options = options
        self._root = os.path.abspath(options.directory)

    def connect(self) -> None:
        """Make the root folder."""
        os.makedirs(self._root, exist_ok=True)

    def send(self, tensors: Iterable[NamedTensor], version: int) -> SentReport:
        """Write this source's files; the last source makes the version visible under its final name at once."""
        self.connect()
        options, final = self._options, version_directory(self._root, version)
        partial = os.path.join(self._root, f".{os.path.basename(final)}.partial")
        if options.source_index == 0:
            shutil.rmtree(partial, ignore_errors=True)  # of an attempt that failed
            os.mkdir(partial)
        elif not os.path.isdir(partial):
            who = f"source {options.source_index} of {options.num_sources}"
            raise WeightSyncError(f"{who}: {partial} is missing. Is {self._root} shared between the trainer's nodes?")
        digest = Digest()
        for number, bucket in enumerate(buckets(tensors, options.buffer_bytes)):
            for name, tensor in bucket:
                digest.add(name, tensor)
            # clone: safetensors refuses tensors that share memory, as views of one flat buffer do.
            shard = {name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in bucket}
            save_file(shard, f"{partial}/model-{options.source_index:03d}-{number:05d}.safetensors", metadata={"format": "pt"})
        if options.source_index == options.num_sources - 1:
            _write_index(partial)
            shutil.rmtree(final, ignore_errors=True)
            os.rename(partial, final)
            _remove_older(self._root, final)
        return digest.report()

    def close(self) -> None:
        """Nothing is held; the last version stays, as the engines' copy of what they serve."""


def _write_index(folder: str) -> None:
    """model.safetensors.index.json: which file holds which tensor. Raises WeightSyncError if two sources sent the same one."""
    weight_map: dict[str, str] = {}
    total = 0
    for file_name in sorted(name for name in os.listdir(folder) if name.endswith(".safetensors")):
        path = os.path.join(folder, file_name)
        total += os.path.getsize(path)
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - no dict: it cannot be iterated
                if name in weight_map:
                    raise WeightSyncError(f"{name} was sent twice: {weight_map[name]} and {file_name} in {folder}")
                weight_map[name] = file_name
    with open(os.path.join(folder, "model.safetensors.index.json"), "w") as file:
        json.dump({"metadata": {"total_size": total}, "weight_map": weight_map}, file, indent=1)


def _remove_older(root: str, keep: str) -> None:
    for name in os.listdir(root):
        if name.startswith("version-") and name < os.path.basename(keep):
            shutil.rmtree(os.path.join(root, name), ignore_errors=True)
