"""gymnasium's environments with discrete actions, played in words: an observation is printed, an action is a number."""

from __future__ import annotations

import re
from typing import Any

import gymnasium
import numpy as np

from slime_like.errors import PluginError
from slime_like.rollout.agents.environment import Task, Turn

_NUMBER = re.compile(r"\d{1,6}")


class Gymnasium:
    """id: `Blackjack-v1`; options: of gymnasium.make. Another codec is a subclass with `say` and `action`."""

    def __init__(self, id: str, **options: Any):
        self._environment = gymnasium.make(id, **options)
        space = self._environment.action_space
        if not isinstance(space, gymnasium.spaces.Discrete):
            raise PluginError(
                f"--env gymnasium:{id}: has actions {space}; only Discrete ones have words. Fix: subclass."
            )
        self._first, self._num = int(space.start), int(space.n)

    def say(self, observation: Any) -> str:
        """An observation in words."""
        plain = np.asarray(observation).tolist() if not isinstance(observation, (tuple, dict)) else observation
        return f"Observation: {plain}. Action ({self._first} to {self._first + self._num - 1})?"

    def action(self, text: str) -> int | None:
        """The last number that is said, None if it is no action."""
        numbers = [int(number) for number in _NUMBER.findall(text)]
        return numbers[-1] if numbers and 0 <= numbers[-1] - self._first < self._num else None

    def reset(self, seed: int, task: Task) -> Turn:
        """The first observation."""
        observation, info = self._environment.reset(seed=seed % 2**31)
        return Turn(messages=[{"role": "user", "content": self.say(observation)}])

    def step(self, answer: dict) -> Turn:
        """The next one; what is no action changes nothing."""
        action = self.action(answer["content"])
        if action is None:
            return Turn(messages=[{"role": "user", "content": "That is no action."}])
        observation, reward, terminated, truncated, _ = self._environment.step(action)
        return Turn(
            messages=[{"role": "user", "content": self.say(observation)}],
            reward=float(reward),
            done=bool(terminated),
            truncated=bool(truncated),
        )

    def close(self) -> None:
        """Its own clean-up."""
        self._environment.close()
