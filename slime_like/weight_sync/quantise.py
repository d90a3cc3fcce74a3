"""Eight-bit weights for the engines, one tensor at a time: HF names in, HF names and scales out.

One function serves what is sent, what is digested and, by `undo`, what the engines then compute with. Same input, same
bytes: computed in fp32, rounded half to even.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

import torch

from slime_like.config.quantisation import LINEAR, QuantScheme
from slime_like.errors import WeightSyncError
from slime_like.weight_sync.buckets import NamedTensor

#: Below this, a block is as good as empty; its scale must not be zero.
SMALLEST = 1e-10
FLAG = "--rollout-quantization"


class Quantiser:
    """The stream to engines that keep their weights in a scheme, each tensor checked before anything of it is sent:
    engines end at a scale of an unknown name, and take a tensor of another type for what it is not (sglang 0.5.23).
    """

    def __init__(self, scheme: QuantScheme, names: Collection[str]):
        """names: HF names of all tensors of the model, which is all that engines know beside the scales."""
        self.scheme = scheme
        self._names = frozenset(names)

    def over(self, tensors: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
        """What is sent of each, in order. Raises WeightSyncError naming the tensor."""
        for name, tensor in tensors:
            if LINEAR.search(name):
                self._check_matrix(name, tensor)
            pairs = quantise(name, tensor, self.scheme)
            del tensor
            for sent_name, sent in pairs:
                self.check(sent_name, sent)
            while pairs:  # what was sent is not held while the next is copied
                yield pairs.pop(0)

    def check(self, name: str, tensor: torch.Tensor) -> None:
        """Raise WeightSyncError unless engines of this scheme have a place for this name, type and number of
        dimensions.
        """
        where, scheme = f"{FLAG} {self.scheme.name}: {name}", self.scheme
        weight = name.removesuffix(scheme.scale_suffix)
        is_scale = weight != name and bool(LINEAR.search(weight))
        if (weight if is_scale else name) not in self._names:
            raise WeightSyncError(
                f"{where} is no tensor that engines know: neither of the model nor a scale (*{scheme.scale_suffix})."
                " Nothing of it was sent, as they would end. Fix: --custom-weight-transform-path must keep HF names;"
                f" {FLAG} adds the scales."
            )
        dtype = str(tensor.dtype).removeprefix("torch.")
        if is_scale:
            fits, expected = dtype == "float32" and tensor.dim() == 2, "float32, in two dimensions"
        elif LINEAR.search(name):
            fits, expected = dtype == scheme.weight_dtype and tensor.dim() == 2, f"{scheme.weight_dtype}, a matrix"
        else:
            fits = tensor.is_floating_point() and tensor.element_size() > 1
            expected = "of a type of at least 16 bits, as it is no linear layer's"
        if not fits:
            raise WeightSyncError(
                f"{where} is {dtype} of shape {list(tensor.shape)}; engines keep it {expected}, and would take it for"
                " something else."
            )

    def _check_matrix(self, name: str, tensor: torch.Tensor) -> None:
        """What a transform has made of a linear layer must still be one."""
        if tensor.dim() != 2 or not tensor.is_floating_point() or tensor.element_size() == 1:
            raise WeightSyncError(
                f"{FLAG} {self.scheme.name}: {name} is {str(tensor.dtype).removeprefix('torch.')} of shape"
                f" {list(tensor.shape)}, no matrix of at least 16 bits that could be quantised. Fix: a"
                " --custom-weight-transform-path that quantises by itself goes without this flag."
            )


def quantise(name: str, tensor: torch.Tensor, scheme: QuantScheme) -> list[tuple[str, torch.Tensor]]:
    """What is sent for one HF tensor: itself, or its eight-bit matrix [N, K] and its fp32 scales."""
    if not LINEAR.search(name):
        return [(name, tensor)]
    weight = tensor.detach().float()
    rows, columns = weight.shape
    largest = block_maximum(weight, scheme)
    if scheme.one_scale:
        largest = largest.max().expand_as(largest).contiguous()
    scale = largest.clamp(min=SMALLEST) / scheme.largest
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
