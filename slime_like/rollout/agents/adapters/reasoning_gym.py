"""reasoning-gym's tasks: as an environment of one turn, as prompts (`--prompt-data rg:…`), and their score."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from slime_like.errors import DataError
from slime_like.rollout.agents.environment import Task, Turn

_ASK = "Think if you need to, then give only the answer between <answer> and </answer>."


class ReasoningGym:
    """One question, one answer. task: `chain_sum`; options: the task's own (`min_terms=2`).

    A row of `--prompt-data rg:…` is asked as it stands; any other prompt gives a new question by its seed.
    """

    def __init__(self, task: str, **options: Any):
        self._task, self._options = task, options
        self._entry: Mapping = {}

    def reset(self, seed: int, task: Task) -> Turn:
        """The question."""
        row = task.metadata.get("reasoning_gym")
        if row:
            self._task, self._options, self._entry = row["task"], row["options"], row["entry"]
            return Turn(messages=task.messages)
        options = self._options | {"seed": seed, "size": 1}
        self._entry = make_dataset(self._task, options, where=f"--env reasoning-gym:{self._task}")[0]
        return Turn(messages=[{"role": "user", "content": f"{self._entry['question']}\n{_ASK}"}])

    def step(self, answer: dict) -> Turn:
        """The end, with the score."""
        return Turn(reward=score(self._task, self._options, self._entry, answer["content"]), done=True)


def reward(args: Any, sample: Any) -> float:
    """`--custom-rm-path slime_like.rollout.agents.adapters.reasoning_gym.reward`, for rows of `--prompt-data rg:…`."""
    row = sample.metadata["reasoning_gym"]
    return score(row["task"], row["options"], row["entry"], sample.response)


def score(task: str, options: Mapping, entry: Mapping, said: str) -> float:
    """The task's own score of what is between <answer> tags, or of the whole where there are none; 0 to 1.

    Guarded: reasoning-gym (0.1.25) pays len(answer) / len(reply) for any text that has the answer in it, in some tasks
    after taking the commas out; and some raise on an answer that they cannot read. All of that earns 0 here.
    """
    reply = said.rpartition("<answer>")[2].partition("</answer>")[0].strip()
    if not reply:
        return 0.0
    dataset = _dataset(task, json.dumps(dict(options), sort_keys=True))
    try:
        value = float(dataset.score_answer(reply, dict(entry)))
    except Exception:  # noqa: BLE001 an answer may be anything, and so may be what reading it raises
        return 0.0
    answer = str(entry["answer"])
    for text, held in ((reply, answer), (reply.replace(",", ""), answer.replace(",", ""))):
        if text and text != held and held in text and abs(value - len(held) / len(text)) < 1e-9:
            return 0.0
    return min(1.0, max(0.0, value))


def make_dataset(task: str, options: Mapping, *, where: str) -> Sequence[Mapping]:
    """The task's questions. Raises DataError if reasoning-gym has no such task, or not with these options."""
    try:
        return _dataset(task, json.dumps(dict(options), sort_keys=True))
    except ImportError as error:
        raise DataError(f"{where}: {error}. Fix: pip install reasoning-gym (or slime-like[envs]).") from error
    except (AssertionError, TypeError, ValueError) as error:
        raise DataError(f"{where}: reasoning-gym refuses it: {type(error).__name__}: {error}") from error


@functools.lru_cache(maxsize=256)
def _dataset(task: str, options: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(task, **json.loads(options))
