"""skyrl-gym's environments (gsm8k, and those whose services you run)."""

from __future__ import annotations

from typing import Any

import skyrl_gym

from slime_like.rollout.agents.environment import Task, Turn


class SkyrlGym:
    """name: as registered with skyrl-gym. The row's messages and label are its prompt and ground truth; the row's
    metadata goes to it as `extras`, which may hold a reward_spec of its own.
    """

    def __init__(self, name: str, max_turns: int = 8):
        self._name, self._max_turns = name, max_turns
        self._environment: Any = None

    def reset(self, seed: int, task: Task) -> Turn:
        """The row's conversation, as the environment begins it."""
        spec = {"reward_spec": {"method": "rule", "ground_truth": str(task.label)}, "max_turns": self._max_turns}
        self._environment = skyrl_gym.make(self._name, extras=spec | task.metadata)
        messages, info = self._environment.init([dict(message) for message in task.messages])
        return Turn(messages=messages, info=dict(info))

    def step(self, answer: dict) -> Turn:
        """Its observations."""
        output = self._environment.step(answer["content"])
        return Turn(
            messages=[dict(message) for message in output["observations"]],
            reward=float(output["reward"]),
            done=bool(output["done"]),
            info=dict(output.get("metadata") or {}),
        )

    def close(self) -> None:
        """Its own clean-up."""
        if self._environment is not None:
            self._environment.close()
