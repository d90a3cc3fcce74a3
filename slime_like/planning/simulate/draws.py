"""What chance decides of each prompt: the same whatever the mode, the engines or the order of events."""

from __future__ import annotations

import dataclasses

import numpy as np

from slime_like.planning.simulate.scenario import Scenario

#: Prompts that are drawn at once.
_BLOCK = 256
#: Blocks that are remembered.
_KEPT = 64


@dataclasses.dataclass(frozen=True)
class PromptDraw:
    """One prompt's samples: tokens [G], turns [G], seconds of each environment call [G][turns - 1], of rewards [G]."""

    tokens: list[float]
    turns: list[int]
    environment_s: list[list[float]]
    reward_s: list[float]
    filtered: bool


class Draws:
    """prompt -> PromptDraw. By its place in the stream and the seed alone, so that two modes see the same work."""

    def __init__(self, scenario: Scenario):
        self._work, self._seed = scenario.work, scenario.seed
        self._plain = self._work.turns.is_constant and self._work.turns.lowest == 1
        self._blocks: dict[int, tuple] = {}
        self._sync_times, self._sync_generator = scenario.trainer.sync_s, self._generator(0, 5)
        self._syncs: list[float] = []

    def __getitem__(self, prompt: int) -> PromptDraw:
        block, row = divmod(prompt, _BLOCK)
        tokens, turns, environment, reward, filtered = self._block(block)
        num_samples = len(tokens[row])
        if self._plain:
            calls: list[list[float]] = [[]] * num_samples
        else:
            calls = [environment[row][i][: turns[row][i] - 1] for i in range(num_samples)]
        return PromptDraw(tokens[row], turns[row], calls, reward[row], filtered[row])

    def sync_s(self, number: int) -> float:
        """Of the sync with this number."""
        while len(self._syncs) <= number:
            self._syncs += self._sync_times.draw(self._sync_generator, (_BLOCK,)).tolist()
        return self._syncs[number]

    def arrays(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, reward seconds) of prompts first .. first + count - 1, [count, G] each."""
        blocks = range(first // _BLOCK, (first + count - 1) // _BLOCK + 1)
        begin = first - blocks[0] * _BLOCK
        numbers = [self._numbers(block) for block in blocks]
        tokens, reward = (np.concatenate([parts[i] for parts in numbers]) for i in (0, 3))
        return tokens[begin : begin + count], reward[begin : begin + count]

    def _block(self, block: int) -> tuple:
        if block not in self._blocks:
            if len(self._blocks) >= _KEPT:  # a run moves on; what is asked for again is drawn the same again
                del self._blocks[next(iter(self._blocks))]
            self._blocks[block] = tuple(
                numbers.tolist() if numbers is not None else None for numbers in self._numbers(block)
            )
        return self._blocks[block]

    def _numbers(self, block: int) -> tuple:
        """Arrays of a block's prompts. Every quantity has a generator of its own, so that none moves another's."""
        work, shape = self._work, (_BLOCK, self._work.group_size)
        tokens = np.maximum(1.0, np.round(work.response_tokens.draw(self._generator(block, 0), shape)))
        turns = np.maximum(1, np.round(work.turns.draw(self._generator(block, 1), shape))).astype(int)
        turns = np.minimum(turns, tokens.astype(int))  # a turn has a token
        environment = None
        if not self._plain:
            calls = (*shape, int(turns.max()) - 1)
            environment = work.environment_s.draw(self._generator(block, 2), calls)
        reward = work.reward_s.draw(self._generator(block, 3), shape)
        filtered = self._generator(block, 4).random(_BLOCK) < work.filtered_share
        return tokens, turns, environment, reward, filtered

    def _generator(self, block: int, quantity: int) -> np.random.Generator:
        return np.random.default_rng((self._seed, quantity, block))
