"""Eight-bit weights for the engines, one tensor at a time: HF names in, HF names and scales out.

One function serves what is sent, what is digested and, by `undo`, what the engines then compute with. Same input, same
bytes: computed in fp32, rounded half to even.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from slime_like.config.quantisation import LINEAR, QuantScheme

#: Below this, a block is as good as empty; its scale must not be zero.
SMALLEST = 1e-10


def quantise(name: str, tensor: torch.Tensor, scheme: QuantScheme) -> list[tuple[str, torch.Tensor]]:
    """What is sent for one HF tensor: itself, or its eight-bit matrix [N, K] and its fp32 scales."""
    if not LINEAR.search(name):
        return [(name, tensor)]
    weight = tensor.detach().float()
    rows, columns = weight.shape
    scale = block_maximum(weight, scheme).clamp(min=SMALLEST) / scheme.largest
    values = weight / spread(scale, rows, columns, scheme)
    dtype = getattr(torch, scheme.weight_dtype)
    values = values if dtype.is_floating_point else values.round()
    values = values.clamp(-scheme.largest, scheme.largest).to(dtype)
    return [(name, values), (name + scheme.scale_suffix, scale)]


def undo(sent: Mapping[str, torch.Tensor], scheme: QuantScheme) -> dict[str, torch.Tensor]:
    """fp32 HF tensors of what was sent, scales multiplied in."""
    plain = {}
    for name, tensor in sent.items():
        if name.endswith(scheme.scale_suffix) and name.removesuffix(scheme.scale_suffix) in sent:
            continue
        scale = sent.get(name + scheme.scale_suffix)
        plain[name] = tensor.float()
        if scale is not None:
            rows, columns = tensor.shape
            plain[name] *= spread(scale.float(), rows, columns, scheme)
    return plain


def block_maximum(weight: torch.Tensor, scheme: QuantScheme) -> torch.Tensor:
    """Largest absolute value of each block: [blocks down, blocks across]. weight: [N, K]."""
    rows, columns = weight.shape
    high, wide = scheme.rows or rows, scheme.columns or columns
    padded = torch.nn.functional.pad(weight.abs(), (0, -columns % wide, 0, -rows % high))
    return padded.reshape(padded.shape[0] // high, high, padded.shape[1] // wide, wide).amax((1, 3))


def spread(scale: torch.Tensor, rows: int, columns: int, scheme: QuantScheme) -> torch.Tensor:
    """Each element's scale: [rows, columns], or what broadcasts to it. scale: [blocks down, blocks across]."""
    whole = scale.repeat_interleave(scheme.rows or rows, 0)[:rows] if scale.shape[0] > 1 or scheme.rows > 1 else scale
    if scale.shape[1] > 1 or scheme.columns > 1:
        whole = whole.repeat_interleave(scheme.columns, 1)[:, :columns]
    return whole
