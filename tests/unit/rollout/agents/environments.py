"""Environments that behave, and some that do not."""

from __future__ import annotations

import asyncio
import threading
import time

from slime_like.rollout.agents.environment import Task, Turn

CLOSED: list[object] = []


class Echo:
    """Says the answer back; ends after `turns`, each worth `reward`. Remembers its seeds and threads."""

    seeds: list[int] = []
    threads: set[int] = set()

    def __init__(self, turns: int = 2, reward: float = 0.5):
        self.left, self.reward = turns, reward

    def reset(self, seed: int, task: Task) -> Turn:
        self.seeds.append(seed)
        return Turn(messages=task.messages)

    def step(self, answer: dict) -> Turn:
        self.threads.add(threading.get_ident())
        self.left -= 1
        echo = {"role": "user", "content": f"you said {answer['content']}"}
        return Turn(messages=[echo], reward=self.reward, done=self.left == 0, info={"left": self.left})

    def close(self) -> None:
        CLOSED.append(self)


class AsyncEcho(Echo):
    """The same as coroutines."""

    async def reset(self, seed: int, task: Task) -> Turn:  # type: ignore[override]
        return super().reset(seed, task)

    async def step(self, answer: dict) -> Turn:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().step(answer)


class Summarizes(Echo):
    """Replaces the history after the first answer."""

    def step(self, answer: dict) -> Turn:
        turn = super().step(answer)
        return Turn(
            messages=[{"role": "user", "content": f"so far: {answer['content']}"}],
            reward=turn.reward,
            done=turn.done,
            replaces_history=True,
        )


class Broken(Echo):
    """Does at its first step what `how` says."""

    def __init__(self, how: str):
        super().__init__()
        self.how = how

    def step(self, answer: dict):
        if self.how == "raises":
            raise ZeroDivisionError("the tool is gone")
        if self.how == "exits":
            raise SystemExit(0)
        if self.how == "stops":
            raise StopIteration
        if self.how == "hangs":
            time.sleep(30)
        answers = {
            "text": "done",
            "number": Turn(messages=[{"role": "user", "content": 7}]),  # type: ignore[dict-item]
            "role": Turn(messages=[{"role": "judge", "content": "x"}]),
            "nan": Turn(messages=[{"role": "user", "content": "x"}], reward=float("nan")),
            "silent": Turn(),
        }
        return answers[self.how]


class BlockingAsync(AsyncEcho):
    """Holds up its own event loop."""

    async def step(self, answer: dict) -> Turn:  # type: ignore[override]
        time.sleep(2)
        return Turn(done=True)


class Truncates(Echo):
    """Cuts the episode off itself."""

    def step(self, answer: dict) -> Turn:
        return Turn(reward=0.25, truncated=True)


class OffersTool(Echo):
    """Has one tool, whose calls it answers."""

    def reset(self, seed: int, task: Task) -> Turn:
        parameters = {"type": "object", "properties": {"expression": {"type": "string"}}}
        tool = {"type": "function", "function": {"name": "calc", "parameters": parameters}}
        return Turn(messages=task.messages, tools=[tool])

    def step(self, answer: dict) -> Turn:
        if calls := answer.get("tool_calls"):
            said = str(calls[0]["function"]["arguments"])
            return Turn(messages=[{"role": "tool", "content": said, "tool_call_id": calls[0]["id"]}])
        return Turn(reward=1.0, done=True)


class NoStep:
    """Is no environment."""

    def reset(self, seed: int, task: Task) -> Turn:
        return Turn(messages=task.messages)


class FailsOnce(Echo):
    """Its first episode raises, all others are played."""

    failed: list[bool] = []

    def step(self, answer: dict) -> Turn:
        if not self.failed:
            self.failed.append(True)
            raise ConnectionError("the service restarts")
        return super().step(answer)


class Talkative(Echo):
    """Opens with more than there is room for."""

    def reset(self, seed: int, task: Task) -> Turn:
        return Turn(messages=[{"role": "user", "content": "sort " * 200}])
