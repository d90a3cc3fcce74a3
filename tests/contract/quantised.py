"""Eight-bit models: what is sent to an engine, and what it must answer, by transformers with our own products."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from slime_like.config.quantisation import QuantScheme, engine_flags
from slime_like.sglang_backend.client import EngineClient
from slime_like.sglang_backend.cpu_quant import ACTIVATIONS_VARIABLE, W8A8, fp8_matmul, int8_matmul, mixed_experts
from slime_like.sglang_backend.launcher import EngineSpec, launch_engine
from slime_like.weight_sync.quantise import quantise, undo
from tests.contract.engines import FLAGS, VOCAB, Served

#: 128 rows of each projection on each of two ranks: what block fp8 needs.
_SIZES = {
    "vocab_size": VOCAB, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 1024, "tie_word_embeddings": False,
    "initializer_range": 0.1, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
#: What each tensor parallel rank has some columns of, and quantises its tokens' part of by itself.
_ROW_PARALLEL = ("o_proj", "down_proj")


def make_network(seed: int, *, experts: bool):
    """A Qwen3 with fp32 weights from a seed, dense or with four experts."""
    torch.manual_seed(seed)
    if experts:
        config = Qwen3MoeConfig(
            **_SIZES, intermediate_size=256, moe_intermediate_size=256, num_experts=4, num_experts_per_tok=2,
            norm_topk_prob=True, decoder_sparse_step=1,
        )  # fmt: skip
        return Qwen3MoeForCausalLM(config).float().eval()
    return Qwen3ForCausalLM(Qwen3Config(**_SIZES, intermediate_size=256)).float().eval()


def by_hf_names(network) -> dict[str, torch.Tensor]:
    """Tensors as they lie in HF folders: each expert's own."""
    tensors = {}
    for name, tensor in network.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            for expert, (gate, up) in enumerate(matrix.chunk(2) for matrix in tensor):
                tensors[name.replace("gate_up_proj", f"{expert}.gate_proj.weight")] = gate
                tensors[name.replace("gate_up_proj", f"{expert}.up_proj.weight")] = up
        elif name.endswith("experts.down_proj"):
            for expert, matrix in enumerate(tensor):
                tensors[name.replace("down_proj", f"{expert}.down_proj.weight")] = matrix
        else:
            tensors[name] = tensor
    return tensors


@dataclasses.dataclass(frozen=True)
class Sent:
    """What an engine is sent of a network."""

    tensors: dict[str, torch.Tensor]

    @staticmethod
    def of(network, scheme: QuantScheme) -> Sent:
        """Eight bits and scales, by the function of the weight stream."""
        return Sent(
            dict(pair for name, tensor in by_hf_names(network).items() for pair in quantise(name, tensor, scheme))
        )

    def state_dict(self) -> dict[str, torch.Tensor]:
        """As engines.sync asks for it."""
        return self.tensors


class EightBitLinear(torch.nn.Module):
    """A projection by cpu_quant's products, cut as `tp_size` ranks have it."""

    def __init__(self, sent: Sent, name: str, scheme: QuantScheme, tp_size: int):
        super().__init__()
        self.weight, self.scale = sent.tensors[name], sent.tensors[name + scheme.scale_suffix]
        self.scheme = scheme
        self.parts = tp_size if name.split(".")[-2] in _ROW_PARALLEL else 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """fp32 [..., N]"""
        width = self.weight.shape[1] // self.parts
        cuts = [slice(part * width, (part + 1) * width) for part in range(self.parts)]
        if self.scheme.weight_dtype == "int8":
            return sum(int8_matmul(x[..., cut], self.weight[:, cut], self.scale) for cut in cuts)
        columns = self.scheme.columns or width
        scale = self.scale.reshape(-1, self.scale.shape[-1] if self.scheme.columns else 1)
        by_row = scale.repeat_interleave(self.scheme.rows or self.weight.shape[0], 0)[: self.weight.shape[0]]
        across = width // columns
        return sum(
            fp8_matmul(
                x[..., cut],
                self.weight[:, cut],
                by_row[:, part * across : (part + 1) * across] if self.scheme.columns else by_row,
                columns=columns,
                activations=W8A8,
            )
            for part, cut in enumerate(cuts)
        )


class EightBitExperts(torch.nn.Module):
    """The experts of a layer by the same products."""

    def __init__(self, sent: Sent, prefix: str, scheme: QuantScheme, tp_size: int, num_experts: int):
        super().__init__()
        self.linears = [
            {
                part: EightBitLinear(sent, f"{prefix}.{expert}.{part}_proj.weight", scheme, tp_size)
                for part in ("gate", "up", "down")
            }
            for expert in range(num_experts)
        ]

    def forward(self, hidden_states, top_k_index, top_k_weights):
        """As transformers' Qwen3MoeExperts."""
        return mixed_experts(
            hidden_states,
            top_k_weights,
            top_k_index,
            lambda rows, expert: torch.cat([self.linears[expert][part](rows) for part in ("gate", "up")], -1),
            lambda rows, expert: self.linears[expert]["down"](rows),
        )


def with_own_products(seed: int, sent: Sent, scheme: QuantScheme, *, experts: bool, tp_size: int):
    """The network of a seed, its projections multiplied as an engine without CUDA does."""
    network = make_network(seed, experts=experts)
    for name, module in list(network.named_modules()):
        parent = network.get_submodule(name.rpartition(".")[0])
        child = name.rpartition(".")[2]
        if name + ".weight" + scheme.scale_suffix in sent.tensors:
            setattr(parent, child, EightBitLinear(sent, name + ".weight", scheme, tp_size))
        elif child == "experts":
            setattr(parent, child, EightBitExperts(sent, name, scheme, tp_size, module.num_experts))
    return network


def dequantised(seed: int, sent: Sent, scheme: QuantScheme, *, experts: bool):
    """The network of a seed with fp32 weights that are exactly what was sent; plain transformers."""
    network, plain = make_network(seed, experts=experts), undo(sent.tensors, scheme)
    with torch.no_grad():
        for name, tensor in by_hf_names(network).items():  # views of its parameters
            tensor.copy_(plain[name])
    return network


@contextmanager
def served(
    folder: Path, flags: dict, *, tp_size: int = 1, activations: str = W8A8, dtype: str = "float32"
) -> Iterator[Served]:
    """An engine of an HF folder. dtype: of what is not in eight bits."""
    spec = EngineSpec(
        index=0,
        model_path=str(folder),
        tp_size=tp_size,
        dtype=dtype,
        log_path=str(folder / "engine.log"),
        context_length=1024,
        extra_flags=FLAGS | flags,
        environment={ACTIVATIONS_VARIABLE: activations},
    )
    engine = launch_engine(spec, timeout_s=150)
    try:
        yield Served(engine, EngineClient(engine.endpoint, timeout_s=30), torch.zeros(0))
    finally:
        engine.close()


@contextmanager
def quantised_engine(
    network, scheme: QuantScheme, folder: Path, *, tp_size: int = 1, activations: str = W8A8
) -> Iterator[Served]:
    """An engine that starts with random weights in eight bits, of a folder that has nothing but a config."""
    flags = engine_flags(scheme, {})
    with served(config_only(network, folder), flags, tp_size=tp_size, activations=activations) as one:
        yield one


def config_only(network, folder: Path) -> Path:
    """An HF folder that has nothing but a config."""
    network.config.architectures = [type(network).__name__]
    network.config.save_pretrained(folder)
    return folder
