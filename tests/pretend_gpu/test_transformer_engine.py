"""Megatron's layers for transformer-engine, which is pretended.

Covers slime_like.megatron_backend.compat.transformer_engine where there is one.
"""

from __future__ import annotations

import pytest

from tests.helpers.tiny_models import CONFIGS, make_tiny_model
from tests.helpers.train_world import run_ranks
from tests.pretend_gpu.training import shared_steps, train_steps

#: All experts of a rank are one layer.
GROUPED = {"model": {"moe_grouped_gemm": True}}
#: In every run; the others with scripts/test_long.sh.
QUICK = ("qwen3", "qwen3_moe")
MARKED = [name if name in QUICK else pytest.param(name, marks=pytest.mark.long_run) for name in sorted(CONFIGS)]


@pytest.mark.parametrize("family", MARKED)
def test_a_family_trains_with_its_layers_as_with_ours(pretend_te, tmp_path, family):
    folder = make_tiny_model(str(tmp_path / family), family, num_layers=2)
    (theirs,) = pretend_te(train_steps, 1, folder, 2, GROUPED)
    (host,) = run_ranks(train_steps, 1, folder, 2, {})
    for ours, others in zip(theirs["metrics"], host["metrics"], strict=True):
        assert ours == pytest.approx(others, rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("family", ["qwen3", pytest.param("deepseek_v3", marks=pytest.mark.long_run)])
def test_prompts_are_shared_between_its_layers_by_our_attention(pretend_te, tmp_path, family):
    folder = make_tiny_model(str(tmp_path / family), family, num_layers=2)
    (shared,) = pretend_te(shared_steps, 1, folder, 2, "on")
    (left,) = pretend_te(shared_steps, 1, folder, 2, "auto")
    (host,) = run_ranks(shared_steps, 1, folder, 2, "off")
    for on, auto, alone in zip(shared["metrics"], left["metrics"], host["metrics"], strict=True):
        assert on["perf/computed_tokens"] < auto["perf/computed_tokens"] == alone["perf/computed_tokens"]
        for ours in (on, auto):
            same = {name: value for name, value in ours.items() if not name.startswith("perf/")}
            assert same == pytest.approx({name: alone[name] for name in same}, rel=1e-5, abs=1e-7)
