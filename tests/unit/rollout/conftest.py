"""What rollout tests share: the tiny tokenizer, a config on a few rows, an engine that answers by a script, and a
manager on it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slime_like.config.agents import AgentConfig
from slime_like.config.asynchrony import AsyncConfig
from slime_like.config.checkpoint import CheckpointConfig
from slime_like.config.data import DataConfig
from slime_like.config.evaluation import EvalConfig
from slime_like.config.lora import LoraConfig
from slime_like.config.loss import LossConfig
from slime_like.config.model import ModelConfig
from slime_like.config.observability import ObservabilityConfig
from slime_like.config.reward import RewardConfig
from slime_like.config.rollout import RolloutConfig
from slime_like.config.run import RunConfig
from slime_like.config.serving import ServingConfig
from slime_like.config.sync import SyncConfig
from slime_like.records import EngineEndpoint
from slime_like.rollout.manager import RolloutManager
from slime_like.rollout.service import EngineAccess
from slime_like.rollout.tokenizer import load_tokenizer
from slime_like.testing.scripted_engine import ScriptedEngine
from tests.unit.rollout.rows import digits_row

TINY = Path(__file__).parents[3] / "models" / "tiny-qwen3"


@pytest.fixture(scope="session")
def tokenizer():
    return load_tokenizer(str(TINY))


@pytest.fixture
def write_rows(tmp_path):
    """Writes rows (dicts, or raw lines) to a JSONL file and returns its path."""

    def write(rows, name="train.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return str(path)

    return write


@pytest.fixture
def make_config(write_rows):
    """Builds a RunConfig; keyword arguments go to the group that has the field."""

    def make(rows=None, **options) -> RunConfig:
        defaults = {
            "hf_checkpoint": str(TINY),
            "prompt_data": write_rows([digits_row(n) for n in range(7)] if rows is None else rows),
            "input_key": "prompt",
            "label_key": "label",
            "apply_chat_template": True,
            "num_rollout": 4,
            "rollout_batch_size": 2,
            "n_samples_per_prompt": 2,
            "rollout_max_response_len": 8,
            "max_position_embeddings": 64,
            "rollout_request_timeout_s": 10.0,
            "rm_type": "exact",
        }
        values = defaults | options
        groups = {"data": DataConfig, "rollout": RolloutConfig, "reward": RewardConfig, "eval": EvalConfig}
        groups |= {"checkpoint": CheckpointConfig, "model": ModelConfig, "loss": LossConfig}
        groups |= {"asynchrony": AsyncConfig, "sync": SyncConfig, "lora": LoraConfig}
        groups |= {"observability": ObservabilityConfig, "agents": AgentConfig, "serving": ServingConfig}
        built = {}
        for name, group in groups.items():
            built[name] = group(**{key: values.pop(key) for key in list(values) if key in group.__dataclass_fields__})
        custom = values.pop("custom", {})
        assert not values, f"no group has {list(values)}"
        return RunConfig(**built, custom=custom)

    return make


@pytest.fixture
def sorting_script(tokenizer):
    """Answers `sort 7302` with the digits in order and the end token; every log-prob is -0.5."""

    def answer(prompt: list[int]):
        digits = "".join(
            character for character in tokenizer.decode(prompt, skip_special_tokens=True) if character.isdigit()
        )
        ids = tokenizer("".join(sorted(digits)), add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        return ids, [-0.5] * len(ids)

    return answer


@pytest.fixture
def decode(tokenizer):
    """Ids -> text, as the engine would."""
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=True)


@pytest.fixture
def start_manager(make_config, sorting_script, decode):
    """Starts an engine and a manager on it; closes both at the end."""
    opened = []

    def start(rows=None, *, engine_options=None, script=None, more_engines=(), **options):
        engine = ScriptedEngine(script or sorting_script, decode=decode, **(engine_options or {})).start()
        manager = RolloutManager(
            make_config(rows, **options),
            EngineAccess(
                router_url=engine.url,
                router_api_key=None,
                num_engines=1,
                endpoints=(EngineEndpoint(index=0, url=engine.url), *more_engines),
            ),
        )
        opened.extend([manager, engine])
        manager.start()
        return manager, engine

    yield start
    for part in opened:
        part.close()
