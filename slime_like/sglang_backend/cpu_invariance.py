"""Batch invariance on a CPU host: a request's tokens and log-probs do not depend on what else is in the batch, to the
bit.

SGLang's own (0.5.23: batch_invariant_ops) replaces aten operators by Triton kernels, which want CUDA. On a CPU two
things tell how many others there are: a matrix product, whose rows are rounded by another kernel where there are fewer
than eight, and the attention of a prompt, whose blocks depend on where a chunk of it ends. Both get a fixed size here.
"""

from __future__ import annotations

import torch

#: Rows of a matrix product, and queries of an attention, that are computed together, always.
BLOCK = 64
#: Held as long as the process lives: torch forgets its operators with their library.
_LIBRARIES: list[torch.library.Library] = []


class RowBlocks:
    """Matrix products in blocks of BLOCK rows, the last one filled up: a row's result is its own, whatever stands
    beside it.

    The rule is probed for each shape and type of the second factor when it is first met.
    """

    def __init__(self) -> None:
        self._probed: set[tuple] = set()

    def mm(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """rows [N, K] x weight [K, M] -> [N, M]."""
        return self._blocks(rows, weight, torch.mm)

    def addmm(self, bias: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, *, beta=1, alpha=1) -> torch.Tensor:
        """beta x bias + alpha x rows x weight."""
        product = self._blocks(rows, weight, torch.mm)
        if alpha != 1:
            product *= alpha
        return product.add_(bias, alpha=beta)

    def _blocks(self, rows: torch.Tensor, weight: torch.Tensor, multiply) -> torch.Tensor:
        count = rows.shape[0]
        if not count or not rows.is_floating_point():
            return multiply(rows, weight, out=rows.new_empty(count, weight.shape[1]))
        kind = (weight.shape, weight.stride(), weight.dtype)
        if kind not in self._probed:
            self._probe(weight, multiply)
            self._probed.add(kind)
        size = -(-count // BLOCK) * BLOCK
        if size != count or not rows.is_contiguous():
            filled = rows.new_zeros(size, rows.shape[1])
            filled[:count] = rows
            rows = filled
        product = rows.new_empty(size, weight.shape[1])
        for start in range(0, size, BLOCK):
            # The overload with `out` is another operator, which is not replaced.
            multiply(rows[start : start + BLOCK], weight, out=product[start : start + BLOCK])
        return product[:count]

    def _probe(self, weight: torch.Tensor, multiply) -> None:
        """Raises RuntimeError where a row of a block depends on the others, or on its place."""
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(BLOCK, weight.shape[0], generator=generator).to(weight.dtype)
        others = torch.randn(BLOCK, weight.shape[0], generator=generator).to(weight.dtype)
        order = torch.randperm(BLOCK, generator=generator)
        whole, moved, few = (weight.new_empty(BLOCK, weight.shape[1]) for _ in range(3))
        multiply(rows, weight, out=whole)
        multiply(rows[order].contiguous(), weight, out=moved)
        others[::9] = rows[::9]
        multiply(others, weight, out=few)
        if not (torch.equal(whole[order], moved) and torch.equal(whole[::9], few[::9])):
            raise RuntimeError(
                f"on this host a row of a matrix product {BLOCK} x {tuple(weight.shape)} ({weight.dtype}) depends on"
                " the rows beside it: --enable-deterministic-inference cannot be kept here. Fix: drop --deterministic."
            )


def block_attention(query, key, value, attn_mask=None, enable_gqa=False, scale=None, is_causal=False):
    """torch's scaled_dot_product_attention, but of a prompt (causal, as many queries as keys) BLOCK queries at a time
    over all keys up to the last of them: a query's result does not depend on how far its chunk goes.

    query: [1, heads, length, size]. What is not causal, the one query of a decoding step, goes to torch as it is: it
    stands alone already.
    """
    real = torch.nn.functional.scaled_dot_product_attention
    if not is_causal:
        return real(query, key, value, attn_mask=attn_mask, enable_gqa=enable_gqa, scale=scale)
    length = query.shape[2]
    fill = (0, 0, 0, -length % BLOCK)
    query, key, value = (torch.nn.functional.pad(tensor, fill) for tensor in (query, key, value))
    parts = []
    for start in range(0, length, BLOCK):
        end = start + BLOCK
        mask = torch.arange(end) <= torch.arange(start, end)[:, None]
        parts.append(
            real(
                query[:, :, start:end].contiguous(),
                key[:, :, :end].contiguous(),
                value[:, :, :end].contiguous(),
                attn_mask=mask,
                enable_gqa=enable_gqa,
                scale=scale,
            )
        )
    return torch.cat(parts, dim=2)[:, :, :length]


def enable(*args, **kwargs) -> None:
    """SGLang's enable_batch_invariant_mode for a CPU: for this whole process, once."""
    from sglang.srt.layers.attention import torch_native_backend

    if _LIBRARIES:
        return
    blocks, library = RowBlocks(), torch.library.Library("aten", "IMPL")
    library.impl("mm", blocks.mm, "CPU")
    library.impl("addmm", blocks.addmm, "CPU")
    _LIBRARIES.append(library)
    torch_native_backend.scaled_dot_product_attention = block_attention
