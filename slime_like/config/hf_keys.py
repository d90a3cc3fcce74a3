"""Which value a key of an HF config.json may have: its type and range, checked before anything is computed from it."""

from __future__ import annotations

import dataclasses
from typing import Any

from slime_like.config.base import shortened
from slime_like.config.bounds import Bounds


@dataclasses.dataclass(frozen=True)
class KeyKind:
    """What a value must be. kinds: of the values that JSON gives; null counts as an absent key where may_be_null."""

    words: str
    kinds: tuple[type, ...]
    bounds: Bounds = Bounds()
    may_be_null: bool = True

    def problem(self, value: Any) -> str:
        """What the value must be and is not; "" if it fits."""
        if value is None:
            return "" if self.may_be_null else f"must be {self.words}"
        if isinstance(value, bool) and bool not in self.kinds or not isinstance(value, self.kinds):
            return f"must be {self.words}"
        return self.bounds.problem(value) if isinstance(value, (int, float)) else ""


def _whole(least: int = 1, most: int | None = None, *, may_be_null: bool = True) -> KeyKind:
    return KeyKind("a whole number", (int,), Bounds(least=least, most=most), may_be_null)


def _number(may_be_null: bool = True, **limits: float) -> KeyKind:
    return KeyKind("a number", (int, float), Bounds(**limits), may_be_null)


_TRUTH = KeyKind("true or false", (bool,))
_TEXT = KeyKind("a text", (str,))
_TABLE = KeyKind("an object", (dict,))
_LIST = KeyKind("a list", (list,))

#: Keys that the architecture, its rope, its experts, or the choice of an engine follow from.
KEYS: dict[str, KeyKind] = {
    "model_type": _TEXT,
    "architectures": _LIST,
    **{name: _whole(most=10_000, may_be_null=False) for name in ("num_hidden_layers", "num_attention_heads")},
    **{name: _whole(may_be_null=False) for name in ("hidden_size", "intermediate_size", "vocab_size")},
    "rms_norm_eps": _number(may_be_null=False, above=0, below=1),
    **{name: _whole() for name in ("num_key_value_heads", "head_dim", "max_position_embeddings")},
    **{
        name: _whole() for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "q_lora_rank", "kv_lora_rank")
    },
    **{name: _whole() for name in ("moe_intermediate_size", "num_experts_per_tok", "n_group", "topk_group")},
    **{name: _whole(least=0, most=100_000) for name in ("num_experts", "num_local_experts", "n_routed_experts")},
    **{name: _whole(least=0) for name in ("n_shared_experts", "first_k_dense_replace", "num_nextn_predict_layers")},
    "decoder_sparse_step": _whole(),
    "mlp_only_layers": _LIST,
    "routed_scaling_factor": _number(above=0),
    "scoring_func": _TEXT,
    **dict.fromkeys(("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window"), _TRUTH),
    **dict.fromkeys(("use_qk_norm", "norm_topk_prob", "rope_interleave"), _TRUTH),
    "hidden_act": _TEXT,
    "rope_theta": _number(above=0),
    "partial_rotary_factor": _number(above=0, most=1),
    "rope_parameters": _TABLE,
    "rope_scaling": _TABLE,
}
#: Of rope_parameters and rope_scaling.
ROPE_KEYS: dict[str, KeyKind] = {
    "rope_type": _TEXT,
    "type": _TEXT,
    "rope_theta": _number(above=0),
    "partial_rotary_factor": _number(above=0, most=1),
    **{name: _number(may_be_null=False, above=0) for name in ("factor", "beta_fast", "beta_slow")},
    **{name: _number(above=0) for name in ("low_freq_factor", "high_freq_factor", "attention_factor")},
    **{name: _number(may_be_null=False, least=0) for name in ("mscale", "mscale_all_dim")},
    "original_max_position_embeddings": _whole(may_be_null=False),
    "truncate": _TRUTH,
}


def key_problems(hf: dict) -> list[str]:
    """Every key whose value is of a wrong type or out of range: the key, the value, and what is expected."""
    problems = [
        f"{key} is {shortened(hf[key])}: {problem}."
        for key, kind in KEYS.items()
        if key in hf and (problem := kind.problem(hf[key]))
    ]
    for table in ("rope_parameters", "rope_scaling"):
        rope = hf.get(table)
        problems += [
            f"{table}.{key} is {shortened(rope[key])}: {problem}."
            for key, kind in ROPE_KEYS.items()
            if isinstance(rope, dict) and key in rope and (problem := kind.problem(rope[key]))
        ]
    return problems
