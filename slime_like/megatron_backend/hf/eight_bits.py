"""HF folders whose matrices are stored in eight bits, as public FP8 and int8 checkpoints are: which tensors those are,
and fp32 rows or columns of them, scales multiplied in.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import torch

from slime_like.config.quantisation import STORED_CONFIGS
from slime_like.errors import CheckpointError

#: Appended to a weight's name. The first (DeepSeek-V3, Qwen3-FP8) has a number for each block of the config's
#: weight_block_size, the second (compressed-tensors) one for each row, or one.
BLOCK_SCALES, SCALES = "_scale_inv", "_scale"
#: safetensors' words for the types that mean nothing without a scale.
EIGHT_BITS = ("I8", "F8_E4M3")


def scale_names(names: Collection[str]) -> dict[str, str]:
    """Weight's name -> its scale's, of those that have one."""
    return {
        name.removesuffix(suffix): name
        for suffix in (BLOCK_SCALES, SCALES)
        for name in names
        if name.endswith(f".weight{suffix}") and name.removesuffix(suffix) in names
    }


def block_of(config: Mapping[str, Any], scale_name: str, folder: str) -> tuple[int, int] | None:
    """Rows and columns that share a scale; None: a row, or all.

    config: of the folder's config.json. Raises CheckpointError for block scales of a config that does not say the
    block.
    """
    if not scale_name.endswith(BLOCK_SCALES):
        return None
    stored: Mapping[str, Any] = next((config[key] for key in STORED_CONFIGS if config.get(key)), {})
    block = stored.get("weight_block_size")
    if not (isinstance(block, list) and len(block) == 2 and all(isinstance(size, int) and size > 0 for size in block)):
        raise CheckpointError(
            f"{folder} holds {scale_name!r}, but its config.json does not say how many rows and columns share a number:"
            f" quantization_config.weight_block_size is {block!r}."
        )
    return block[0], block[1]


@dataclasses.dataclass(frozen=True)
class StoredScale:
    """The scale of one eight-bit matrix.

    numbers: one, [N, 1], or [ceil(N / rows), ceil(K / columns)] with a block of (rows, columns).
    """

    numbers: torch.Tensor
    shape: tuple[int, int]  # of the matrix
    block: tuple[int, int] | None

    @property
    def expected(self) -> tuple[int, int]:
        """Shape that the numbers have unless there is only one."""
        rows, columns = self.block or (1, self.shape[1])
        return -(-self.shape[0] // rows), -(-self.shape[1] // columns)

    def spread(self, dim: int | None, start: int, stop: int | None) -> torch.Tensor:
        """fp32: of the matrix's rows (dim 0) or columns (dim 1) start:stop, or what broadcasts to them.

        Only what the part needs is spread: a whole scale would be as large as the model's largest matrix in fp32.
        """
        numbers = self.numbers.float()
        if numbers.numel() == 1:
            return numbers.reshape(1, 1)
        for axis, size in enumerate(self.block or (1, self.shape[1])):
            if numbers.shape[axis] == 1:
                continue
            first, last = (start, stop) if axis == dim and stop is not None else (0, self.shape[axis])
            blocks = numbers.narrow(axis, first // size, -(-last // size) - first // size)
            numbers = blocks.repeat_interleave(size, axis).narrow(axis, first % size, last - first)
        return numbers
