"""What the plan knows, but a real run cannot do yet: in one place, so that nothing is accepted and then left out."""

from __future__ import annotations

from slime_like.config.families import FAMILIES, family_of
from slime_like.config.loss import LossConfig
from slime_like.config.model import ModelConfig
from slime_like.config.optimizer import OptimizerConfig

_PLAN_ONLY = "a real run cannot do it yet, only --plan"


def model_not_yet(model: ModelConfig) -> list[str]:
    """Architectures that the trainer does not build."""
    causes = {
        f"an architecture of no known family ({', '.join(FAMILIES)}): norms, biases, rope, attention or router flags"
        " that do not belong together": (family_of(model) is None),
        # A pack is one sequence to Megatron's router, so this would be the loss of aux_loss under another name.
        "--moe-router-load-balancing-type seq_aux_loss": (
            model.moe_router_load_balancing_type == "seq_aux_loss" and model.moe_aux_loss_coeff != 0
        ),
    }
    return [f"{what}: {_PLAN_ONLY}." for what, applies in causes.items() if applies]


def engine_not_yet(model: ModelConfig) -> list[str]:
    """Architectures that engines do not build as the trainer does."""
    # SGLang (0.5.23) gives these an output layer of their own, which nothing would ever fill (models/qwen3_moe.py,
    # glm4_moe.py).
    family = family_of(model)
    if family and not FAMILIES[family].is_tied_by_engines and not model.untie_embeddings_and_output_weights:
        return [
            (
                "tied embeddings in a mixture of experts of this family: SGLang does not tie them. Fix: a"
                " checkpoint with an output layer of its own."
            )
        ]
    return []


def training_not_yet(loss: LossConfig, optimizer: OptimizerConfig) -> list[str]:
    """Losses and optimizers that the trainer does not have."""
    causes = {
        "--optimizer-cpu-offload": optimizer.optimizer_cpu_offload,
        "--use-precision-aware-optimizer": optimizer.use_precision_aware_optimizer,
    }
    return [f"{what}: {_PLAN_ONLY}." for what, applies in causes.items() if applies]
