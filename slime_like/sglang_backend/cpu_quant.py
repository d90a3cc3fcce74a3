"""Eight-bit layers of an unmodified sglang 0.5.23 where there is neither CUDA nor AMX: real int8 and fp8 arithmetic, in
torch.

sglang's quantised layers refuse to load there, and its own CPU kernels (sgl_kernel) have no wheel. `install()` gives
four of its layer methods what they lack: products from the eight-bit weights and scales that the layer holds now, and
parameters that stay as they were loaded, so that the next weight sync finds them. Nothing is cached between calls.

Remove when sgl_kernel has a CPU wheel for any x86 host, and sglang's layers keep their parameters' loaders there
(0.5.23: layers/quantization/w8a8_int8.py, fp8.py).
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence

import torch

#: How fp8 layers multiply, an environment variable of the server. "w8a8", as on a GPU: activations become fp8, too,
#: each token's 128 columns with a scale of their own. "w8a16": activations stay as they are.
ACTIVATIONS_VARIABLE = "SLIME_LIKE_CPU_FP8"
W8A8, W8A16 = "w8a8", "w8a16"
#: sglang's names of what can be computed here, and of the form of checkpoint that it reads with one of them.
INT8, FP8, COMPRESSED = "w8a8_int8", "fp8", "compressed-tensors"
_E4M3, _E4M3_LARGEST, _INT8_LARGEST = torch.float8_e4m3fn, 448.0, 127.0
#: What each byte stands for: on a CPU looking numbers up takes a fifth of torch's own conversion (2.13).
_E4M3_NUMBERS = torch.arange(256, dtype=torch.uint8).view(_E4M3).float()
#: sglang's: no token's scale is zero.
_SMALLEST = 1e-10


def int8_matmul(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """fp32 [..., N]: x times the weight's transpose; each token of x becomes int8, the sum is exact in int32.

    x: float [..., K]; weight: int8 [N, K]; scale: fp32 [N, 1].
    """
    tokens, token_scale = quantised_tokens(x.reshape(-1, x.shape[-1]).float(), _INT8_LARGEST)
    product = torch._int_mm(tokens.round().to(torch.int8), weight.t())
    return (product.float() * token_scale * scale.reshape(1, -1)).reshape(*x.shape[:-1], weight.shape[0])


def fp8_matmul(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, *, columns: int, activations: str
) -> torch.Tensor:
    """fp32 [..., N]: x times the weight's transpose, each block of columns with its scales.

    x: float [..., K]; weight: e4m3 [N, K]; scale: fp32 [N, ceil(K / columns)], one row for each row of the weight.
    activations: W8A8 quantises each token's block of columns; products of e4m3 numbers are exact in fp32.
    """
    flat = x.reshape(-1, x.shape[-1]).float()
    numbers = _E4M3_NUMBERS.take(weight.view(torch.uint8).long())
    product = flat.new_zeros(flat.shape[0], weight.shape[0])
    for block, start in enumerate(range(0, flat.shape[1], columns)):
        part, token_scale = flat[:, start : start + columns], flat.new_ones(flat.shape[0], 1)
        if activations == W8A8:
            part, token_scale = quantised_tokens(part, _E4M3_LARGEST)
            part = part.to(_E4M3).float()
        partial = part @ numbers[:, start : start + columns].t()
        product += partial * token_scale * scale[:, block].float()
    return product.reshape(*x.shape[:-1], weight.shape[0])


def quantised_tokens(tokens: torch.Tensor, largest: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens [M, K] within ±largest, not yet rounded, and the scale of each [M, 1])."""
    scale = tokens.abs().amax(-1, keepdim=True).clamp(min=_SMALLEST) / largest
    return (tokens / scale).clamp(-largest, largest), scale


def mixed_experts(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, gate_up, down) -> torch.Tensor:
    """[T, H]: each token's experts, weighted; silu(gate) * up between the two products.

    weights, ids: [T, k]; an id below zero is an expert of another rank. gate_up, down: (rows, expert) -> fp32 product.
    """
    mixed = torch.zeros(x.shape, dtype=torch.float32)
    for expert in ids.unique().tolist():
        if expert < 0:
            continue
        token, slot = (ids == expert).nonzero(as_tuple=True)
        gate, up = gate_up(x[token], expert).to(x.dtype).chunk(2, -1)
        hidden = torch.nn.functional.silu(gate) * up
        mixed.index_add_(0, token, down(hidden, expert) * weights[token, slot].float().unsqueeze(-1))
    return mixed.to(x.dtype)


def asked_for(argv: Sequence[str]) -> dict | None:
    """The `quantization_config` that a server with these arguments will read; None if its weights are plain.

    --json-model-override-args wins over the checkpoint's config.json, --quantization says it without either.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model-path", "--model", default="")
    parser.add_argument("--json-model-override-args", default="{}")
    parser.add_argument("--quantization")
    options, _ = parser.parse_known_args(list(argv))
    config: dict = {}
    path = os.path.join(options.model_path, "config.json")
    if os.path.isfile(path):
        with open(path, encoding="utf-8") as file:
            config = json.load(file)
    config |= json.loads(options.json_model_override_args)
    stored = config.get("quantization_config") or config.get("compression_config")
    if stored is None and options.quantization in (None, "none"):
        return None
    return {"quant_method": options.quantization, **(stored or {})}


def arguments_for(config: dict) -> list[str]:
    """What the server needs to be told beside, to read weights of this config here.

    Raises ValueError with the reason for weights that cannot be computed with here.
    """
    method = str(config.get("quant_method")).replace("_", "-").lower()
    if method == INT8.replace("_", "-"):
        return []
    if method == FP8:
        if "activation_scheme" not in config:
            raise ValueError(
                "fp8 made by the server itself (--quantization fp8 on plain weights) is lost at the first weight sync:"
                " sglang 0.5.23 replaces its parameters. Fix: eight-bit weights in the checkpoint, or"
                " --rollout-quantization."
            )
        if config["activation_scheme"] != "dynamic":
            raise ValueError(
                f"fp8 with activation_scheme {config['activation_scheme']!r}: only 'dynamic' is computed on a CPU."
            )
        return []
    if method == COMPRESSED:
        reason = _not_int8_by_rows(config)
        if reason is None:
            # sglang asks CUDA for its capability before it makes layers of its compressed-tensors scheme
            return [f"--quantization={INT8}"]
        raise ValueError(f"compressed-tensors with {reason}: on a CPU only int8 with a scale a row is computed.")
    raise ValueError(
        f"quantization {config.get('quant_method')!r} has no kernels without CUDA. On a CPU there are"
        f" {INT8}, {FP8} and {COMPRESSED} int8."
    )


def _not_int8_by_rows(config: dict) -> str | None:
    """What a compressed-tensors config has that is not int8 weights by rows and int8 activations by tokens."""
    for name, group in (config.get("config_groups") or {}).items():
        weights, inputs = group.get("weights") or {}, group.get("input_activations") or {}
        expected = (
            (weights, "num_bits", 8),
            (weights, "type", "int"),
            (weights, "strategy", "channel"),
            (weights, "symmetric", True),
            (inputs, "num_bits", 8),
            (inputs, "type", "int"),
            (inputs, "strategy", "token"),
            (inputs, "dynamic", True),
        )
        for part, key, value in expected:
            if part.get(key) != value:
                kind = "weights" if part is weights else "input_activations"
                return f"{name}.{kind}.{key} {part.get(key)!r} instead of {value!r}"
    return None if config.get("config_groups") else "no config_groups"


def fp8_activations() -> str:
    """W8A8 or W8A16, from the environment. Raises ValueError for anything else."""
    choice = os.environ.get(ACTIVATIONS_VARIABLE, W8A8)
    if choice not in (W8A8, W8A16):
        raise ValueError(f"{ACTIVATIONS_VARIABLE}={choice}: it is {W8A8} or {W8A16}.")
    return choice


def install() -> None:
    """Give sglang's int8 and fp8 layers what they lack here; call after its modules are imported.

    Does nothing where sglang has kernels of its own for them. For sglang 0.5.23; it can go when those have a wheel.
    """
    from sglang.srt.layers.quantization import fp8, w8a8_int8
    from sglang.srt.utils import cpu_has_amx_support

    if cpu_has_amx_support():
        return
    activations = fp8_activations()

    def keep(self, layer) -> None:
        """Parameters stay the objects that the loader knows."""
        layer.requires_grad_(False)

    def int8_linear(self, layer, x, bias=None):
        return _with_bias(int8_matmul(x, layer.weight, layer.weight_scale), bias, x.dtype)

    def fp8_linear(self, layer, x, bias=None):
        columns = self.weight_block_size[1] if self.block_quant else x.shape[-1]
        scale = _row_scales(layer, self.weight_block_size if self.block_quant else None)
        return _with_bias(fp8_matmul(x, layer.weight, scale, columns=columns, activations=activations), bias, x.dtype)

    def int8_experts(self, layer, dispatch_output):
        return _experts(
            self,
            dispatch_output,
            lambda rows, expert: int8_matmul(rows, layer.w13_weight[expert], layer.w13_weight_scale[expert]),
            lambda rows, expert: int8_matmul(rows, layer.w2_weight[expert], layer.w2_weight_scale[expert]),
        )

    def fp8_experts(self, layer, dispatch_output):
        block = self.weight_block_size if self.block_quant else None

        def multiply(rows, which, expert):
            weight = getattr(layer, f"{which}_weight")[expert]
            scale = _expert_scales(layer, which, expert, block)
            return fp8_matmul(
                rows, weight, scale, columns=block[1] if block else rows.shape[-1], activations=activations
            )

        return _experts(
            self,
            dispatch_output,
            lambda rows, expert: multiply(rows, "w13", expert),
            lambda rows, expert: multiply(rows, "w2", expert),
        )

    for method, apply in (
        (w8a8_int8.W8A8Int8LinearMethod, int8_linear),
        (w8a8_int8.W8A8Int8MoEMethod, int8_experts),
        (fp8.Fp8LinearMethod, fp8_linear),
        (fp8.Fp8MoEMethod, fp8_experts),
    ):
        method.process_weights_after_loading, method.apply = keep, apply
    for config in (fp8.Fp8Config, w8a8_int8.W8A8Int8Config):
        config.get_supported_act_dtypes = classmethod(lambda cls: [torch.float32, torch.bfloat16, torch.float16])


def _with_bias(product: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    return (product if bias is None else product + bias.float()).to(dtype)


def _row_scales(layer, block: Sequence[int] | None) -> torch.Tensor:
    """[N, blocks across] for each row of a linear layer's weight."""
    if block is not None:
        return layer.weight_scale_inv.repeat_interleave(block[0], 0)[: layer.weight.shape[0]]
    widths = torch.tensor(layer.logical_widths)  # rows of q, k and v; of gate and up
    return layer.weight_scale.repeat_interleave(widths).unsqueeze(1)


def _expert_scales(layer, which: str, expert: int, block: Sequence[int] | None) -> torch.Tensor:
    """[N, blocks across] for each row of one expert's weight, "w13" (gate above up) or "w2"."""
    num_rows = getattr(layer, f"{which}_weight").shape[1]
    if block is None:
        scale = getattr(layer, f"{which}_weight_scale")[expert].reshape(-1)
        return scale.repeat_interleave(num_rows // scale.numel()).unsqueeze(1)
    return getattr(layer, f"{which}_weight_scale_inv")[expert].repeat_interleave(block[0], 0)[:num_rows]


def _experts(method, dispatch_output, gate_up, down):
    """sglang's answer of a layer of experts."""
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput
    from sglang.srt.layers.moe.topk import apply_topk_weights_cpu

    runner = method.moe_runner_config
    if runner.activation != "silu" or runner.gemm1_alpha is not None or runner.gemm1_clamp_limit is not None:
        raise NotImplementedError(
            f"eight-bit experts on a CPU: activation {runner.activation} with gemm1_alpha {runner.gemm1_alpha} and"
            f" gemm1_clamp_limit {runner.gemm1_clamp_limit}; only plain silu is computed"
        )
    weights, ids, _ = dispatch_output.topk_output
    x, weights = apply_topk_weights_cpu(runner.apply_router_weight_on_input, weights, dispatch_output.hidden_states)
    return StandardCombineInput(hidden_states=mixed_experts(x, weights, ids, gate_up, down))
