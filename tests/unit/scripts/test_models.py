"""The architectures of scripts/models parse, hold together, and have the published number of parameters."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from slime_like.config.base import add_flags, from_namespace, make_parser, parse
from slime_like.config.model import ModelConfig, ParallelConfig

#: Parameters as the model cards and checkpoints state them, tied embeddings counted once.
PUBLISHED = {
    "tiny-qwen3": 828_800,
    "qwen2.5-0.5B": 494_032_768,
    "qwen2.5-1.5B": 1_543_714_304,
    "qwen2.5-3B": 3_085_938_688,
    "qwen2.5-7B": 7_615_616_512,
    "qwen2.5-14B": 14_770_033_664,
    "qwen2.5-32B": 32_763_876_352,
    "qwen3-0.6B": 596_049_920,
    "qwen3-1.7B": 1_720_574_976,
    "qwen3-4B": 4_022_468_096,
    "qwen3-8B": 8_190_735_360,
    "qwen3-14B": 14_768_307_200,
    "qwen3-32B": 32_762_123_264,
    "llama3.2-1B": 1_235_814_400,
    "llama3.2-3B": 3_212_749_824,
    "llama3.1-8B": 8_030_261_248,
}


def model_flags(root: Path, name: str) -> list[str]:
    """MODEL_ARGS as bash sees them after sourcing the file."""
    command = ["bash", "-euo", "pipefail", "-c", 'source "$1"; printf "%s\\n" "${MODEL_ARGS[@]}"', "bash", str(root / "scripts" / "models" / f"{name}.sh")]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True, env={}).stdout.splitlines()


def model_config(flags: list[str]) -> ModelConfig:
    parser = make_parser("model flags only")
    add_flags(parser, ModelConfig)
    return from_namespace(ModelConfig, parse(parser, flags))


def num_parameters(model: ModelConfig) -> int:
    """Weights of a Llama-like model, from its shapes alone."""
    assert model.num_layers and model.hidden_size and model.num_attention_heads and model.vocab_size
    hidden, head, queries, keys = model.hidden_size, model.head_size, model.num_attention_heads, model.num_kv_heads
    attention = hidden * head * (queries + 2 * keys) + queries * head * hidden
    if model.add_qkv_bias:
        attention += head * (queries + 2 * keys)
    if model.qk_layernorm:
        attention += 2 * head
    layer = attention + 3 * hidden * model.mlp_size + 2 * hidden
    embeddings = model.vocab_size * hidden * (2 if model.untie_embeddings_and_output_weights else 1)
    return model.num_layers * layer + hidden + embeddings


def test_every_file_has_a_published_size(repo_root: Path):
    assert {path.stem for path in (repo_root / "scripts" / "models").glob("*.sh")} == PUBLISHED.keys()


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_parameters_are_the_published_ones(repo_root: Path, name: str):
    assert num_parameters(model_config(model_flags(repo_root, name))) == pytest.approx(PUBLISHED[name], rel=0.01)


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_the_architecture_is_possible(repo_root: Path, name: str):
    model = model_config(model_flags(repo_root, name))
    assert model.problems() == []
    assert ParallelConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=2).problems(model) == []


def test_a_missing_flag_changes_the_count_by_more_than_the_tolerance(repo_root: Path):
    flags = model_flags(repo_root, "qwen3-8B")
    flags.remove("--untie-embeddings-and-output-weights")
    assert num_parameters(model_config(flags)) != pytest.approx(PUBLISHED["qwen3-8B"], rel=0.01)


def test_a_small_model_counted_by_hand():
    # 2 layers of hidden 4, one head of 4, MLP 8, vocabulary 10, tied: 2 x (16*4 + 3*32 + 8) + 4 + 40
    model = ModelConfig(num_layers=2, hidden_size=4, ffn_hidden_size=8, num_attention_heads=1, vocab_size=10)
    assert num_parameters(model) == 380
