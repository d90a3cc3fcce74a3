"""Libraries of environments for an untrained model: whatever it says is a move, or an answer."""

from __future__ import annotations

from typing import Any

from slime_like.rollout.agents.adapters.reasoning_gym import ReasoningGym
from slime_like.rollout.agents.adapters.textarena import TextArena
from slime_like.rollout.agents.environment import Turn


def number_of(answer: dict) -> int:
    """What stands for a number in an answer of any bytes."""
    return sum(answer["content"].encode())


class TicTacToe(TextArena):
    """A square for anything that is said; it may be taken."""

    def __init__(self) -> None:
        super().__init__("TicTacToe-v0", num_players=2)

    def step(self, answer: dict) -> Turn:
        """The board after both moves."""
        return super().step(answer | {"content": f"[{number_of(answer) % 9}]"})


class LetterCounting(ReasoningGym):
    """How often a letter stands in a word: 0 to 2 for anything that is said."""

    def __init__(self, **options: Any) -> None:
        super().__init__("letter_counting", **options)

    def step(self, answer: dict) -> Turn:
        """The end, with the score."""
        return super().step(answer | {"content": f"<answer>{number_of(answer) % 3}</answer>"})
