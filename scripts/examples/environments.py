"""The environments of the examples: a tool, and a game. docs/agents.md says how to write your own."""

from __future__ import annotations

import random
import re

from slime_like.rollout.agents.environment import Task, Turn

_CALL = re.compile(r"<calc>(\d{1,9})([+*-])(\d{1,9})</calc>\Z")
_TOOL = {
    "type": "function",
    "function": {
        "name": "calc",
        "description": "One sum, difference or product.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}


class Calculator:
    """A calculator as a tool: the policy may calculate as often as it likes; its first other answer is scored.

    tags: calls are written <calc>1+2</calc>, for chat templates that know no tools; else in the model's own way.
    """

    def __init__(self, tags: bool = True):
        self._tags = tags
        self._label = ""

    def reset(self, seed: int, task: Task) -> Turn:
        """The row's question."""
        self._label = str(task.label)
        return Turn(messages=task.messages, tools=None if self._tags else [_TOOL])

    def step(self, answer: dict) -> Turn:
        """The tool's result; or the end, with reward 1 if the answer is the label."""
        text = answer["content"].strip()
        calls = [text] if text.startswith("<calc>") else []
        for call in answer.get("tool_calls") or []:
            calls.append(f"<calc>{str(call['function']['arguments'].get('expression')).replace(' ', '')}</calc>")
        if calls:
            return Turn(messages=[{"role": "tool", "content": _calculated(call)} for call in calls])
        return Turn(reward=float(text == self._label), done=True)


def _calculated(call: str) -> str:
    match = _CALL.match(call)
    if match is None:
        return "<result>error</result>"
    left, sign, right = int(match[1]), match[2], int(match[3])
    return f"<result>{left + right if sign == '+' else left - right if sign == '-' else left * right}</result>"


class Guess:
    """Guess a number of 0 to `most`: each guess is answered by higher, lower or correct. Fewer guesses, more reward."""

    def __init__(self, most: int = 9, guesses: int = 4):
        self._most, self._guesses = most, guesses
        self._secret = self._num_guesses = 0

    def reset(self, seed: int, task: Task) -> Turn:
        """Another number for each seed."""
        self._secret, self._num_guesses = random.Random(seed).randint(0, self._most), 0
        return Turn(messages=[{"role": "user", "content": f"guess 0-{self._most}"}])

    def step(self, answer: dict) -> Turn:
        """1 for the number, less 0.1 for each guess before it; 0.05 a turn for at least naming a number."""
        self._num_guesses += 1
        text = answer["content"].strip()
        is_number = text.isdecimal() and text.isascii() and len(text) < 10
        if is_number and int(text) == self._secret:
            return Turn(reward=1.0 - 0.1 * (self._num_guesses - 1), done=True, info={"guesses": self._num_guesses})
        reply = ("higher" if int(text) < self._secret else "lower") if is_number else "guess"
        return Turn(
            messages=[{"role": "user", "content": reply}],
            reward=0.05 * is_number,
            truncated=self._num_guesses == self._guesses,
        )
