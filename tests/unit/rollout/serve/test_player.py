"""A run that is played against: agents of --agent-path, agents from outside, and what goes wrong with them.

The flags are those of slime_like.config.serving, the parts those of slime_like.rollout.serve.
"""

from __future__ import annotations

import gc
import sys
import threading

import httpx
import numpy as np
import pytest

from slime_like.errors import ConfigError, PluginError, RunError
from slime_like.records import COMPLETED
from slime_like.rollout.manager import RolloutManager
from slime_like.rollout.service import EngineAccess
from slime_like.testing.scripted_engine import ScriptedEngine
from tests.unit.rollout.serve.served import says

HERE = "tests.unit.rollout.serve.agents"
EPISODES = "rollout/episodes/"


@pytest.fixture
def start(make_config, tokenizer):
    """A manager that is played against by an agent of agents.py (None: from outside); the engine says these words."""
    opened = []

    def make(agent: str | None, *words: str, **options) -> tuple[RolloutManager, ScriptedEngine]:
        engine = ScriptedEngine(says(tokenizer, *(words or ("yes",)))).start()
        opened.append(engine)
        path = {"agent_path": f"{HERE}.{agent}"} if agent else {}
        values = {"rm_type": None, "max_position_embeddings": 256, "serve_rollout": True} | path | options
        config = make_config(**values)
        assert [problem for problem in config.problems() if "--global-batch-size" not in problem] == []
        access = EngineAccess(router_url=engine.url, router_api_key=None, num_engines=1)
        manager = RolloutManager(config, access)
        opened.append(manager)
        manager.start()
        return manager, engine

    yield make
    for part in reversed(opened):
        part.close()


def samples_of(result):
    return [sample for group in result.groups for sample in group.samples]


def test_an_episode_of_an_openai_client_is_one_row(start, tokenizer):
    manager, engine = start("two_turns", rollout_temperature=0.7)
    result = manager.generate(0)
    samples = samples_of(result)
    assert len(samples) == 4 and {sample.status for sample in samples} == {COMPLETED}
    assert [sample.reward for sample in samples] == [0.3] * 4
    said = tokenizer.decode(samples[0].tokens)
    assert said.endswith("yes<|im_end|>\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>")
    trained = samples[0].loss_mask.astype(bool)
    assert tokenizer.decode(samples[0].tokens[trained]) == 2 * "yes<|im_end|>"
    turn = [-0.5, -0.51, -0.52, -0.53]
    np.testing.assert_allclose(samples[0].engine_logprobs[trained], turn * 2, rtol=1e-6)
    assert samples[0].metadata["episode"]["label"] == samples[0].label
    assert {request["sampling_params"]["temperature"] for request in engine.requests} == {0.7}
    assert {request["sampling_params"]["max_new_tokens"] for request in engine.requests} == {8}
    assert len({request["sampling_params"]["sampling_seed"] for request in engine.requests}) == 8
    assert len({headers["x-smg-routing-key"] for headers in engine.headers}) == 4, "one an episode"
    metrics = result.metrics
    assert metrics[EPISODES + "num"] == metrics[EPISODES + "ended/done"] == 4 and metrics[EPISODES + "turns_mean"] == 2
    assert metrics[EPISODES + "violations"] == metrics[EPISODES + "drifted_ratio"] == 0
    assert metrics["rollout/reward_mean"] == pytest.approx(0.3)


def test_an_agent_that_blocks_may_post_its_result(start):
    manager, _ = start("blocking")
    assert [sample.reward for sample in samples_of(manager.generate(0))] == [0.25] * 4


def test_the_runs_rule_rewards_where_the_agent_does_not(start):
    manager, _ = start("no_reward", "0123", rm_type="exact")
    samples = samples_of(manager.generate(0))
    assert [sample.reward for sample in samples] == [float(sample.label == "0123") for sample in samples]


def test_conversations_of_one_episode_are_rows_of_one_member(start):
    manager, _ = start("sub_agents")
    result = manager.generate(0)
    for group in result.groups:
        assert len(group.samples) == 4 and len(group.episodes) == 2 and group.rewards.tolist() == [1.0, 1.0]
        assert [sample.segment_index for sample in group.samples] == [0, 1, 0, 1]
    assert result.metrics[EPISODES + "rows_mean"] == 2


@pytest.mark.parametrize(
    ("agent", "options", "message"),
    [
        ("raises", {}, "raises raised KeyError: 'plan'"),
        ("gives_a_number", {}, "gave what is no result: must be nothing, or an object of reward and metadata, not 0.5"),
        ("says_nothing", {}, "finished without one answer of the policy"),
        ("no_reward", {}, "gave no reward, and there is no --rm-type"),
        ("hangs", {"agent_timeout_s": 0.2}, r"did not finish within 0.2 s \(--agent-timeout-s\)"),
        ("hangs_in_a_coroutine", {"agent_timeout_s": 0.2}, "did not finish within 0.2 s"),
        (None, {"agent_timeout_s": 0.2}, "did not finish within 0.2 s"),
    ],
)
def test_what_an_agent_does_wrong_is_a_failed_sample(start, agent, options, message):
    manager, _ = start(agent, **options)
    with pytest.raises(RunError, match=message):
        manager.generate(0)  # all samples failed: the run ends, and says why


def test_agents_from_outside_fetch_episodes(start, make_config):
    manager, _ = start(None, "four")
    url = manager.serving_url
    num_played = []

    def play() -> None:
        with httpx.Client(base_url=url, timeout=30) as client:
            while len(num_played) < 4:
                answer = client.post("/sessions")
                if answer.status_code == 204:
                    continue
                episode = answer.json()
                body = {"messages": episode["prompt"], **episode["request_kwargs"]}
                said = client.post(f"{episode['base_url']}/chat/completions", json=body).json()
                assert said["choices"][0]["message"]["content"] == "four"
                num_played.append(episode["session_id"])
                path = f"/sessions/{episode['session_id']}"
                assert client.post(f"{path}/finish", json={"reward": 0.5}).json()["num_turns"] == 1
                late = client.post(f"{path}/v1/chat/completions", json=body)
                assert late.status_code in (404, 410), "it is over"
                assert client.post("/v1/chat/completions", json=body).json()["error"]["code"] == "session_not_found"

    player = threading.Thread(target=play)
    player.start()
    samples = samples_of(manager.generate(0))
    player.join(timeout=30)
    assert [sample.reward for sample in samples] == [0.5] * 4 and len(set(num_played)) == 4


def test_flags_that_do_not_go_together(make_config):
    def problems(**options) -> str:
        return " ".join(one for one in make_config(**options).problems() if "--global-batch-size" not in one)

    assert "--agent-path does nothing without --serve-rollout" in problems(agent_path="a.b")
    assert "--agent-python does nothing without --agent-path" in problems(serve_rollout=True, agent_python="python3")
    assert "--env-tool-call-parser does nothing without --env or" in problems(env_tool_call_parser="qwen25")
    assert "both make the answers" in problems(serve_rollout=True, custom_generate_function_path="a.b")
    assert "--serve-port 70000" in problems(serve_rollout=True, serve_port=70000)
    assert problems(serve_rollout=True, rm_type=None, env_tool_call_parser="qwen25") == ""


def test_an_open_address_needs_a_key_and_its_refusal_leaves_nothing_open(start, caplog):
    with pytest.raises(ConfigError, match="others than this machine can reach the endpoint"):
        start("two_turns", serve_host="0.0.0.0")
    gc.collect()
    assert "Unclosed" not in caplog.text


def test_an_agent_in_an_interpreter_of_its_own(start, tmp_path):
    manager, _ = start("two_turns", agent_python=sys.executable, run_dir=str(tmp_path))
    samples = samples_of(manager.generate(0))
    assert [sample.reward for sample in samples] == [0.3] * 4
    assert samples[0].metadata["episode"]["label"] == samples[0].label
    assert (tmp_path / "logs/agents.log").is_file()


def test_an_agent_that_its_interpreter_cannot_load_is_refused_before_anything_is_played(start, tmp_path):
    with pytest.raises(PluginError, match="has no attribute 'no_such_agent'"):
        start("no_such_agent", agent_python=sys.executable, run_dir=str(tmp_path))
