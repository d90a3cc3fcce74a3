"""Runs inside the engine: digests of the weights that it holds, computed where they lie, and left where the engine's
own checker reads them.

A request is JSON: a list of [parameter, expert or null, dim, first, length, dtype]. The answer is a buffer of the
model, 8 bytes an entry, whose checksum SGLang's /weights_checker tells: whoever knows what the digests must be knows
whether they are, from one number.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Sequence

#: Name of the one "tensor" of the request, and of the model's buffer with the answer.
RECEIPT_NAME, BUFFER = "__receipt__", "slime_like_receipt"
#: Stands for a parameter that the model does not have, or has in another shape: the digest of nothing real.
_ABSENT = bytes(8)
#: Elements mixed at a time on a GPU, where int64 copies are made.
_CHUNK = 1 << 24


def take(model, request: bytes) -> None:
    """Put the digest of every entry into the model's buffer."""
    import torch

    answer = b"".join(read_digests(digest_of_entries(held_by(model), json.loads(request))))
    if BUFFER in model._buffers:
        del model._buffers[BUFFER]  # of another length, maybe
    model.register_buffer(BUFFER, torch.tensor(list(answer), dtype=torch.uint8, device="cpu"), persistent=False)


def held_by(model) -> dict:
    """Name -> tensor of all parameters and buffers but our own."""
    held = dict(model.named_parameters())
    held.update(model.named_buffers())
    held.pop(BUFFER, None)
    return held


def digest_of_entries(held: dict, entries: Sequence[list]) -> list:
    """One digest an entry, as `digest` gives it: read_digests() makes bytes of them."""
    return [_of_entry(held, *entry) for entry in entries]


def read_digests(digests: Sequence) -> list[bytes]:
    """8 bytes for each that `digest` gave: those that are still on a device are read from it all at once."""
    import torch

    on_device = [number for number, one in enumerate(digests) if not isinstance(one, bytes)]
    values = torch.stack([digests[number] for number in on_device]).tolist() if on_device else []
    read = list(digests)
    for number, value in zip(on_device, values, strict=True):
        read[number] = (value % 2**64).to_bytes(8, "big")
    return read


def _of_entry(held: dict, parameter: str, expert: int | None, dim: int, first: int, length: int, dtype: str):
    import torch

    tensor = held.get(parameter)
    if tensor is None:
        return _ABSENT
    tensor = tensor.detach()
    if expert is not None:
        if expert >= tensor.size(0):
            return _ABSENT
        tensor = tensor[expert]
    if dim >= tensor.dim() or first + length > tensor.size(dim):
        return _ABSENT
    # An engine may keep a tensor in a wider type than it was sent in (a router in fp32): casting back loses nothing.
    return digest(tensor.narrow(dim, first, length).to(getattr(torch, dtype)))


def digest(tensor):
    """Of a tensor's elements: on the host 8 bytes, xxh3_64; on a GPU weighted_sum, which stays there.

    Copying the elements out would cost more, and reading each sum at once would make the host wait for the device.
    """
    import torch

    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    return weighted_sum(flat) if flat.is_cuda else host_digest(flat)


def host_digest(flat) -> bytes:
    """xxh3_64 of a host tensor, uint8 [bytes].

    Not by way of a numpy array: torch never again resizes memory that numpy has been shown, and --offload-train does.
    """
    import xxhash

    size = flat.numel()
    return xxhash.xxh3_64_digest((ctypes.c_ubyte * size).from_address(flat.data_ptr()) if size else b"")


def weighted_sum(flat):
    """Sum of the 4-byte words, each times an odd number that depends on its place, modulo 2**64.

    flat: uint8 [bytes]. Returns an int64 without dimensions, on the same device.
    """
    import torch

    padding = -flat.numel() % 4
    words = torch.nn.functional.pad(flat, (0, padding)).view(torch.int32) if padding else flat.view(torch.int32)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, words.numel(), _CHUNK):
        part = words[start : start + _CHUNK].to(torch.int64)
        place = torch.arange(start, start + part.numel(), dtype=torch.int64, device=flat.device)
        # Knuth's multiplicative constant for 64 bits, made odd by the trailing 1: no word is multiplied by zero.
        total += (part * (place * -7046029254386353131 * 2 + 1)).sum()
    return total
