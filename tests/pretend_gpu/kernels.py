"""Kernels that torch has for a GPU only, as plain formulas on the host, with the checks of the real ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch


def _checked(options: dict) -> None:
    """FlashAttention's conditions."""
    query, key, value = (options[name] for name in ("query", "key", "value"))
    if query.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    if not query.size(-1) == key.size(-1) == value.size(-1) or query.size(-1) % 8 or query.size(-1) > 256:
        raise RuntimeError(f"head sizes {[x.size(-1) for x in (query, key, value)]} are not one multiple of 8 to 256")
    if query.size(1) % key.size(1):
        raise RuntimeError("Number of heads in key/value must divide number of heads in query")
    for rows, name, most in ((query, "cu_seq_q", "max_q"), (key, "cu_seq_k", "max_k")):
        boundaries = options[name]
        if boundaries.dtype != torch.int32:
            raise RuntimeError(f"{name} must have dtype int32")
        if int(boundaries[-1]) != len(rows) or int(boundaries.diff().max()) > options[most]:
            raise RuntimeError(f"{name} {boundaries.tolist()} for {len(rows)} rows, {most} {options[most]}")
    if not options["is_causal"] or list(options["window_size"]) != [-1, 0]:
        raise NotImplementedError("only causal attention is pretended")


def _spans(options: dict) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """(queries, keys, which query sees which key) of each span: the last query sees the last key."""
    queries, keys = options["cu_seq_q"].tolist(), options["cu_seq_k"].tolist()
    for a, b, c, d in zip(queries, queries[1:], keys, keys[1:], strict=False):
        visible = torch.arange(d - c)[None] <= torch.arange(b - a)[:, None] + (d - c) - (b - a)
        yield slice(a, b), slice(c, d), visible


def _probabilities(options: dict, here: slice, there: slice, visible: torch.Tensor) -> tuple:
    """([heads, queries, keys] probabilities, their log-sums, queries, keys and values as [heads, n, d]), in fp32."""
    query, key, value = (options[name].float() for name in ("query", "key", "value"))
    copies = query.size(1) // key.size(1)
    query, key, value = query[here], *(x[there].repeat_interleave(copies, 1) for x in (key, value))
    query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    scores = (query @ key.transpose(1, 2) * options["scale"]).masked_fill(~visible, -torch.inf)
    return scores.softmax(-1), scores.logsumexp(-1), query, key, value


def _varlen_attn(**options) -> tuple:
    _checked(options)
    out, log_sums = torch.zeros_like(options["query"]), []
    for here, there, visible in _spans(options):
        probabilities, log_sum, _, _, value = _probabilities(options, here, there, visible)
        out[here] = (probabilities @ value).transpose(0, 1).to(out.dtype)
        log_sums.append(log_sum)
    return out, torch.cat(log_sums, 1), torch.zeros(2, dtype=torch.uint64)


def _varlen_attn_backward(**options) -> tuple:
    """dV = P'dO, dS = P (dO V' - sum(dO O)), dQ = dS K scale, dK = dS'Q scale."""
    _checked(options)
    grads = [torch.zeros_like(options[name], dtype=torch.float32) for name in ("query", "key", "value")]
    copies = options["query"].size(1) // options["key"].size(1)

    def of_groups(grad: torch.Tensor) -> torch.Tensor:
        return grad.unflatten(0, (-1, copies)).sum(1).transpose(0, 1)

    for here, there, visible in _spans(options):
        probabilities, _, query, key, value = _probabilities(options, here, there, visible)
        grad_out = options["grad_out"][here].float().transpose(0, 1)
        out = probabilities @ value
        by_scores = probabilities * (grad_out @ value.transpose(1, 2) - (grad_out * out).sum(-1, keepdim=True))
        grads[0][here] += (by_scores @ key * options["scale"]).transpose(0, 1)
        grads[1][there] += of_groups(by_scores.transpose(1, 2) @ query * options["scale"])
        grads[2][there] += of_groups(probabilities.transpose(1, 2) @ grad_out)
    return tuple(grad.to(options["query"].dtype) for grad in grads)


#: Name of an operation -> what runs instead of its CPU kernel, called with the schema's names.
KERNELS: dict[str, Callable] = {
    "torch_attn::_varlen_attn": _varlen_attn,
    "torch_attn::_varlen_attn_backward": _varlen_attn_backward,
}


def bound(func, args: tuple, kwargs: dict) -> dict:
    """The arguments by the schema's names, with its defaults."""
    schema = func._schema.arguments
    defaults = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    return defaults | dict(zip((argument.name for argument in schema), args, strict=False)) | kwargs
