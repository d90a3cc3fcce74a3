"""How many bytes a weight delta takes, on consecutive HF folders of a real training (--save-hf), against what
compressing the changes takes.

    python benchmarks/delta_bytes.py FOLDER FOLDER … [--dtype bfloat16] [--save results/delta-bytes.json]

Three yardsticks, none of which uses the transport's code: zstd of the whole of the new weights, zstd of the xor of old
and new (byte by byte, the whole model as one stream), and the changed elements alone: which ones (a bit each) and their
xor, each as one stream with the better of zstd 3 and 19.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time

import numpy as np
import torch
import zstandard
from safetensors.torch import load_file

from slime_like.weight_sync.buckets import buckets, raw_bytes
from slime_like.weight_sync.delta.codec import XOR, digest
from slime_like.weight_sync.delta.frame import Change, FramePlace, write_frame
from slime_like.weight_sync.delta.publisher import _key

BUCKET_BYTES = 512 << 20


def load(folder: str, dtype: str | None) -> dict[str, torch.Tensor]:
    """Every tensor of a folder; dtype: what an engine would be sent."""
    tensors: dict[str, torch.Tensor] = {}
    for name in sorted(os.listdir(folder)):
        if name.endswith(".safetensors"):
            tensors |= load_file(os.path.join(folder, name))
    return {
        name: tensor if dtype is None else tensor.to(getattr(torch, dtype)) for name, tensor in sorted(tensors.items())
    }


def frame_bytes(old: dict[str, torch.Tensor], new: dict[str, torch.Tensor], encoding: str) -> tuple[int, int, float]:
    """(bytes of the frames, changed elements, seconds)."""
    total = changed = 0
    started = time.monotonic()
    for number, bucket in enumerate(buckets(new.items(), BUCKET_BYTES)):
        changes = []
        for name, tensor in bucket:
            before, after = raw_bytes(old[name]).numpy(), raw_bytes(tensor).numpy()
            same = before.tobytes() == after.tobytes()
            changes.append(
                Change(_key(name, tensor), "same" if same else encoding, digest(before), digest(after), after, before)
            )
        frame, count = write_frame(FramePlace(2, 1, 0, number), changes)
        total, changed = total + len(frame), changed + count
    return total, changed, time.monotonic() - started


def smallest(data: bytes) -> int:
    """Bytes by the better of two levels."""
    return min(len(zstandard.ZstdCompressor(level=level).compress(data)) for level in (3, 19))


def compare(old: dict[str, torch.Tensor], new: dict[str, torch.Tensor]) -> dict[str, float]:
    """One step's numbers."""
    words = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
    xors, bits, values, count = [], [], [], 0
    for name, tensor in new.items():
        kind = words[tensor.element_size()]
        xor = raw_bytes(tensor).numpy().view(kind) ^ raw_bytes(old[name]).numpy().view(kind)
        xors.append(xor.tobytes())
        bits.append(np.packbits(xor != 0).tobytes())
        values.append(xor[xor != 0])
        count += xor.size
    changed = np.concatenate(values)
    # The changed values as byte planes: the better of two ways of writing them down.
    planes = changed.view(np.uint8).reshape(-1, changed.itemsize).T.tobytes() if changed.size else b""
    listed = smallest(b"".join(bits)) + (min(smallest(changed.tobytes()), smallest(planes)) if changed.size else 0)
    sent, num_changed, seconds = frame_bytes(old, new, XOR)
    overwrite, _, _ = frame_bytes(old, new, "overwrite")
    assert num_changed == changed.size
    whole = sum(len(data) for data in xors)
    return {
        "elements": count,
        "changed_share": changed.size / count,
        "whole_bytes": whole,
        "whole_zstd_bytes": len(
            zstandard.ZstdCompressor(level=3).compress(b"".join(raw_bytes(t).numpy().tobytes() for t in new.values()))
        ),
        "xor_zstd_bytes": len(zstandard.ZstdCompressor(level=3).compress(b"".join(xors))),
        "changes_zstd_bytes": listed,
        "delta_bytes": sent,
        "delta_overwrite_bytes": overwrite,
        "delta_over_changes": sent / listed,
        "delta_over_xor_zstd": sent / len(zstandard.ZstdCompressor(level=3).compress(b"".join(xors))),
        "delta_over_whole": sent / whole,
        "encode_gb_per_s": whole / seconds / 1e9,
    }


def main() -> int:
    """Print a line for each step, and save them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folders", nargs="+", help="HF folders, oldest first.")
    parser.add_argument("--dtype", help="Cast to this type first, as an engine of this type is sent them.")
    parser.add_argument("--save", help="Write JSON here.")
    options = parser.parse_args()
    steps = []
    old = load(options.folders[0], options.dtype)
    for folder in options.folders[1:]:
        new = load(folder, options.dtype)
        steps.append(compare(old, new))
        old = new
        print("  ".join(f"{name} {value:.4g}" for name, value in steps[-1].items()))
    if options.save:
        with open(options.save, "w") as file:
            json.dump(
                {"host": f"{platform.machine()}, {os.cpu_count()} CPUs", "dtype": options.dtype, "steps": steps},
                file,
                indent=1,
            )
            file.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
