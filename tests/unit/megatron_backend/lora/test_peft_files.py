"""adapter_config.json: what PEFT reads of ours, and what of PEFT's is refused; how adapters start."""

from __future__ import annotations

import dataclasses
import json

import peft
import pytest
import torch

from slime_like.config.lora import LoraConfig
from slime_like.config.lora_targets import target_modules
from slime_like.config.model import ModelConfig
from slime_like.errors import CheckpointError
from slime_like.megatron_backend.lora.build import start_adapters
from slime_like.megatron_backend.lora.peft_files import check_config, names_of_targets, write_folder
from tests.unit.megatron_backend.lora.toy import adapter_on, group_of_one, stage_with

MODEL = ModelConfig(num_layers=2, hidden_size=8, num_attention_heads=2, vocab_size=11)
LORA = LoraConfig(lora_rank=4, lora_alpha=8, lora_use_rslora=True, lora_target_modules=["q_proj", "up_proj"])


def test_peft_reads_our_configuration(tmp_path):
    write_folder({"x": torch.zeros(1)}, str(tmp_path), lora=LORA, model=MODEL, base="/base")
    theirs = peft.LoraConfig.from_pretrained(str(tmp_path))
    assert (theirs.r, theirs.lora_alpha, theirs.use_rslora) == (4, 8, True)
    assert theirs.target_modules == {"q_proj", "up_proj"} and theirs.base_model_name_or_path == "/base"
    check_config(str(tmp_path), LORA)


def test_whole_names_where_no_ends_do():
    assert names_of_targets(LoraConfig(lora_rank=4), MODEL) == sorted({m.split(".")[-1] for m in target_modules(MODEL)})
    one_layer = dataclasses.replace(LORA, lora_target_modules=["1.self_attn.q_proj"])
    assert names_of_targets(one_layer, MODEL) == ["model.layers.1.self_attn.q_proj"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"r": 8},
            "scale 2.82843, the flags of 4 and 4. Fix: --lora-rank 8 --lora-alpha 8 --lora-use-rslora.",
        ),
        ({"use_rslora": False}, "scale 2, the flags of 4 and 4. Fix: --lora-rank 4 --lora-alpha 8."),
        ({"use_dora": True}, "use_dora True are not supported"),
        (
            {"modules_to_save": ["lm_head"]},
            "whole copies of lm_head (modules_to_save) that were trained beside its adapters",
        ),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"bias": "all"}, "bias 'all'"),
        ({"peft_type": "IA3"}, "IA3"),
        ({"r": None}, "no configuration of LoRA adapters"),
    ],
)
def test_what_we_do_not_compute_is_refused(tmp_path, change, message):
    write_folder({"x": torch.zeros(1)}, str(tmp_path), lora=LORA, model=MODEL, base=None)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CheckpointError) as error:
        check_config(str(tmp_path), LORA)
    assert message in str(error.value)


@pytest.mark.parametrize("init", ["true", "gaussian", "orthogonal", "false"])
def test_adapters_start_as_pefts(init):
    """Spread of A and B over many numbers, against PEFT's own layer."""
    sizes = {"num_inputs": 300, "lora_rank": 64, "lora_init": init}
    with group_of_one() as group:
        adapter, switch = adapter_on(group, (200,), {0: "o_proj"}, **sizes)
        stage = stage_with(adapter, 300, 200)
        start_adapters(stage, switch.config, seed=3)
    ours = [matrix.detach() for matrix in adapter.parts[0].parameters()]
    torch.manual_seed(0)
    given = {"true": True, "false": False}.get(init, init)
    config = peft.LoraConfig(r=64, init_lora_weights=given, target_modules=["0"])
    theirs = peft.get_peft_model(torch.nn.Sequential(torch.nn.Linear(300, 200)), config).base_model.model[0]
    for mine, layer in zip(ours, (theirs.lora_A, theirs.lora_B), strict=True):
        matrix = layer.default.weight.detach()
        assert mine.shape == matrix.shape
        assert float(mine.std()) == pytest.approx(float(matrix.std()), rel=0.05)
        assert float(mine.abs().max()) == pytest.approx(float(matrix.abs().max()), rel=0.25)


@pytest.mark.parametrize(
    ("flags", "spreads"),
    [
        ({"lora_a_init": "gaussian"}, (1 / 64, 0)),
        ({"lora_b_init": "gaussian"}, (1 / (3 * 300) ** 0.5, 1 / 64)),
        ({"lora_a_init": "zeros", "lora_b_init": "uniform"}, (0, 1 / (3 * 64) ** 0.5)),
        ({"lora_init": "false", "lora_b_init": "zeros"}, (1 / (3 * 300) ** 0.5, 0)),
    ],
)
def test_each_matrix_may_start_in_its_own_way(flags, spreads):
    """Deviations: 1/rank of gaussian, 1/sqrt(3 inputs) of torch's uniform numbers."""
    with group_of_one() as group:
        adapter, switch = adapter_on(group, (200,), {0: "o_proj"}, num_inputs=300, lora_rank=64, **flags)
        start_adapters(stage_with(adapter, 300, 200), switch.config, seed=3)
    for matrix, spread in zip(adapter.parts[0].parameters(), spreads, strict=True):
        assert float(matrix.detach().std()) == pytest.approx(spread, rel=0.05, abs=0)
