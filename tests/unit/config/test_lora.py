"""Flags of adapters: which modules they name, as PEFT matches names; what is refused."""

# Covers slime_like.config.adapter_rules too.

import dataclasses
import json

import pytest
from peft.tuners.tuners_utils import check_target_module_exists

from slime_like.config.adapter_rules import versions_at_once
from slime_like.config.asynchrony import AsyncConfig
from slime_like.config.lora import LoraConfig, adapter_flags
from slime_like.config.lora_targets import expert_of, layer_targets, of_expert, target_modules
from slime_like.config.model import ModelConfig
from slime_like.config.placement import PlacementConfig
from slime_like.config.run import RunConfig
from slime_like.config.sync import SyncConfig
from slime_like.sglang_backend.server_args import check_flags

DENSE = ModelConfig(num_layers=2, hidden_size=8, num_attention_heads=2, vocab_size=11)
EXPERTS = dataclasses.replace(DENSE, num_experts=4, moe_layer_freq="[0]*1+[1]*1")


@pytest.mark.parametrize(
    "given",
    [["q_proj"], ["q_proj", "mlp.up_proj"], ["proj"], ["model.layers.1.self_attn.o_proj"], [r".*\.1\..*_proj"]],
    ids=" ".join,
)
@pytest.mark.parametrize("excluded", [None, ["v_proj", "1.mlp.up_proj"], [r".*\.0\..*"]])
def test_names_match_as_pefts_do(given, excluded):
    def as_peft(patterns):
        """A pattern is one text there, names are a list."""
        return patterns[0] if patterns and "*" in patterns[0] else patterns

    peft_config = type(
        "Config",
        (),
        {
            "target_modules": as_peft(given),
            "exclude_modules": as_peft(excluded),
            "target_parameters": None,
            "layers_to_transform": None,
        },
    )
    ours = LoraConfig(lora_rank=4, lora_target_modules=given, lora_exclude_modules=excluded)
    for module in target_modules(DENSE):
        theirs = check_target_module_exists(peft_config, module)
        assert ours.targets(module) == (bool(theirs) and type(theirs).__name__ != "_ExcludedModule"), module


def test_the_scale():
    assert LoraConfig(lora_rank=8).scale == 1.0
    assert LoraConfig(lora_rank=4, lora_alpha=32).scale == 8.0
    assert LoraConfig(lora_rank=4, lora_alpha=32, lora_use_rslora=True).scale == 16.0


def test_modules_of_layers():
    names = [name for matrix in layer_targets(DENSE, has_experts=False) for name in matrix.modules]
    assert names == [
        *("self_attn.o_proj", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    ]
    assert len(target_modules(DENSE)) == 14
    of_experts = [name for name in target_modules(EXPERTS) if expert_of(name) is not None]
    assert len(target_modules(EXPERTS)) == 11 + 12  # the second layer's MLP is made of four experts
    assert of_experts[:3] == [f"model.layers.1.mlp.experts.0.{kind}_proj" for kind in ("gate", "up", "down")]
    assert expert_of(of_experts[-1]) == 3 and of_expert(of_experts[-1], 1) == "model.layers.1.mlp.experts.1.down_proj"
    here = [matrix for matrix in layer_targets(EXPERTS, has_experts=True, experts=[2, 3]) if matrix.is_expert]
    assert [matrix.name.split(".")[3] for matrix in here] == ["0", "0", "1", "1"]
    assert here[2].modules[0] == "mlp.experts.3.gate_proj"
    assert here[2].row_name == "mlp.experts.local_experts.{expert}.linear_fc1"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora_rank": -1}, "must not be negative"),
        ({"lora_alpha": 4.0}, "--lora-alpha does nothing without --lora-rank"),
        ({"lora_load": "x"}, "--lora-load does nothing without --lora-rank"),
        ({"lora_rank": 4, "lora_alpha": 0.0}, "must be above 0"),
        ({"lora_rank": 4, "lora_dropout": 1.0}, r"in \[0, 1\)"),
        ({"lora_rank": 4, "lora_plus_lr_ratio": 0.0}, "must be above 0"),
        ({"lora_rank": 3, "lora_init": "orthogonal"}, "even"),
        ({"lora_rank": 4, "lora_init": "gaussian", "lora_load": "x"}, "does nothing with --lora-load"),
        ({"lora_rank": 4, "lora_a_init": "gaussian", "lora_load": "x"}, "--lora-a-init gaussian does nothing with"),
        ({"lora_rank": 4, "lora_b_init": "uniform", "lora_init": "orthogonal"}, "draws A and B together"),
        ({"lora_rank": 4, "lora_a_init": "zeros"}, "no gradient"),
        ({"lora_rank": 4, "lora_target_modules": ["all-linear", "q_proj"]}, "drop the others"),
        ({"lora_rank": 4, "lora_target_modules": ["q_proj", "(k|v)_proj"]}, "stands alone"),
        ({"lora_rank": 4, "lora_target_modules": ["(q_proj"]}, "no regular expression"),
    ],
)
def test_what_is_impossible(options, message):
    with pytest.raises(AssertionError, match=message):
        assert LoraConfig(**options).problems() == []


def test_the_default_and_plain_adapters_are_possible():
    assert LoraConfig().problems() == [] and not LoraConfig().enabled
    config = LoraConfig(lora_rank=4)
    assert config.problems() == config.target_problems(DENSE) == []


@pytest.mark.parametrize(
    ("model", "names", "message"),
    [
        (DENSE, ["q_proj", "qkv"], "qkv: no linear layer has such a name. There are: down_proj, gate_proj, k_proj"),
        (EXPERTS, ["gate_proj", "down_proj"], "experts.0 on one of gate_proj and up_proj only"),
        (EXPERTS, [".*experts.[01].down_proj"], "not on down_proj of model.layers.1.mlp.experts.2"),
    ],
)
def test_modules_that_cannot_have_adapters(model, names, message):
    (problem,) = LoraConfig(lora_rank=4, lora_target_modules=names).target_problems(model)
    assert message in problem


def test_experts_and_attention_beside_them_can():
    names = ["q_proj", "o_proj"]
    for targets in (names, ["all-linear"], ["down_proj"], [r".*self_attn.*|.*experts.*_proj"]):
        assert LoraConfig(lora_rank=4, lora_target_modules=targets).target_problems(EXPERTS) == []
    (problem,) = LoraConfig(lora_rank=4, lora_dropout=0.1).target_problems(EXPERTS)
    assert "cannot drop any of their input: --lora-dropout 0.1" in problem
    excluded = LoraConfig(lora_rank=4, lora_exclude_modules=names)
    assert "exclude less" in dataclasses.replace(excluded, lora_target_modules=names).target_problems(DENSE)[0]


def test_policy_and_critic_have_adapters_and_the_reference_none():
    config = RunConfig(lora=LoraConfig(lora_rank=4))
    assert config.adapters is config.lora and dataclasses.replace(config, role="critic").adapters is not None
    assert dataclasses.replace(config, role="ref").adapters is None


def test_files_of_a_peft_folder(tmp_path):
    config = LoraConfig(lora_rank=4, lora_load=str(tmp_path))
    assert "adapter_config.json and no adapter_model.safetensors" in config.missing_files()[0]
    (tmp_path / "adapter_config.json").write_text(json.dumps({}))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    assert config.missing_files() == []


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"lora": LoraConfig()}, "needs adapters: --lora-rank"),
        ({"placement": PlacementConfig(debug_train_only=True)}, "sends no weights"),
        ({"model": EXPERTS}, "adapters on experts cannot be served"),
        ({"model": DENSE, "lora": LoraConfig(lora_rank=4, lora_target_modules=["q_proj"])}, "on q_proj and v_proj"),
        (
            {"model": DENSE, "lora": LoraConfig(lora_rank=4, lora_exclude_modules=["1.self_attn.k_proj"])},
            "alike in all layers",
        ),
        (
            {"model": DENSE, "lora": LoraConfig(lora_rank=4, lora_target_modules=["up_proj"])},
            "without one on gate_proj",
        ),
        (
            {
                "model": dataclasses.replace(DENSE, untie_embeddings_and_output_weights=True),
                "lora": LoraConfig(lora_rank=4, lora_target_modules=["o_proj", "lm_head"]),
                "asynchrony": AsyncConfig(async_mode="full"),
            },
            "none on lm_head rightly",
        ),
        (
            {"sync": SyncConfig(update_weight_mode="adapter", update_weight_pause_mode="retract")},
            "--update-weight-pause-mode",
        ),
    ],
)
def test_what_sending_adapters_needs(more, message):
    config = RunConfig(**({"lora": LoraConfig(lora_rank=4), "sync": SyncConfig(update_weight_mode="adapter")} | more))
    assert any("--update-weight-mode adapter" in problem and message in problem for problem in config.problems())


def test_how_adapters_can_travel():
    def problems(**options):
        return SyncConfig(**options).problems()

    for transport in (None, "disk", "http"):
        assert problems(update_weight_mode="adapter", update_weight_transport=transport) == []
    assert "Fix: disk or http" in problems(update_weight_mode="adapter", update_weight_transport="ipc")[0]
    assert "is for adapters alone" in problems(update_weight_transport="http")[0]
    by_http = SyncConfig(update_weight_mode="adapter", update_weight_transport="http", update_weight_disk_dir="/w")
    assert "needs --update-weight-transport disk" in by_http.problems()[0]


def test_adapters_are_probed_at_each_sync_unless_engines_compare_digests():
    sync = SyncConfig(update_weight_mode="adapter")
    assert sync.sends_adapters and not sync.sends_deltas
    assert [sync.probes_at(number) for number in range(3)] == [True] * 3
    by_http = SyncConfig(update_weight_mode="adapter", update_weight_transport="http", verify_weight_sync_interval=2)
    assert by_http.sends_adapters and [by_http.probes_at(number) for number in range(3)] == [True, False, True]


@pytest.mark.parametrize(
    "more",
    [
        {"asynchrony": AsyncConfig(async_mode="full")},
        {"asynchrony": AsyncConfig(async_mode="one-step")},
        {"asynchrony": AsyncConfig(partial_rollout=True), "placement": PlacementConfig(colocate=True)},
        {"placement": PlacementConfig(rollout_external=True, rollout_external_engine_addrs=["http://far:1"])},
        {
            "model": dataclasses.replace(DENSE, untie_embeddings_and_output_weights=True),
            "lora": LoraConfig(lora_rank=4, lora_target_modules=["o_proj", "gate_proj", "lm_head"]),
        },
    ],
)
def test_what_goes_with_sending_adapters(more):
    config = RunConfig(**({"lora": LoraConfig(lora_rank=4), "sync": SyncConfig(update_weight_mode="adapter")} | more))
    assert not [problem for problem in config.problems() if "adapter" in problem]


def test_an_engine_serves_as_many_versions_as_requests_may_name():
    lora = LoraConfig(lora_rank=4, lora_target_modules=["q_proj"])
    for asynchrony, batch in (
        (AsyncConfig(), "3"),
        (AsyncConfig(async_mode="one-step"), "3"),
        (AsyncConfig(partial_rollout=True, max_staleness=3), "3"),  # each part of an answer is a request of its own
        (AsyncConfig(async_mode="full"), "4"),
        (AsyncConfig(async_mode="full", max_staleness=3), "6"),
    ):
        versions = versions_at_once(RunConfig(asynchrony=asynchrony))
        flags = adapter_flags(lora, DENSE, num_versions=versions)
        assert (flags["enable_lora"], flags["max_lora_rank"], flags["lora_target_modules"]) == (True, "4", ["q_proj"])
        assert flags["max_loras_per_batch"] == batch
        assert check_flags(flags)[0] == []


def test_engines_keep_the_base_of_adapters():
    shared = PlacementConfig(colocate=True)
    assert RunConfig(placement=shared).released_by_engines == ("kv_cache", "weights")
    assert RunConfig().released_by_engines == ()
    adapters = SyncConfig(update_weight_mode="adapter")
    assert RunConfig(placement=shared, sync=adapters).released_by_engines == ("kv_cache",)


@pytest.mark.parametrize(
    ("excluded", "as_given"),
    [(None, ["lm_head"]), (["q_proj"], ["q_proj", "lm_head"]), ([r".*\.q_proj"], [r"(?:.*\.q_proj)|lm_head"])],
)
def test_a_critic_has_none_on_the_output_layer(excluded, as_given):
    lora = LoraConfig(
        lora_rank=4, lora_target_modules=["q_proj", "o_proj", "lm_head"], lora_exclude_modules=excluded
    ).of_critic
    assert lora.lora_exclude_modules == as_given and not lora.problems()
    name = "model.layers.0.self_attn."
    assert lora.targets(name + "o_proj") and not lora.targets("lm_head")
    assert lora.targets(name + "q_proj") == (excluded is None)
