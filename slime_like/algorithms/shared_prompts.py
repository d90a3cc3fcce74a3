"""Samples that begin alike, laid out so that each token that several have in common is computed once: plain data,
without torch or Megatron.

A causal model gives a token the same hidden state in every sample whose tokens up to it are the same. So the samples of
a prompt form a tree: the prompt, then its answers; an episode's forks branch later. Each branch is computed once, and
sees the branches before it and itself. No token is told apart as prompt or answer: what is equal is shared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence

import numpy as np

from slime_like.algorithms.flops import TokenFlops
from slime_like.records import TrainSample

_Ranges = tuple[tuple[int, int], ...]
#: Fewer tokens in common are not worth a branch of their own.
LEAST_COMMON_TOKENS = 4
#: --share-prompt auto: the part of a train step's tokens that must be saved, so that it pays.
LEAST_SAVED = 0.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class Branch:
    """Tokens that lie in a row at [start, stop), after those at `before`, which they see.

    Example: an answer of two tokens behind a prompt of three: start 3, stop 5, before ((0, 3),): positions 3 and 4.
    """

    start: int
    stop: int
    before: _Ranges = ()

    @property
    def first_position(self) -> int:
        """Tokens before its own in the samples that have it."""
        return sum(stop - start for start, stop in self.before)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedRow:
    """The branches of some samples end to end, and where each sample's tokens are among them."""

    branches: tuple[Branch, ...]
    samples: tuple[int, ...]  # positions in the train step's list
    places: tuple[np.ndarray, ...]  # int64 [tokens of each of `samples`]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each branch."""
        return [branch.stop - branch.start for branch in self.branches]

    @property
    def shares(self) -> bool:
        """Whether any token stands for several samples."""
        return sum(self.lengths) < sum(len(places) for places in self.places)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptGroup:
    """Samples of one prompt in the order of their tokens, where neighbours have most in common.

    So any two have as many tokens in common as the least that neighbours between them have.
    """

    samples: tuple[int, ...]  # positions in the train step's list
    lengths: tuple[int, ...]
    common: tuple[int, ...]  # tokens that sample k and k + 1 share; one fewer than samples

    @property
    def tokens(self) -> int:
        """Tokens that are computed. Example: a prompt of 10 and answers of 2, 3 and 4: 19."""
        return sum(self.lengths) - sum(self.common)

    def flops(self, flops: TokenFlops) -> int:
        """What one forward pass over them takes."""
        return sum(map(flops.of, self.lengths)) - sum(map(flops.of, self.common))

    def part(self, first: int, stop: int) -> PromptGroup:
        """Its samples first to stop - 1."""
        return PromptGroup(
            samples=self.samples[first:stop], lengths=self.lengths[first:stop], common=self.common[first : stop - 1]
        )

    def only(self, samples: Collection[int]) -> PromptGroup:
        """Those of its samples."""
        kept: list[int] = []
        common: list[int] = []
        least = 0
        for place, sample in enumerate(self.samples):
            least = min(least, self.common[place - 1]) if place else 0
            if sample in samples:
                if kept:
                    common.append(least)
                kept.append(place)
                least = self.lengths[place]
        return PromptGroup(
            samples=tuple(self.samples[place] for place in kept),
            lengths=tuple(self.lengths[place] for place in kept),
            common=tuple(common),
        )

    def within(self, most: int, cost: Callable[[PromptGroup], int] | None = None) -> list[PromptGroup]:
        """Parts of at most so many tokens, or of that cost, as few as their order allows, each with the prompt; a
        sample that is more by itself is one alone.
        """
        parts, first = [], 0
        for stop in range(1, len(self.samples) + 1):
            longer = self.part(first, stop)
            if stop - first > 1 and (cost(longer) if cost else longer.tokens) > most:
                parts.append(self.part(first, stop - 1))
                first = stop - 1
        return [*parts, self.part(first, len(self.samples))]


def prompt_groups(samples: Sequence[TrainSample]) -> list[PromptGroup]:
    """The samples of a train step by prompt, as they came."""
    members: dict[int, list[int]] = {}
    for index, sample in enumerate(samples):
        members.setdefault(sample.prompt_index, []).append(index)
    return [_group(samples, indices) for indices in members.values()]


def saved(groups: Sequence[PromptGroup]) -> float:
    """Part of the tokens that need not be computed where every group is together: 0 to 1."""
    total = sum(length for group in groups for length in group.lengths)
    return 1 - sum(group.tokens for group in groups) / max(total, 1)


def shared_row(groups: Sequence[PromptGroup]) -> SharedRow:
    """The groups' branches end to end."""
    branches: list[Branch] = []
    places: dict[int, np.ndarray] = {}
    for group in groups:
        own, own_places = _branches_of(group, branches[-1].stop if branches else 0)
        branches += own
        places |= own_places
    return SharedRow(branches=tuple(branches), samples=tuple(places), places=tuple(places.values()))


def _group(samples: Sequence[TrainSample], indices: Sequence[int]) -> PromptGroup:
    # What makes two tokens at one position the same to the model: their id, and the experts that they are sent to.
    rows = {index: _inputs(samples[index]) for index in indices}
    order = sorted(indices, key=lambda index: (rows[index].tobytes(), index))
    common = [_in_common(rows[a], rows[b]) for a, b in zip(order, order[1:], strict=False)]
    return PromptGroup(
        samples=tuple(order),
        lengths=tuple(len(rows[index]) for index in order),
        common=tuple(_worthwhile(common)),
    )


def _inputs(sample: TrainSample) -> np.ndarray:
    """[T] big-endian, or [T, bytes] uint8, whose order as bytes is that of the tokens."""
    tokens = np.ascontiguousarray(sample.tokens, dtype=">u4")
    if sample.routed_experts is None:
        return tokens
    columns = (tokens, np.ascontiguousarray(sample.routed_experts).reshape(len(tokens), -1))
    return np.concatenate([column.view(np.uint8).reshape(len(tokens), -1) for column in columns], axis=1)


def _in_common(one: np.ndarray, other: np.ndarray) -> int:
    shorter = min(len(one), len(other))
    differs = one[:shorter] != other[:shorter]
    if differs.ndim > 1:
        differs = differs.any(axis=1)
    return int(differs.argmax()) if differs.any() else shorter


def _worthwhile(common: Sequence[int]) -> list[int]:
    """Without branches of fewer than LEAST_COMMON_TOKENS tokens: what neighbours have beyond the branch before.

    Example: 20, 22, 20 -> 20, 20, 20.
    """
    kept = list(common)
    blocks = [(0, len(kept), 0)]  # first and last neighbours, tokens that all in between have in common already
    while blocks:
        first, stop, depth = blocks.pop()
        start = first
        for place in range(first, stop + 1):
            if place < stop and common[place] >= depth + LEAST_COMMON_TOKENS:
                continue
            if start < place:
                blocks.append((start, place, min(common[start:place])))
            if place < stop:
                kept[place] = depth
            start = place + 1
    return kept


def _branches_of(group: PromptGroup, start: int) -> tuple[list[Branch], dict[int, np.ndarray]]:
    """(branches that begin at `start` in a row, place of each sample's tokens)."""
    branches: list[Branch] = []
    places: dict[int, np.ndarray] = {}

    blocks: list[tuple[int, int, int, _Ranges]] = [(0, len(group.samples), 0, ())]
    while blocks:
        first, stop, depth, before = blocks.pop()
        alone = stop - first == 1
        level = group.lengths[first] if alone else min(group.common[first : stop - 1])
        if level > depth:
            begin = branches[-1].stop if branches else start
            branches.append(Branch(start=begin, stop=begin + level - depth, before=before))
            before = (*before, (begin, begin + level - depth))
        if alone:
            places[group.samples[first]] = np.concatenate([np.arange(a, b) for a, b in before])
            continue
        ends = [place + 1 for place in range(first, stop) if place == stop - 1 or group.common[place] == level]
        starts = [first, *ends[:-1]]
        blocks += [(a, b, level, before) for a, b in zip(reversed(starts), reversed(ends), strict=True)]
    return branches, places
