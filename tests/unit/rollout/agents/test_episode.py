"""Episodes on a scripted engine: how they end, what goes wrong, and what is counted."""

# Covers slime_like.rollout.agents.episode_metrics, slime_like.rollout.agents.stage
# and slime_like.config.agents too.

from __future__ import annotations

import importlib.util
import json
import shutil
import threading
import time

import numpy as np
import pytest

from slime_like.config.loss import LossConfig
from slime_like.errors import ConfigError, PluginError, RunError
from slime_like.records import COMPLETED, TRUNCATED, WeightsRef
from slime_like.rollout.generate import SESSION_HEADER
from slime_like.rollout.manager import RolloutManager
from slime_like.rollout.service import EngineAccess
from slime_like.rollout.train_samples import to_train_samples
from slime_like.testing.scripted_engine import Fault, ScriptedEngine
from tests.unit.rollout.agents import environments
from tests.unit.rollout.conftest import TINY

HERE = "tests.unit.rollout.agents.environments"
EPISODES = "rollout/episodes/"


@pytest.fixture
def play(make_config, tokenizer):
    """One rollout of episodes: (result, engine). The engine says each word in turn."""
    opened = []

    def start(env: str, words=("yes",), *, engine_options=None, start_only=False, **options):
        number = iter(range(10**6))

        def script(_):
            ids = tokenizer(words[next(number) % len(words)], add_special_tokens=False)["input_ids"]
            return [*ids, tokenizer.eos_token_id], [-0.5 - 0.01 * place for place in range(len(ids) + 1)]

        engine = ScriptedEngine(script, **(engine_options or {})).start()
        opened.append(engine)
        spec = env if ":" in env else f"{HERE}:{env}"
        config = make_config(env=spec, **({"rm_type": None, "max_position_embeddings": 256} | options))
        manager = RolloutManager(config, EngineAccess(router_url=engine.url, router_api_key=None, num_engines=1))
        opened.append(manager)
        manager.start()
        return (manager, engine) if start_only else (manager.generate(0), engine)

    yield start
    for part in reversed(opened):
        part.close()


def samples_of(result):
    return [sample for group in result.groups for sample in group.samples]


def test_an_episode_is_one_row_of_all_its_turns(play, tokenizer):
    environments.Echo.seeds.clear()
    result, engine = play("Echo?turns=3&reward=0.25")
    samples = samples_of(result)
    assert len(samples) == 4 and {sample.status for sample in samples} == {COMPLETED}
    assert [sample.reward for sample in samples] == [0.75] * 4
    said = tokenizer.decode(samples[0].tokens)
    turn = "yes<|im_end|>\n<|im_start|>user\nyou said yes<|im_end|>\n<|im_start|>assistant\n"
    assert said.endswith(f"<|im_start|>assistant\n{turn}{turn}yes<|im_end|>")
    trained = samples[0].loss_mask.astype(bool)
    assert tokenizer.decode(samples[0].tokens[trained]) == 3 * "yes<|im_end|>"
    assert samples[0].weight_versions[trained].tolist() == [0] * trained.sum()
    assert (samples[0].weight_versions[~trained] == -1).all() and (samples[0].engine_logprobs[~trained] == 0).all()
    assert samples[0].metadata["episode"]["rewards"] == [0.25] * 3
    assert samples[0].metadata["episode"]["ending"] == "done"
    metrics = result.metrics
    assert metrics[EPISODES + "ended/done"] == metrics[EPISODES + "num"] == 4
    assert metrics[EPISODES + "turns_mean"] == 3 and metrics[EPISODES + "rows_mean"] == 1
    assert metrics[EPISODES + "violations"] == metrics[EPISODES + "drifted_ratio"] == 0
    assert metrics["rollout/reward_mean"] == 0.75
    seeds = environments.Echo.seeds
    assert len(set(seeds)) == 2, "all samples of a prompt begin alike"


def test_what_is_sent_is_what_was_sampled(play):
    """Every request begins with an earlier one and its answer, token by token."""
    result, engine = play("Echo?turns=4", words=("yes", "no", "perhaps"), rollout_batch_size=1)
    sent = [request["input_ids"] for request in engine.requests]
    rows = [sample.tokens.tolist() for sample in samples_of(result)]
    assert len(sent) == 8
    for ids in sent:
        assert any(row[: len(ids)] == ids for row in rows)
    assert {request["sampling_params"]["max_new_tokens"] for request in engine.requests} == {8}
    assert len({request["sampling_params"]["sampling_seed"] for request in engine.requests}) == 8


def test_plain_and_async_environments_and_a_rule_over_the_environments_reward(play):
    result, _ = play("AsyncEcho")
    assert {sample.reward for sample in samples_of(result)} == {1.0}
    result, _ = play("Echo", custom_rm_path="tests.unit.rollout.agents.test_episode.minus_the_environments")
    assert {sample.reward for sample in samples_of(result)} == {-1.0}


def minus_the_environments(args, sample):
    """A rule sees what the environment gave."""
    return -sample.reward


@pytest.mark.parametrize(
    "env, options, ending, turns, reward",
    [
        ("Echo?turns=9", {"max_turns": 3}, "max_turns", 3, 1.5),
        ("Truncates", {}, "env_truncated", 1, 0.25),
        ("Echo?turns=3", {"rollout_max_response_len": 1}, "length", 1, 0.0),
        ("Echo?turns=9", {"rollout_max_context_len": 60}, "context", 2, 1.0),
    ],
)
def test_episodes_that_are_cut_are_truncated_and_keep_their_reward(play, env, options, ending, turns, reward):
    result, engine = play(env, **options)
    for sample in samples_of(result):
        assert (sample.status, sample.reward) == (TRUNCATED, reward)
        assert sample.metadata["episode"]["ending"] == ending and sample.metadata["episode"]["turns"] == turns
        assert len(sample.tokens) <= options.get("rollout_max_context_len", 10**9)
    assert result.metrics[f"{EPISODES}ended/{ending}"] == 4
    assert result.metrics["rollout/truncated_ratio"] == 1


def test_an_episode_of_several_rows_is_one_member_of_its_group(play):
    """Two rows each: the baseline counts episodes, and both rows are pushed alike."""
    result, _ = play(
        "Summarizes?turns=2",
        words=("yes", "no"),
        rollout_batch_size=1,
        n_samples_per_prompt=2,
        custom_rm_path="tests.unit.rollout.agents.test_episode.by_index",
    )
    (group,) = result.groups
    assert [(sample.sample_index, sample.segment_index) for sample in group.samples] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert group.rewards.tolist() == [0.0, 1.0]
    rows = to_train_samples(result.groups, LossConfig(advantage_estimator="dr_grpo"), group_size=2)
    pushed = [float(row.advantages[row.loss_mask == 1][0]) for row in rows]
    assert np.allclose(pushed, [-0.5, -0.5, 0.5, 0.5])
    assert result.metrics[EPISODES + "rows_mean"] == 2 and result.metrics[EPISODES + "forks"] == 2


def by_index(args, sample):
    """Samples of a group differ."""
    return float(sample.sample_index)


def test_a_tool_that_fails_once_is_played_again_and_counted(play):
    result, _ = play("FailsOnce", rollout_batch_size=1)
    assert [sample.status for sample in samples_of(result)] == [COMPLETED] * 2
    assert result.metrics[EPISODES + "failed/error"] == 1 and result.metrics["rollout/failed_requests"] == 1


@pytest.mark.parametrize("how, kind", [("raises", "error"), ("hangs", "timeout"), ("silent", "error")])
def test_an_environment_that_always_fails_ends_the_run_by_its_name(play, how, kind):
    manager, _ = play(f"Broken?how={how}", start_only=True, env_timeout_s=0.2)
    with pytest.raises(RunError, match="environment .*Broken.*step for prompt"):
        manager.generate(0)


def test_a_request_that_our_own_sync_ends_is_asked_again_with_the_same_tokens(play):
    """The environment does not hear of it, and nothing of the cut answer is in the row."""
    manager, engine = play(
        "Echo?turns=2",
        start_only=True,
        rollout_batch_size=1,
        n_samples_per_prompt=1,
        engine_options={"faults": [None, Fault(delay_s=0.6, abort=1)]},
    )
    future = manager.start_generate(0)
    deadline = time.monotonic() + 10
    while len(engine.requests) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    manager.policy_changing()
    threading.Timer(1.0, lambda: manager.policy_changed(WeightsRef(version=1))).start()
    result = future.result(timeout=20)
    (sample,) = samples_of(result)
    assert sample.metadata["episode"]["turns"] == 2 and sample.status == COMPLETED
    assert engine.requests[1]["input_ids"] == engine.requests[2]["input_ids"] and len(engine.requests) == 3
    assert result.metrics[EPISODES + "resubmitted_turns"] == 1 and result.metrics["rollout/failed_requests"] == 0
    versions = sample.weight_versions[sample.loss_mask == 1]
    assert versions[0] == 0 and versions[-1] == 1, "each turn has the version that sampled it"


def test_an_abort_that_no_sync_explains_plays_the_episode_again(play):
    result, engine = play(
        "Echo?turns=2", rollout_batch_size=1, n_samples_per_prompt=1, engine_options={"faults": [None, Fault(abort=1)]}
    )
    (sample,) = samples_of(result)
    assert sample.status == COMPLETED and len(engine.requests) == 4
    assert result.metrics["rollout/failed_requests"] == 1 and result.metrics[EPISODES + "ended/done"] == 1


def test_an_engine_that_fails_fails_the_episode_and_the_others_go_on(play):
    faults = [Fault(status=400)]
    result, _ = play("Echo?turns=2", engine_options={"faults": faults})
    assert {sample.status for sample in samples_of(result)} == {COMPLETED}
    assert result.metrics["rollout/failed_requests"] == 1


def test_all_turns_of_an_episode_carry_its_session_and_no_other_does(play):
    manager, engine = play("Echo?turns=3", start_only=True)
    manager.generate(0)
    sessions = [headers.get(SESSION_HEADER) for headers in engine.headers]
    assert len(set(sessions)) == 4 and None not in sessions
    assert {sessions.count(session) for session in sessions} == {3}


def test_a_prompt_without_room_for_an_answer_fails_by_name(play):
    manager, _ = play("Talkative", start_only=True, rollout_max_context_len=64)
    with pytest.raises(RunError, match="leaves no room in 64 tokens"):
        manager.generate(0)


TOOL_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}{% for m in messages %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>\n"
    "{{ call.function | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed")
def test_a_tool_is_called_in_the_models_own_way_and_a_malformed_call_is_told(play, tokenizer, tmp_path):
    shutil.copytree(TINY, tmp_path / "model")
    settings = json.loads((TINY / "tokenizer_config.json").read_text()) | {"chat_template": TOOL_TEMPLATE}
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(settings))
    words = (
        "<tool_call>\n{broken\n</tool_call>",
        '<tool_call>\n{"name": "calc", "arguments": {"expression": "1+2"}}\n</tool_call>',
        "three",
    )
    result, _ = play(
        "OffersTool",
        words=words,
        hf_checkpoint=str(tmp_path / "model"),
        env_tool_call_parser="qwen25",
        rollout_max_response_len=200,
        max_position_embeddings=2000,
        rollout_batch_size=1,
        n_samples_per_prompt=1,
    )
    (sample,) = samples_of(result)
    said = tokenizer.decode(sample.tokens)
    assert "<|im_start|>user\nYour tool call could not be read: no call of one of the tools (calc)" in said
    assert "<|im_start|>tool\n{'expression': '1+2'}<|im_end|>" in said
    assert tokenizer.decode(sample.tokens[sample.loss_mask == 1]) == "".join(f"{word}<|im_end|>" for word in words)
    assert sample.reward == 1.0 and sample.metadata["episode"]["turns"] == 3
    assert result.metrics[EPISODES + "malformed_calls"] == 1


def test_tools_without_a_place_in_the_template_are_refused(play):
    manager, _ = play("OffersTool", start_only=True)
    with pytest.raises(RunError, match="offers tools, and the chat template has no place for them"):
        manager.generate(0)


def test_evaluations_count_their_own_episodes(play, write_rows):
    manager, _ = play(
        "Echo?turns=2", start_only=True, eval_prompt_data=["held", "seeds:3"], eval_interval=1, rollout_batch_size=1
    )
    metrics = manager.evaluate(0)
    assert metrics["eval/held/episodes/num"] == 3 and metrics["eval/held/reward_mean"] == 1.0
    assert manager.generate(0).metrics[EPISODES + "num"] == 2


def test_what_does_not_go_with_an_environment(make_config):
    config = make_config(
        env=f"{HERE}:Echo", custom_generate_function_path="a.b", apply_chat_template=False, rm_type=None
    )
    problems = "\n".join(config.problems())
    assert "--env needs --apply-chat-template" in problems
    assert "--env and --custom-generate-function-path both make the answers" in problems
    assert "samples need a reward" not in problems
    assert "--max-turns does nothing without --env" in "\n".join(make_config(max_turns=3).problems())
    assert make_config(env=f"{HERE}:Echo").router_policy == "manual" and make_config().router_policy == "cache_aware"


def test_an_unknown_environment_is_refused_before_anything_starts(play):
    with pytest.raises(PluginError, match="has no 'Ecco'"):
        play("Ecco", start_only=True)


def test_a_run_without_any_reward_is_refused(make_config):
    with pytest.raises(ConfigError, match="samples need a reward"):
        raise ConfigError(make_config(rm_type=None).problems())
