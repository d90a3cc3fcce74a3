"""What only the plan knows is refused by a real run, with its name."""

from __future__ import annotations

import dataclasses

from slime_like.config.loss import LossConfig
from slime_like.config.model import ModelConfig
from slime_like.config.not_yet import engine_not_yet, model_not_yet, training_not_yet
from slime_like.config.optimizer import OptimizerConfig

DENSE = ModelConfig(num_layers=2, hidden_size=8, num_attention_heads=2, vocab_size=11)
EXPERTS = dataclasses.replace(DENSE, num_experts=4, moe_ffn_hidden_size=8, qk_layernorm=True)


def test_known_families_train():
    assert model_not_yet(DENSE) == model_not_yet(EXPERTS) == []


def test_an_architecture_of_no_family():
    (problem,) = model_not_yet(dataclasses.replace(DENSE, qk_layernorm=True, add_qkv_bias=True))
    assert problem.startswith("an architecture of no known family (llama, ") and problem.endswith(
        "a real run cannot do it yet, only --plan."
    )


def test_a_balancing_loss_of_sequences_counts_only_with_a_weight():
    balanced = dataclasses.replace(EXPERTS, moe_router_load_balancing_type="seq_aux_loss")
    assert model_not_yet(balanced) == []
    (problem,) = model_not_yet(dataclasses.replace(balanced, moe_aux_loss_coeff=0.01))
    assert problem.startswith("--moe-router-load-balancing-type seq_aux_loss: ")


def test_engines_do_not_tie_experts_embeddings():
    assert (
        engine_not_yet(dataclasses.replace(EXPERTS, untie_embeddings_and_output_weights=True))
        == engine_not_yet(DENSE)
        == []
    )
    (problem,) = engine_not_yet(dataclasses.replace(EXPERTS, untie_embeddings_and_output_weights=False))
    assert "SGLang does not tie them" in problem


def test_optimizers_that_only_the_plan_knows():
    assert training_not_yet(LossConfig(), OptimizerConfig()) == []
    problems = training_not_yet(
        LossConfig(), OptimizerConfig(optimizer_cpu_offload=True, use_precision_aware_optimizer=True)
    )
    assert [problem.split(":")[0] for problem in problems] == [
        "--optimizer-cpu-offload",
        "--use-precision-aware-optimizer",
    ]
