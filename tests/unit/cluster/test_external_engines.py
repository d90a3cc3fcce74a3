"""External engines before a run starts: sizes come from the servers, what disagrees is the user's mistake, all of it at
once.
"""

import dataclasses
import json

import pytest
from sglang_backend.fake_http import serve

from slime_like.cluster.external_engines import with_servers
from slime_like.config.lora import LoraConfig
from slime_like.config.model import ModelConfig
from slime_like.config.placement import PlacementConfig
from slime_like.config.run import RunConfig
from slime_like.config.sync import SyncConfig
from slime_like.errors import ConfigError, EngineError
from slime_like.planning.placement import make_plan
from slime_like.utils.net import free_port

HF = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 64, "vocab_size": 320}


def answers(*, context=4096, dtype="float32", **sizes):
    model = {
        "model_path": "/far/model",
        "is_generation": True,
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "weight_version": "default",
    }
    info = {
        "model_path": "/far/model",
        "tp_size": 1,
        "pp_size": 1,
        "dp_size": 1,
        "dtype": dtype,
        "version": "0.5.23",
    } | sizes
    return {
        "/model_info": (200, model),
        "/server_info": (200, info),
        "/v1/models": (200, {"data": [{"id": "m", "max_model_len": context}]}),
    }


@pytest.fixture
def run(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(HF))

    def make(*urls, **placement):
        base = RunConfig()
        config = dataclasses.replace(
            base,
            checkpoint=dataclasses.replace(base.checkpoint, hf_checkpoint=str(tmp_path)),
            optimizer=dataclasses.replace(base.optimizer, bf16=False),
            rollout=dataclasses.replace(base.rollout, rollout_max_response_len=100),
            placement=PlacementConfig(
                actor_num_gpus_per_node=2, rollout_external=True, rollout_external_engine_addrs=list(urls), **placement
            ),
        )
        return config, make_plan(config)

    return make


def test_sizes_come_from_the_servers(run):
    with serve(answers(tp_size=4)) as one, serve(answers(tp_size=2)) as two:
        config, plan = with_servers(*run(one.url, two.url), None)
    assert config.placement.rollout_num_gpus == 6
    assert [engine.tp for engine in plan.engines] == [4, 2] and plan.num_gpus == 2 and plan.rollout_offset == 0


def test_everything_that_disagrees_is_listed(run):
    with serve(answers(dtype="bfloat16")) as one, serve(answers(context=50, tp_size=2, pp_size=2)) as two:
        with pytest.raises(ConfigError) as error:
            with_servers(*run(one.url, two.url, rollout_num_gpus=2), None)
        said = error.value.problems
    assert len(said) == 4
    assert "bfloat16" in said[0] and one.url in said[0]
    assert "takes 50 tokens" in said[1] and two.url in said[1]
    assert said[2].startswith(
        f"--rollout-num-gpus 2, but the external engines have 5 GPUs: 1 at {one.url}, 4 at {two.url}."
    )
    assert "engine 1 has 2 pipeline stages" in said[3]


def test_a_server_must_have_room_for_the_adapters(run):
    """Rank and modules of the adapters, and as many versions as may be in use."""
    served = {"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": ["q_proj", "v_proj"]}
    flags = "--enable-lora --max-lora-rank 8 --lora-target-modules q_proj v_proj"

    def said(**info) -> list[str]:
        with serve(answers(**info)) as server:
            config, plan = run(server.url)
            lora = LoraConfig(lora_rank=8, lora_target_modules=["q_proj", "v_proj"])
            model = ModelConfig(num_layers=1, hidden_size=64, num_attention_heads=4, vocab_size=320)
            sync = SyncConfig(update_weight_mode="adapter")
            try:
                with_servers(dataclasses.replace(config, lora=lora, model=model, sync=sync), plan, None)
            except ConfigError as error:
                return [problem.removeprefix(f"the external engine at {server.url} ") for problem in error.problems]
        return []

    assert said(**served) == said(**served | {"lora_target_modules": ["all"], "max_loaded_loras": 3}) == []
    assert len(said()) == 1 and "started without adapters" in said()[0] and flags in said()[0]
    small = said(enable_lora=True, max_lora_rank=4, lora_target_modules=["q_proj"], max_loaded_loras=2)
    assert [problem.partition(". Fix: ")[0] for problem in small] == [
        "takes adapters of rank 4 at most, and --lora-rank is 8",
        "was started without adapters on v_proj",
        "holds 2 adapters at most (--max-loaded-loras), and 3 may be in use",
    ]
    assert all(flags in problem for problem in small)


def test_a_server_that_is_not_there_is_named(run):
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(EngineError, match=f"{url} cannot be reached"):
        with_servers(*run(url), None)


def test_runs_without_external_engines_ask_nobody():
    config = dataclasses.replace(RunConfig(), placement=PlacementConfig(actor_num_gpus_per_node=2, colocate=True))
    plan = make_plan(config)
    assert with_servers(config, plan, None) == (config, plan)
