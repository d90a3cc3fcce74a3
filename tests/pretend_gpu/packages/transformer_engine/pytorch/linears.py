"""Linear layers: alone, behind a norm, and many with a part of the tokens each."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
import torch.nn.functional as functional

from transformer_engine.pytorch.distributed import after, before, mark_split
from transformer_engine.pytorch.norms import normed


class _Base(torch.nn.Module):
    """Attributes that the real layers have and Megatron reads."""

    fp8 = fp8_calibration = False
    #: with fp8 the real ones keep what they have quantised
    save_original_input = False

    def _share(
        self, sizes: tuple[int, int], tp_size: int, tp_group, parallel_mode: str | None, sequence_parallel: bool
    ) -> None:
        """sizes: inputs and outputs of all ranks together."""
        assert parallel_mode in (None, "column", "row"), parallel_mode
        self.tp_size, self.tp_group, self.parallel_mode = tp_size, tp_group, parallel_mode
        self.sequence_parallel = tp_size > 1 and sequence_parallel
        inputs, outputs = sizes
        self.in_features = inputs // (tp_size if parallel_mode == "row" else 1)
        self.out_features = outputs // (tp_size if parallel_mode == "column" else 1)
        self.fp8_meta = {"fp8_checkpoint": False}

    def _matrix(self, init_method, get_rng_state_tracker, rng_tracker_name, **where) -> torch.nn.Parameter:
        weight = torch.nn.Parameter(torch.empty(self.out_features, self.in_features, **where))
        mark_split(weight, 1 if self.parallel_mode == "row" else 0)
        tracker = get_rng_state_tracker() if get_rng_state_tracker is not None else None
        names = (rng_tracker_name,) if rng_tracker_name else ()
        with tracker.fork(*names) if tracker is not None else contextlib.nullcontext(), torch.no_grad():
            init_method(weight)
        return weight

    def _bias(self, wanted: bool, **where) -> torch.Tensor:
        """Without one the real layers hold an empty tensor."""
        if not wanted:
            return torch.empty(0, **where)
        bias = torch.nn.Parameter(torch.zeros(self.out_features, **where))
        if self.parallel_mode == "row":
            bias.sequence_parallel = self.sequence_parallel
        elif self.parallel_mode == "column":
            mark_split(bias, 0)
        return bias

    def get_extra_state(self) -> torch.Tensor:
        """Without fp8 nothing."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor | None) -> None:
        """The same."""
        assert state is None or state.numel() == 0, "fp8 is not pretended"


class Linear(_Base):
    """x W' + b, between the ranks as the mode says."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group=None,
        tp_size: int = 1,
        get_rng_state_tracker=None,
        rng_tracker_name: str | None = None,
        init_method,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device="cuda",
    ):
        super().__init__()
        assert not fuse_wgrad_accumulation, "gradients are not accumulated in kernels here"
        self._share((in_features, out_features), tp_size, tp_group, parallel_mode, sequence_parallel)
        where = {"dtype": params_dtype, "device": device}
        self.weight = self._matrix(init_method, get_rng_state_tracker, rng_tracker_name, **where)
        self.use_bias, self.return_bias = bias, return_bias
        self.bias = self._bias(bias, **where)

    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None):
        product = functional.linear(before(inp, self), self.weight)
        return self._answer(after(product, self))

    def _answer(self, out: torch.Tensor):
        if self.return_bias:
            return out, self.bias
        return out + self.bias if self.use_bias else out


class LayerNormLinear(Linear):
    """A linear layer behind a norm; what is normed can be returned beside, of this rank's tokens only."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        eps: float = 1e-5,
        normalization: str = "LayerNorm",
        return_layernorm_output: bool = False,
        zero_centered_gamma: bool = False,
        **options,
    ):
        super().__init__(in_features, out_features, **options)
        where = {"dtype": self.weight.dtype, "device": self.weight.device}
        fill = torch.zeros if zero_centered_gamma else torch.ones
        self.layer_norm_weight = torch.nn.Parameter(fill(in_features, **where))
        self.layer_norm_weight.sequence_parallel = self.sequence_parallel
        self.layer_norm_bias = None
        if normalization == "LayerNorm":
            self.layer_norm_bias = torch.nn.Parameter(torch.zeros(in_features, **where))
            self.layer_norm_bias.sequence_parallel = self.sequence_parallel
        self.eps, self.normalization, self.zero_centered_gamma = eps, normalization, zero_centered_gamma
        self.return_layernorm_output = return_layernorm_output

    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None):
        hidden = normed(
            inp, self.layer_norm_weight, self.layer_norm_bias, self.eps, zero_centered=self.zero_centered_gamma
        )
        out = super().forward(hidden, is_first_microbatch)
        if not self.return_layernorm_output:
            return out
        return (*out, hidden) if self.return_bias else (out, hidden)


class GroupedLinear(_Base):
    """Matrix i for the next m_splits[i] tokens. Nothing passes between ranks."""

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        *,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group=None,
        tp_size: int = 1,
        get_rng_state_tracker=None,
        rng_tracker_name: str | None = None,
        init_method,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device="cuda",
        ub_name: str | None = None,
    ):
        super().__init__()
        assert not fuse_wgrad_accumulation, "gradients are not accumulated in kernels here"
        self._share((in_features, out_features), tp_size, tp_group, parallel_mode, sequence_parallel)
        self.num_gemms, self.use_bias, self.return_bias = num_gemms, bias, return_bias
        where = {"dtype": params_dtype, "device": device}
        for number in range(num_gemms):
            weight = self._matrix(init_method, get_rng_state_tracker, rng_tracker_name, **where)
            self.register_parameter(f"weight{number}", weight)
            setattr(self, f"bias{number}", self._bias(bias, **where))

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """Nothing without fp8."""

    def forward(self, inp: torch.Tensor, m_splits: Sequence[int], is_first_microbatch: bool | None = None):
        assert len(m_splits) == self.num_gemms and sum(m_splits) == inp.size(0), "each token is of one matrix"
        parts = []
        for number, tokens in enumerate(inp.split(list(m_splits))):
            part = functional.linear(tokens, getattr(self, f"weight{number}"))
            parts.append(part + getattr(self, f"bias{number}") if self.use_bias and not self.return_bias else part)
        out = torch.cat(parts)
        return (out, [getattr(self, f"bias{i}") for i in range(self.num_gemms)]) if self.return_bias else out
