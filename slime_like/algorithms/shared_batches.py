"""Groups of samples that share their prompts -> micro-batches per data parallel rank, by the tokens that are computed.

Groups stay together where that costs no balance; what is split has its prompt in each part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from slime_like.algorithms.micro_batches import largest_differencing
from slime_like.algorithms.shared_prompts import PromptGroup

#: Ranks whose work differs by less are not made more even by splitting another group, whose prompt is computed again.
EVEN_ENOUGH = 0.05

#: Parts of groups that a rank gets, tried until ranks are even: with many and small ones they are, but for single
#: samples.
PARTS_A_SHARE = (1, 2, 4, 8, 16, 32)

#: plan[data parallel rank][micro-batch] = groups, or parts of groups; an empty tuple is a filler.
SharedPlan = tuple[tuple[tuple[PromptGroup, ...], ...], ...]


def plan_shared_micro_batches(
    groups: Sequence[PromptGroup],
    *,
    data_parallel_size: int,
    most_tokens: int,
    cost: Callable[[PromptGroup], int],
    count_multiple: int = 1,
) -> SharedPlan:
    """Share groups out over the data parallel ranks, and cut each share into micro-batches of at most most_tokens.

    cost: the work of a group. A longer sample is a micro-batch alone. Every rank gets the same number of micro-batches,
    a multiple of count_multiple, filled up with empty ones. Which samples a rank gets does not depend on most_tokens.
    Deterministic.
    """
    packs = [_packs(share, most_tokens) for share in even_shares(groups, data_parallel_size, cost)]
    most = max(1, *(len(of_rank) for of_rank in packs))
    count = -(-most // count_multiple) * count_multiple
    for of_rank in packs:
        while len(of_rank) < count:
            _split_fullest(of_rank)
        of_rank.sort(key=lambda pack: -_tokens(pack))
    return tuple(tuple(tuple(pack) for pack in of_rank) for of_rank in packs)


def even_shares(
    groups: Sequence[PromptGroup], num_shares: int, cost: Callable[[PromptGroup], int]
) -> list[list[PromptGroup]]:
    """The groups in so many shares of nearly equal cost, cut into smaller parts as long as that helps.

    Example: one group on two ranks: half of its samples each, both with the prompt.
    """
    even = sum(map(cost, groups)) / num_shares
    best = _shares(groups, [[group] for group in groups], num_shares, cost)
    for parts_a_share in PARTS_A_SHARE:
        loads = [sum(map(cost, share)) for share in best]
        least = max(loads)
        if least * num_shares <= sum(loads) * (1 + EVEN_ENOUGH):
            break
        parts = [group.within(int(even / parts_a_share), cost) for group in groups]
        shares = _shares(groups, parts, num_shares, cost)
        if max(sum(map(cost, share)) for share in shares) < least:
            best = shares
    return best


def _shares(
    groups: Sequence[PromptGroup],
    parts: Sequence[Sequence[PromptGroup]],
    num_shares: int,
    cost: Callable[[PromptGroup], int],
) -> list[list[PromptGroup]]:
    """parts: of each group. Those that meet in one share come together again."""
    units = [(number, part) for number, own in enumerate(parts) for part in own]
    shares = largest_differencing([cost(part) for _, part in units], num_shares)
    return [_together(groups, [units[place] for place in share]) for share in shares]


def _together(groups: Sequence[PromptGroup], parts: Sequence[tuple[int, PromptGroup]]) -> list[PromptGroup]:
    """Parts of groups, each with its group's number -> one part of each group."""
    members: dict[int, set[int]] = {}
    for number, part in parts:
        members.setdefault(number, set()).update(part.samples)
    return [groups[number].only(samples) for number, samples in members.items()]


def _halves(group: PromptGroup) -> list[PromptGroup]:
    middle = len(group.samples) // 2
    return [group.part(0, middle), group.part(middle, len(group.samples))]


def _tokens(pack: Sequence[PromptGroup]) -> int:
    return sum(unit.tokens for unit in pack)


def _packs(share: Sequence[PromptGroup], most_tokens: int) -> list[list[PromptGroup]]:
    """As few as whole groups take; fewer, filled up with parts of groups, where that computes few prompts again."""
    whole, filled = _of_whole_groups(share, most_tokens), _filled_up(share, most_tokens)
    least, tokens = (sum(map(_tokens, packs)) for packs in (whole, filled))
    return filled if len(filled) < len(whole) and tokens <= least * (1 + EVEN_ENOUGH) else whole


def _of_whole_groups(share: Sequence[PromptGroup], most_tokens: int) -> list[list[PromptGroup]]:
    """Largest first, each into the first pack that has room (Johnson 1973: at most 11/9 of the fewest)."""
    units = [part for group in share for part in group.within(most_tokens)]
    packs: list[list[PromptGroup]] = []
    for unit in sorted(units, key=lambda unit: (-unit.tokens, unit.samples)):
        pack = next((pack for pack in packs if _tokens(pack) + unit.tokens <= most_tokens), None)
        if pack is None:
            packs.append([unit])
        else:
            pack.append(unit)
    return packs


def _filled_up(share: Sequence[PromptGroup], most_tokens: int) -> list[list[PromptGroup]]:
    """One group after the other, cut where a pack is full."""
    packs: list[list[PromptGroup]] = [[]]
    for group in share:
        first, size = 0, len(group.samples)
        while first < size:
            room = most_tokens - _tokens(packs[-1])
            fitting = next((stop for stop in range(size, first, -1) if group.part(first, stop).tokens <= room), None)
            if fitting is None and packs[-1]:
                packs.append([])
                continue
            stop = fitting or first + 1  # a sample above the cap is alone
            packs[-1].append(group.part(first, stop))
            first = stop
    return packs


def _split_fullest(packs: list[list[PromptGroup]]) -> None:
    """Halve the pack of most tokens that can be halved, between groups where it has several; else add an empty one."""
    divisible = [pack for pack in packs if sum(len(unit.samples) for unit in pack) > 1]
    if not divisible:
        packs.append([])
        return
    fullest = max(divisible, key=_tokens)
    packs.remove(fullest)
    if len(fullest) == 1:
        packs += [[half] for half in _halves(fullest[0])]
    else:
        packs += _shares(fullest, [[unit] for unit in fullest], 2, lambda unit: unit.tokens)
