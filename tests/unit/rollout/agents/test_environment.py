"""Whatever an environment does, the rollout hears of it in time and by name."""

from __future__ import annotations

import asyncio
import pickle
import re
import time

import pytest

from slime_like.rollout.agents.environment import EnvironmentFailure, EnvironmentHost, Task
from slime_like.rollout.agents.registry import load_environment
from tests.unit.rollout.agents import environments as samples

TASK = Task(messages=[{"role": "user", "content": "hello"}])
ANSWER = {"role": "assistant", "content": "yes"}


def play(make, *, timeout_s: float = 5.0, steps: int = 1):
    """The turns of one environment, closed at the end."""

    async def run():
        host = EnvironmentHost(make, timeout_s=timeout_s, name="mine")
        environment = host.open("prompt 3, sample 1")
        try:
            return [await environment.reset(5, TASK), *[await environment.step(ANSWER) for _ in range(steps)]]
        finally:
            await environment.close()
            host.close()

    return asyncio.run(run())


@pytest.mark.parametrize("kind", [samples.Echo, samples.AsyncEcho])
def test_plain_and_async_environments_play_alike(kind):
    num_closed = len(samples.CLOSED)
    opening, first, second = play(kind, steps=2)
    assert opening.messages == TASK.messages and opening.tools is None
    assert first.messages[0]["content"] == "you said yes" and (first.reward, first.done) == (0.5, False)
    assert second.done and second.info == {"left": 0}
    assert len(samples.CLOSED) == num_closed + 1


def test_a_plain_environment_lives_in_one_thread_of_its_own():
    samples.Echo.threads.clear()
    play(lambda: samples.Echo(turns=5), steps=4)
    assert len(samples.Echo.threads) == 1


@pytest.mark.parametrize(
    "how, message",
    [
        ("raises", "raised ZeroDivisionError: the tool is gone"),
        ("exits", "raised SystemExit: 0"),
        ("stops", "raised StopIteration"),
        ("text", "gave a str, not a Turn"),
        ("number", "whose content is 7, no text"),
        ("role", "not a chat message with a role of system"),
        ("nan", "reward nan, which is no finite number"),
    ],
)
def test_a_fault_names_environment_call_and_sample(how, message):
    with pytest.raises(EnvironmentFailure, match=message) as caught:
        play(lambda: samples.Broken(how))
    assert str(caught.value).startswith("environment mine, step for prompt 3, sample 1: ")
    assert caught.value.kind == "error"


@pytest.mark.parametrize("make", [lambda: samples.Broken("hangs"), samples.BlockingAsync])
def test_one_that_hangs_meets_its_deadline_and_holds_up_nobody(make):
    begin = time.monotonic()
    with pytest.raises(EnvironmentFailure, match=r"no answer within 0.2 s \(--env-timeout-s\)") as caught:
        play(make, timeout_s=0.2)
    assert time.monotonic() - begin < 1.5 and caught.value.kind in ("timeout",)


def test_one_that_cannot_be_made_or_opens_with_nothing():
    with pytest.raises(EnvironmentFailure, match="__init__ for prompt 3, sample 1: raised TypeError"):
        play(lambda: samples.Broken())  # type: ignore[call-arg]
    with pytest.raises(EnvironmentFailure, match="gave no message to begin with"):
        asyncio.run(_reset_with_nothing())


async def _reset_with_nothing():
    environment = EnvironmentHost(samples.Echo, timeout_s=5.0, name="mine").open("here")
    await environment.reset(0, Task(messages=[]))


def test_the_environment_of_the_documentation_plays(repo_root, tmp_path, monkeypatch):
    """As it is written there, by the name and with the flags that are written there."""
    text = (repo_root / "docs/agents.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    num_lines = sum(bool(line.strip()) and not line.startswith("#") for line in code.splitlines())
    assert num_lines <= 10, "ten lines, it says"
    (tmp_path / "my_envs.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    (spec,) = re.findall(r"python train\.py … --env (my_envs:\w+) ", text)
    make = load_environment(spec)
    opening, answer = play(make)
    assert opening.messages[0]["content"] == "twice 6?" and (answer.reward, answer.done) == (0.0, False)
    environment = make()
    environment.reset(5, TASK)
    right = environment.step({"role": "assistant", "content": "12"})
    assert (right.reward, right.done) == (1.0, True)


def test_a_failure_survives_a_process_boundary():
    error = pickle.loads(pickle.dumps(EnvironmentFailure("gone", "timeout")))
    assert (str(error), error.kind) == ("gone", "timeout")
