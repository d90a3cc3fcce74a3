"""Norms, computed in fp32."""

from __future__ import annotations

import torch


def normed(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, *, zero_centered: bool
) -> torch.Tensor:
    """RMSNorm, or with a bias LayerNorm, over the last dimension."""
    wide = hidden.float()
    if bias is not None:
        wide = wide - wide.mean(-1, keepdim=True)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    wide = wide * (weight.float() + 1 if zero_centered else weight.float())
    return (wide if bias is None else wide + bias.float()).to(hidden.dtype)


class _Norm(torch.nn.Module):
    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        device="cuda",
    ):
        super().__init__()
        fill = torch.zeros if zero_centered_gamma else torch.ones
        self.weight = torch.nn.Parameter(fill(hidden_size, dtype=params_dtype, device=device))
        self.weight.sequence_parallel = sequence_parallel
        self.eps, self.zero_centered_gamma, self.bias = eps, zero_centered_gamma, None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return normed(hidden, self.weight, self.bias, self.eps, zero_centered=self.zero_centered_gamma)


class RMSNorm(_Norm):
    """x / rms(x) times a weight."""


class LayerNorm(_Norm):
    """With mean and bias."""

    def __init__(self, hidden_size: int, *args, params_dtype=None, device="cuda", **kwargs):
        super().__init__(hidden_size, *args, params_dtype=params_dtype, device=device, **kwargs)
        self.bias = torch.nn.Parameter(torch.zeros(hidden_size, dtype=params_dtype, device=device))
        self.bias.sequence_parallel = self.weight.sequence_parallel
