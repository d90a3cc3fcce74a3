"""Agent libraries as they are, each in a virtual environment of its own, play one scripted episode over HTTP."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest

from slime_like.rollout.tokenizer import load_tokenizer
from slime_like.testing.scripted_engine import ScriptedEngine
from tests.e2e.foreign_venvs import with_qwen3_tokens
from tests.unit.rollout.serve.served import TINY, says, served

pytestmark = [pytest.mark.long_run, pytest.mark.timeout(900)]
HERE = Path(__file__).parent / "foreign_agents"
ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call>'
#: What follows where a call of any tool is forced: SGLang's opening of one, up to the name.
FORCED_ADD = 'add", "arguments": {"a": 2, "b": 2}}\n</tool_call>'
FORCED_FINAL = 'final_answer", "arguments": {"answer": "It is 4"}}\n</tool_call>'


def plays(python: str, script: str, *arguments: str) -> str:
    """What a script of foreign_agents prints."""
    environment = {key: value for key, value in os.environ.items() if "proxy" not in key.lower()}
    environment |= {"PYTHONPATH": str(Path(__file__).parents[2] / "scripts" / "examples")}
    command = [python, str(HERE / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


def finished(url: str, session: str) -> list[dict]:
    answer = httpx.post(f"{url}/sessions/{session}/finish", json={"reward": 1}, timeout=30).json()
    assert answer["num_turns"] == 2 and answer["violations"] == []
    return answer["samples"]


@pytest.mark.parametrize(
    ("requirement", "script", "mode", "said", "num_rows"),
    [
        ("openai-agents==0.24.*", "openai_agents.py", "chat", (ADD, "It is 4"), 1),
        ("openai-agents==0.24.*", "openai_agents.py", "stream", (ADD, "It is 4"), 1),
        ("openai-agents==0.24.*", "openai_agents.py", "responses", (ADD, "It is 4"), 1),
        ("pydantic-ai-slim[openai]==2.62.*", "pydantic_agents.py", None, (ADD, "It is 4"), 1),
        # It says its own tool call again as text: another conversation. Both answers are trained as they were sampled.
        # It forces a call of one of its tools, so that each answer begins within one.
        ("smolagents[openai]==1.26.*", "smol_agents.py", None, (FORCED_ADD, FORCED_FINAL), 2),
    ],
)
def test_an_agent_calls_a_tool_and_answers(python_with, requirement, script, mode, said, num_rows):
    python, tokenizer = python_with(requirement), load_tokenizer(str(TINY))
    with ScriptedEngine(says(tokenizer, *said)) as engine, served(engine) as running:
        modes = [mode] if mode else []
        assert plays(python, script, f"{running.url}/sessions/agent/v1", *modes) == "It is 4"
        samples = finished(running.url, "agent")
    sampled = [token for text in said for token in (*tokenizer(text)["input_ids"], tokenizer.eos_token_id)]
    trained = [
        token for sample in samples for token, mask in zip(sample["tokens"], sample["loss_mask"], strict=True) if mask
    ]
    assert trained == sampled and len(samples) == num_rows


def test_verifiers_has_the_same_tokens_as_we(python_with, tmp_path):
    python, folder = python_with("verifiers==0.4.*"), tmp_path / "tokenizer"
    shutil.copytree(TINY, folder)
    tokenizer = with_qwen3_tokens(folder)
    with ScriptedEngine(says(tokenizer, "It is 4", "yes, 4")) as engine, served(engine, model=folder) as running:
        trace = json.loads(
            plays(python, "verifiers_episode.py", f"{running.url}/sessions/verifiers/v1", str(folder)).splitlines()[-1]
        )
        (sample,) = finished(running.url, "verifiers")
    assert trace["reward"] == 1 and trace["errors"] == []
    (branch,) = trace["branches"]
    assert branch["ids"] == sample["tokens"] and branch["mask"] == sample["loss_mask"]
    assert branch["logprobs"] == pytest.approx(sample["engine_logprobs"], abs=1e-6)


@pytest.mark.parametrize("client_type", ["openai_chat_completions", "openai_chat_completions_token"])
def test_classic_verifiers_has_the_same_tokens_as_we(python_with, client_type):
    """0.2: by chat, and by chat with ids of its own (/tokenize, /v1/chat/completions/tokens)."""
    python, tokenizer = python_with("verifiers==0.2.*"), load_tokenizer(str(TINY))
    with ScriptedEngine(says(tokenizer, "It is 4", "yes, 4")) as engine, served(engine) as running:
        printed = plays(python, "classic_verifiers.py", f"{running.url}/sessions/classic/v1", client_type)
        (sample,) = finished(running.url, "classic")
    episode = json.loads(printed.splitlines()[-1])
    assert episode["reward"] == 1 and episode["error"] == "None" and len(episode["turns"]) == 2
    last = episode["turns"][-1]
    assert last["prompt_ids"] + last["completion_ids"] == sample["tokens"]
    logprobs = [value for turn in episode["turns"] for value in turn["completion_logprobs"]]
    trained = [value for value, mask in zip(sample["engine_logprobs"], sample["loss_mask"], strict=True) if mask]
    assert trained == pytest.approx(logprobs, abs=1e-6)
