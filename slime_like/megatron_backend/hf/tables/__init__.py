"""Names and layouts of each model family: one table a family, used for loading and for exporting."""

from __future__ import annotations

import importlib

from slime_like.config.families import FAMILIES, family_of
from slime_like.config.model import ModelConfig
from slime_like.errors import CheckpointError
from slime_like.megatron_backend.hf.tables.row import WeightRow

#: A module beside this one for each family.
TABLES: dict[str, tuple[WeightRow, ...]] = {
    name: importlib.import_module(f"{__name__}.{name}").TABLE for name in FAMILIES
}


def table_for(model: ModelConfig) -> tuple[WeightRow, ...]:
    """The table of the model's family, without what this member of the family does not have.

    Raises CheckpointError if it is of none.
    """
    family = family_of(model)
    if family is None:
        raise CheckpointError(f"the model's flags describe no known family: {', '.join(TABLES)}.")
    missing = _missing_parts(model)
    return tuple(row for row in TABLES[family] if not any(part in row.megatron for part in missing))


def _missing_parts(model: ModelConfig) -> list[str]:
    """Parts of Megatron's names that only models with some flag have, and this one has not."""
    queries = model.multi_latent_attention and model.q_lora_rank is not None
    here = {
        ".linear_qkv.bias": model.add_qkv_bias,
        ".self_attention.q_layernorm": queries if model.multi_latent_attention else model.qk_layernorm,
        ".self_attention.k_layernorm": model.qk_layernorm,
        ".linear_q_proj.": not queries,
        ".linear_q_down_proj.": queries,
        ".linear_q_up_proj.": queries,
        ".shared_experts.": model.moe_shared_expert_intermediate_size,
    }
    return [part for part, is_here in here.items() if not is_here]
