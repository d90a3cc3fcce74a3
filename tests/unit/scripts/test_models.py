"""The architectures of scripts/models parse, hold together, and have the published number of parameters."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from slime_like.config.base import add_flags, from_namespace, make_parser, parse
from slime_like.config.model import ModelConfig
from slime_like.config.parallel import ParallelConfig
from slime_like.planning.memory.parameters import model_parameters

#: Parameters as the model cards and checkpoints state them, tied embeddings counted once.
PUBLISHED = {
    "tiny-qwen3": 828_800,
    "tiny-qwen3-blocks": 1_025_664,
    "tiny-qwen3-moe": 1_856_896,
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
    "smollm2-135M": 134_515_008,
    "llama3.2-1B": 1_235_814_400,
    "llama3.2-3B": 3_212_749_824,
    "llama3.1-8B": 8_030_261_248,
    "qwen3-30B-A3B": 30_532_122_624,
    "qwen3-235B-A22B": 235_093_634_560,
    "glm4-9B": 9_400_279_040,
    "glm4-32B": 32_566_080_512,
    "glm4.5-106B-A12B": 106e9,
    "glm4.5-355B-A32B": 355e9,
    "deepseek-v3": 671e9,  # the card's 685B contain 14B of a layer that predicts one token further
    "moonlight-16B-A3B": 15.96e9,  # 15.29B (arXiv:2502.16982, table 3) without the two embeddings of 163840 x 2048
    "kimi-k2": 1.026e12,
    "mimo-7B": 7.62e9,  # the card's 7.83B contain 0.21B of a layer that predicts one token further
}

#: Parameters that one token meets, as the model cards state them, and how many of the two embeddings they count.
ACTIVE = {
    "qwen3-30B-A3B": (3.3e9, 2),
    "qwen3-235B-A22B": (22e9, 2),
    "glm4.5-106B-A12B": (12e9, 0),
    "glm4.5-355B-A32B": (32e9, 0),
    "deepseek-v3": (37e9, 1),
    "moonlight-16B-A3B": (2.24e9, 0),
    "kimi-k2": (32.6e9, 2),
}


def model_flags(root: Path, name: str) -> list[str]:
    """MODEL_ARGS as bash sees them after sourcing the file."""
    command = [
        "bash",
        "-euo",
        "pipefail",
        "-c",
        'source "$1"; printf "%s\\n" "${MODEL_ARGS[@]}"',
        "bash",
        str(root / "scripts" / "models" / f"{name}.sh"),
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True, env={}).stdout.splitlines()


def model_config(flags: list[str]) -> ModelConfig:
    parser = make_parser("model flags only")
    add_flags(parser, ModelConfig)
    return from_namespace(ModelConfig, parse(parser, flags))


def active_parameters(model: ModelConfig, *, embeddings: int) -> int:
    """Weights that one token is multiplied with: of the experts, only those that it is sent to.

    Of two embeddings, `embeddings`.
    """
    assert model.num_experts and model.moe_ffn_hidden_size and model.vocab_size and model.hidden_size
    idle = model.num_experts - model.moe_router_topk
    expert = 3 * model.hidden_size * model.moe_ffn_hidden_size
    return (
        model_parameters(model)
        - sum(model.expert_layers) * idle * expert
        - (2 - embeddings) * model.vocab_size * model.hidden_size
    )


def test_every_file_has_a_published_size(repo_root: Path):
    assert {path.stem for path in (repo_root / "scripts" / "models").glob("*.sh")} == PUBLISHED.keys()


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_parameters_are_the_published_ones(repo_root: Path, name: str):
    # Whole counts are of the checkpoint's tensors and must be met; rounded ones to the 1% that they are rounded to.
    tolerance = 1e-6 if isinstance(PUBLISHED[name], int) else 0.01
    assert model_parameters(model_config(model_flags(repo_root, name))) == pytest.approx(PUBLISHED[name], rel=tolerance)


@pytest.mark.parametrize("name", sorted(ACTIVE))
def test_active_parameters_are_the_published_ones(repo_root: Path, name: str):
    published, embeddings = ACTIVE[name]
    assert active_parameters(model_config(model_flags(repo_root, name)), embeddings=embeddings) == pytest.approx(
        published, rel=0.02
    )


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_the_architecture_is_possible(repo_root: Path, name: str):
    model = model_config(model_flags(repo_root, name))
    assert model.problems() == []
    last = model.num_layers // 2
    split = ParallelConfig(
        tensor_model_parallel_size=3 if model.num_attention_heads % 2 else 2,  # SmolLM2 has nine heads
        sequence_parallel=True,
        pipeline_model_parallel_size=2,
        decoder_last_pipeline_num_layers=last,
    )
    assert split.problems(model) == []


def test_a_missing_flag_changes_the_count_by_more_than_the_tolerance(repo_root: Path):
    flags = model_flags(repo_root, "qwen3-8B")
    flags.remove("--untie-embeddings-and-output-weights")
    assert model_parameters(model_config(flags)) != pytest.approx(PUBLISHED["qwen3-8B"], rel=0.01)


def test_a_small_model_counted_by_hand():
    # 2 layers of hidden 4, one head of 4, MLP 8, vocabulary 10, tied: 2 x (16*4 + 3*32 + 8) + 4 + 40
    flags = {"num_layers": 2, "hidden_size": 4, "ffn_hidden_size": 8, "num_attention_heads": 1, "vocab_size": 10}
    model = ModelConfig(**flags, swiglu=True, disable_bias_linear=True, normalization="RMSNorm")
    assert model_parameters(model) == 380
