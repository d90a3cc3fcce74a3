"""textarena's games: the policy is one player, the others make random moves, or repeat one move."""

from __future__ import annotations

import random
import re
from typing import Any

import textarena

from slime_like.rollout.agents.environment import Task, Turn

_BRACKETED = re.compile(r"\[[^\[\]]{1,40}\]")
#: Who says a line of an observation; no move.
_SPEAKER = re.compile(r"\[(GAME|Player -?\d+)\]")


class TextArena:
    """game: `TicTacToe-v0`. player: the policy's number. other: the others' move; None: one of those in brackets in the
    last line that shows them any, at random. The reward is the game's (1 won, 0 drawn, -1 lost), at its end.
    """

    def __init__(self, game: str, num_players: int = 1, player: int = 0, other: str | None = None):
        self._game, self._num_players, self._player, self._other = game, num_players, player, other
        self._environment: Any = None
        self._random = random.Random(0)
        self._shown = ""

    def reset(self, seed: int, task: Task) -> Turn:
        """The rules, and the board when it is the policy's turn."""
        self._random, self._shown = random.Random(seed), ""
        self._environment = textarena.make(self._game)
        self._environment.reset(num_players=self._num_players, seed=seed % 2**31)
        return self._until_our_turn(False)

    def step(self, answer: dict) -> Turn:
        """The moves of the others, and what they lead to."""
        done, _ = self._environment.step(action=answer["content"])
        return self._until_our_turn(done)

    def _until_our_turn(self, done: bool) -> Turn:
        while not done:
            player, text = self._environment.get_observation()
            if player == self._player:
                return Turn(messages=[{"role": "user", "content": self._new_part(str(text))}])
            moves = shown_moves(str(text)) or ["[0]"]
            done, _ = self._environment.step(action=self._other or self._random.choice(moves))
        rewards, info = self._environment.close()
        return Turn(reward=float((rewards or {}).get(self._player, 0.0)), done=True, info={"game": str(info)[:500]})

    def _new_part(self, text: str) -> str:
        """An observation without what the policy has seen: most games (textarena 0.7) tell all from the rules on."""
        new = text.removeprefix(self._shown)
        self._shown = text
        return new.strip() or text


def shown_moves(text: str) -> list[str]:
    """The moves in the last line of an observation that has any.

    Example: "[GAME] Board\\nAvailable Moves: '[0]', '[2]'" -> ["[0]", "[2]"]
    """
    for line in reversed(text.splitlines()):
        moves = [part for part in _BRACKETED.findall(line) if not _SPEAKER.fullmatch(part)]
        if moves:
            return moves
    return []
