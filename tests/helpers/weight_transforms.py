"""Functions for --custom-weight-transform-path, good and bad, that trainer ranks in processes of
their own can import.
"""

from __future__ import annotations

import torch


def norms_in_two_parts(args, name, tensor):
    """Norms become two tensors (rounded to bf16, and what is then missing), keys of attention become none, the others
    pass.
    """
    if name.endswith("norm.weight"):
        rounded = tensor.to(torch.bfloat16)
        yield name, rounded
        yield f"{name}_rest", tensor - rounded
    elif not name.endswith("k_proj.weight"):
        yield name, tensor


def raises_at_the_last_norm(args, name, tensor):
    """A fault in the middle of the stream, on the last pipeline stage only."""
    if name == "model.norm.weight":
        raise ArithmeticError("no such scale")
    return [(name, tensor)]


def one_name_in_two_stages(args, name, tensor):
    """Makes the same name of the first tensor of one stage and of the last of the other."""
    return [("first_or_last" if name in ("model.embed_tokens.weight", "model.norm.weight") else name, tensor)]


def differs_by_rank(args, name, tensor):
    """Not a function of its arguments alone."""
    return [(f"{name}.{torch.distributed.get_rank()}", tensor)]


def to_nothing(args, name, tensor):
    """Drops everything."""
    return ()
