"""A Qwen3 of about any size with weights from a seed, for measuring weight syncs.

And a real SGLang engine that serves it.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from slime_like.sglang_backend.launcher import Engine, EngineSpec, launch_engine

#: Up to this many bytes: hidden size, channels of a head, vocabulary. Wider as a model grows, as real families are.
_WIDTHS = (
    (4e6, 64, 16, 1024),
    (2e7, 128, 32, 4096),
    (1e8, 256, 64, 4096),
    (5e8, 512, 64, 4096),
    (math.inf, 1024, 64, 4096),
)
_BYTES_PER_WEIGHT = 4  # fp32
SMALLEST_BYTES = 1_000_000
#: Tokens of an engine's cache: a sync needs none, and it would be larger than the weights otherwise.
_CACHE_TOKENS = 2048


@dataclass(frozen=True)
class Shape:
    """The sizes of a dense Qwen3 with separate embedding and output layer."""

    hidden: int
    head_size: int
    vocabulary: int
    layers: int

    @staticmethod
    def of_bytes(size: float) -> Shape:
        """The one whose fp32 weights come closest to `size` bytes. Raises ValueError below SMALLEST_BYTES."""
        if size < SMALLEST_BYTES:
            raise ValueError(f"{size:.0f} bytes: the smallest model has {SMALLEST_BYTES}")
        hidden, head_size, vocabulary = next(widths[1:] for widths in _WIDTHS if size <= widths[0])
        one = Shape(hidden, head_size, vocabulary, 1)
        per_layer = one.num_bytes - Shape(hidden, head_size, vocabulary, 0).num_bytes
        return Shape(hidden, head_size, vocabulary, max(1, round((size - one.num_bytes) / per_layer) + 1))

    @property
    def heads(self) -> int:
        """Attention heads."""
        return self.hidden // self.head_size

    @property
    def kv_heads(self) -> int:
        """Key and value heads: half as many."""
        return self.heads // 2

    @property
    def num_bytes(self) -> int:
        """Of all weights in fp32."""
        return _BYTES_PER_WEIGHT * sum(math.prod(shape) for shape in self.tensors().values())

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """HF name -> shape, in the order of the model."""
        hidden, head, wide = self.hidden, self.head_size, 3 * self.hidden
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocabulary, hidden)}
        for number in range(self.layers):
            layer = f"model.layers.{number}."
            shapes |= {
                f"{layer}input_layernorm.weight": (hidden,),
                f"{layer}self_attn.q_proj.weight": (self.heads * head, hidden),
                f"{layer}self_attn.k_proj.weight": (self.kv_heads * head, hidden),
                f"{layer}self_attn.v_proj.weight": (self.kv_heads * head, hidden),
                f"{layer}self_attn.q_norm.weight": (head,),
                f"{layer}self_attn.k_norm.weight": (head,),
                f"{layer}self_attn.o_proj.weight": (hidden, self.heads * head),
                f"{layer}post_attention_layernorm.weight": (hidden,),
                f"{layer}mlp.gate_proj.weight": (wide, hidden),
                f"{layer}mlp.up_proj.weight": (wide, hidden),
                f"{layer}mlp.down_proj.weight": (hidden, wide),
            }
        return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (self.vocabulary, hidden)}

    def config(self) -> dict:
        """config.json."""
        return {
            "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu",
            "torch_dtype": "float32", "tie_word_embeddings": False,
            "hidden_size": self.hidden, "intermediate_size": 3 * self.hidden, "num_hidden_layers": self.layers,
            "vocab_size": self.vocabulary,
            "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads, "head_dim": self.head_size,
            "attention_bias": False,
            "max_position_embeddings": 1024, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "bos_token_id": 1,
            "eos_token_id": 2, "use_cache": True,
        }  # fmt: skip


def make_weights(shape: Shape, seed: int) -> dict[str, torch.Tensor]:
    """HF name -> fp32 tensor: matrices normal with deviation 0.02, norms near 1."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.empty(size).normal_(1.0 if len(size) == 1 else 0.0, 0.02, generator=generator)
        for name, size in shape.tensors().items()
    }


def write_model(folder: Path, shape: Shape, weights: dict[str, torch.Tensor]) -> None:
    """An HF folder without a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape.config(), indent=1), encoding="utf-8")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@contextlib.contextmanager
def serving(
    folder: Path, *, tp: int, log_path: Path, timeout_s: float, flags: Mapping[str, object] | None = None
) -> Iterator[Engine]:
    """A real SGLang server of that folder on loopback; it is ended afterwards, or with this process. flags: more of
    SGLang's.
    """
    # No tokenizer: prompts are token ids.
    own_flags = {"skip_tokenizer_init": True, "max_total_tokens": _CACHE_TOKENS}
    spec = EngineSpec(
        index=0,
        model_path=str(folder),
        tp_size=tp,
        dtype="float32",
        log_path=str(log_path),
        context_length=1024,
        extra_flags=own_flags | dict(flags or {}),
    )
    engine = launch_engine(spec, timeout_s)
    try:
        yield engine
    finally:
        engine.close()
