"""Attention over a row of packed sequences, through one kernel where there is one, against attention in float64.

Covers slime_like.megatron_backend.model.attention.
"""

from __future__ import annotations

import types

import numpy as np
import pytest
import torch

LENGTHS = [8, 4, 20]
#: Query heads, key/value heads, size of queries and keys, of values.
SHAPES = {"grouped": (4, 2, 16, 16), "latent": (4, 4, 20, 10), "large": (2, 1, 264, 264)}
SCALE = 0.3


def inputs(shape: str) -> list[torch.Tensor]:
    """Queries, keys, values and the gradient of what comes out, [T, heads, d] bf16, the same on every rank."""
    heads, groups, size, value_size = SHAPES[shape]
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(sum(LENGTHS), count, width, generator=generator).bfloat16()
        for count, width in ((heads, size), (groups, size), (groups, value_size), (heads, value_size))
    ]


#: A prompt, two answers to it, the second of which forks; a sequence alone: as many tokens.
BRANCHES = [(0, 8, ()), (8, 12, ((0, 8),)), (12, 17, ((0, 8),)), (17, 19, ((0, 8), (12, 17))), (19, 32, ())]


def attend(place: dict, shape: str, dtype: str, branches: bool = False) -> dict:
    """This rank's tokens, what attention gives for them and its inputs' gradients (float64), kernels and host reads."""
    from slime_like.algorithms.shared_prompts import Branch
    from slime_like.config.parallel import ParallelConfig
    from slime_like.megatron_backend.initialize import initialize, shut_down
    from slime_like.megatron_backend.model.attention import AttnMaskType, CausalAttention
    from slime_like.megatron_backend.model.packed import packed_sequences, shared_sequences
    from slime_like.megatron_backend.step.context_parallel import ContextShare
    from tests.pretend_gpu.record import RECORD

    initialize(ParallelConfig(context_parallel_size=place["world_size"]), **place)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = types.SimpleNamespace(kv_channels=16)
    attention = CausalAttention(config, 1, AttnMaskType.causal, "self", softmax_scale=SCALE)
    share = ContextShare.of_this_rank()
    here = torch.as_tensor(share.local(LENGTHS))
    *leaves, grad = (x[here].to(getattr(torch, dtype)).to(device) for x in inputs(shape))
    leaves = [x.requires_grad_() for x in leaves]
    if branches:
        row = shared_sequences([Branch(start=a, stop=b, before=before) for a, b, before in BRANCHES], 0, device)
    else:
        row = packed_sequences(LENGTHS, share, device)
    RECORD.clear()
    out = attention(*(x.unsqueeze(1) for x in leaves), packed_seq_params=row)
    out.backward(grad.reshape(out.shape))
    kernels = [event.detail["operation"] for event in RECORD.of("kernel")]
    reads = dict(RECORD.reads)
    answer = [x.detach().cpu().double().numpy() for x in (out, *(leaf.grad for leaf in leaves))]
    shut_down()
    return {"here": here.numpy(), "values": answer, "kernels": kernels, "reads": reads}


def truth(shape: str, branches: bool = False) -> list[np.ndarray]:
    """The same of all tokens, a sequence or a branch at a time."""
    *leaves, grad = (x.double() for x in inputs(shape))
    query, key, value = leaves = [x.requires_grad_() for x in leaves]
    starts = np.cumsum([0, *LENGTHS])
    sequences = BRANCHES if branches else [(a, b, ()) for a, b in zip(starts, starts[1:], strict=False)]
    rows = []
    for start, stop, before in sequences:
        seen = [place for a, b in (*before, (start, stop)) for place in range(a, b)]
        q, k, v = query[start:stop].transpose(0, 1), key[seen].transpose(0, 1), value[seen].transpose(0, 1)
        k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
        hidden = torch.ones(stop - start, len(seen)).triu(len(seen) - (stop - start) + 1) > 0
        scores = (q @ k.transpose(1, 2) * SCALE).masked_fill(hidden, -torch.inf)
        rows.append((scores.softmax(-1) @ v).transpose(0, 1))
    out = torch.cat(rows)
    out.backward(grad)
    return [out.detach().flatten(1)[:, None].numpy(), *(leaf.grad.numpy() for leaf in leaves)]


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_attention_of_packed_sequences(pretend, shape, num_ranks, dtype):
    check(pretend(attend, num_ranks, shape, dtype), truth(shape), shape, dtype)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_attention_of_shared_prompts(pretend, shape, dtype):
    check(pretend(attend, 1, shape, dtype, True), truth(shape, True), shape, dtype)


def check(ranks: list[dict], wanted: list[np.ndarray], shape: str, dtype: str) -> None:
    # A kernel takes half precision and heads of up to 256 numbers; the rest is torch's SDPA, one sequence at a time.
    uses_kernel = dtype == "bfloat16" and shape != "large"
    for rank in ranks:
        assert rank["kernels"] == (["torch_attn::_varlen_attn", "torch_attn::_varlen_attn_backward"] * uses_kernel)
        assert rank["reads"] == {}
        for ours, theirs in zip(rank["values"], wanted, strict=True):
            error = np.abs(ours - theirs[rank["here"]]).max() / np.abs(theirs).max()
            assert error < (2**-7 if dtype == "bfloat16" else 1e-6)
