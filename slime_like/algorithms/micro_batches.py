"""Samples of one train step -> balanced micro-batches per data parallel rank: pure, without torch or Megatron."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from slime_like.config.batch import BatchConfig

#: plan[data parallel rank][micro-batch] = positions of samples in the train step's list; an empty tuple is a filler.
Plan = tuple[tuple[tuple[int, ...], ...], ...]


def plan_micro_batches(
    lengths: Sequence[int],
    *,
    data_parallel_size: int,
    batch: BatchConfig,
    costs: Sequence[int] | None = None,
    count_multiple: int = 1,
) -> Plan:
    """Share samples out over the data parallel ranks and cut each share into micro-batches.

    lengths: tokens of each sample. costs: work of each sample; None: as much as it has tokens. Every rank gets the same
    number of micro-batches, filled up with empty ones where there are too few samples. With dynamic batches none
    exceeds max_tokens_per_gpu, except one over-long sample alone. Their number is a multiple of count_multiple. Which
    samples a rank gets does not depend on max_tokens_per_gpu.
    Deterministic: the same arguments give the same plan on every rank.
    """
    work = lengths if costs is None else costs
    if batch.balances_work(data_parallel_size):
        return _plan_by_cost(lengths, work, num_shares=data_parallel_size, cap=_cap(batch), multiple=count_multiple)
    ranks = range(data_parallel_size)
    if batch.balance_data:
        shares = _balanced_shares(lengths, data_parallel_size)
    else:
        shares = [list(range(rank, len(lengths), data_parallel_size)) for rank in ranks]
    if batch.use_dynamic_batch_size:
        packs = [_first_fit(share, lengths, _cap(batch)) for share in shares]
    else:
        size = batch.micro_batch_size
        packs = [[share[i : i + size] for i in range(0, len(share), size)] for share in shares]
    count = _up(max(1, *(len(p) for p in packs)) if packs else 1, count_multiple)
    if batch.balance_by_flops is None and batch.use_dynamic_batch_size and count > _least(lengths, _cap(batch)):
        # One rank, which nobody waits for: the samples stay in their order where that costs no micro-batch.
        fewer = _plan_by_cost(lengths, work, num_shares=1, cap=_cap(batch), multiple=count_multiple)
        if len(fewer[0]) < count:
            return fewer
    for rank in ranks:
        _split_up_to(packs[rank], count, lengths)
    return tuple(tuple(tuple(pack) for pack in packs[rank]) for rank in ranks)


def _cap(batch: BatchConfig) -> int:
    assert batch.max_tokens_per_gpu is not None, "BatchConfig.problems() asks for it"
    return batch.max_tokens_per_gpu


def imbalance(plan: Plan, costs: Sequence[int]) -> float:
    """How much more the busiest data parallel rank has to do than the mean: 0 is even, .5 means that the others wait a
    third of the time.
    """
    loads = [sum(costs[i] for pack in packs for i in pack) for packs in plan]
    return max(loads) * len(loads) / max(sum(loads), 1) - 1.0


def _plan_by_cost(lengths: Sequence[int], costs: Sequence[int], *, num_shares: int, cap: int, multiple: int) -> Plan:
    """Ranks with equal work, each cut into micro-batches of nearly equal work; the k-th of every rank are alike, the
    heaviest first.

    Alike because ranks that share experts wait for each other in every layer; the heaviest first so that memory is not
    broken into pieces by packs that grow. Sorting makes the result independent of the order of the samples.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-costs[i], -lengths[i], i))
    shares = [
        [order[place] for place in share] for share in largest_differencing([costs[i] for i in order], num_shares)
    ]
    fewest = [_fewest_packs(share, lengths, costs, cap) for share in shares]
    count = _up(max(1, *(len(packs) for packs in fewest)), multiple)
    packs = [
        _spread(share, lengths, costs, cap=cap, count=count) or few for share, few in zip(shares, fewest, strict=True)
    ]
    for rank in range(num_shares):
        _split_up_to(packs[rank], count, costs)
        packs[rank].sort(key=lambda pack: -sum(costs[i] for i in pack))
    return tuple(tuple(tuple(sorted(pack)) for pack in packs[rank]) for rank in range(num_shares))


def _least(lengths: Sequence[int], cap: int) -> int:
    """Packs that so many tokens fill; no packing needs fewer."""
    return _up(sum(min(length, cap) for length in lengths), cap) // cap


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def largest_differencing(costs: Sequence[int], num_shares: int) -> list[list[int]]:
    """Positions of `costs` in `num_shares` shares of nearly equal sum (Karmarkar and Karp 1982, the largest
    differencing method, k ways).

    Every cost starts as a division of its own; the two divisions whose shares differ most are joined, heaviest share to
    lightest, until one is left. Shares come heaviest first. Example: [8, 7, 6, 5, 4], 2 -> sums 16 and 14.
    """
    heap = [(-cost, place, [(cost, [place])] + [(0, [])] * (num_shares - 1)) for place, cost in enumerate(costs)]
    heapq.heapify(heap)
    number = len(heap)
    while len(heap) > 1:
        (_, _, one), (_, _, other) = heapq.heappop(heap), heapq.heappop(heap)
        joined = [(a + b, mine + theirs) for (a, mine), (b, theirs) in zip(one, reversed(other), strict=True)]
        joined.sort(key=lambda share: -share[0])
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], number, joined))
        number += 1
    return [sorted(share) for _, share in heap[0][2]] if heap else [[] for _ in range(num_shares)]


def _fewest_packs(share: list[int], lengths: Sequence[int], costs: Sequence[int], cap: int) -> list[list[int]]:
    """As few packs as two greedy searches find; spreading may fail where filling up succeeds (longest first: at most
    11/9 of the fewest, Johnson 1973).
    """
    filled = _first_fit(sorted(share, key=lambda i: -lengths[i]), lengths, cap)
    for count in range(_least([lengths[i] for i in share], cap), len(filled)):
        packs = _spread(share, lengths, costs, cap=cap, count=count)
        if packs is not None:
            return packs
    return _spread(share, lengths, costs, cap=cap, count=len(filled)) or filled


def _spread(
    share: list[int], lengths: Sequence[int], costs: Sequence[int], *, cap: int, count: int
) -> list[list[int]] | None:
    """`count` packs of nearly equal work: each sample, in the order given, to the pack with the least work that has
    room; None if one finds no room.
    """
    packs: list[list[int]] = [[] for _ in range(count)]
    tokens, work = [0] * count, [0] * count
    for index in share:
        roomy = [p for p in range(count) if not packs[p] or tokens[p] + lengths[index] <= cap]
        if not roomy:
            return None
        target = min(roomy, key=lambda p: (work[p], tokens[p], p))
        packs[target].append(index)
        tokens[target] += lengths[index]
        work[target] += costs[index]
    return packs


def _balanced_shares(lengths: Sequence[int], num_shares: int) -> list[list[int]]:
    """Greedy, longest first, each to the share with the fewest tokens.

    Within 4/3 of the best possible maximum (Graham, 1969).
    """
    shares: list[list[int]] = [[] for _ in range(num_shares)]
    totals = [0] * num_shares
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        target = min(range(num_shares), key=lambda r: (totals[r], len(shares[r]), r))
        shares[target].append(index)
        totals[target] += lengths[index]
    return [sorted(share) for share in shares]


def _first_fit(share: list[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Each sample into the first pack that has room for it."""
    packs: list[list[int]] = []
    totals: list[int] = []
    for index in share:
        fitting = (p for p, total in enumerate(totals) if total + lengths[index] <= max_tokens)
        target = next(fitting, None)
        if target is None:
            packs.append([index])
            totals.append(lengths[index])
        else:
            packs[target].append(index)
            totals[target] += lengths[index]
    return packs


def _split_up_to(packs: list[list[int]], count: int, lengths: Sequence[int]) -> None:
    """Halve the fullest divisible pack until there are `count`; append empty ones when none is left to halve."""
    while len(packs) < count:
        divisible = [p for p in packs if len(p) > 1]
        if not divisible:
            packs.append([])
            continue
        fullest = max(divisible, key=lambda p: sum(lengths[i] for i in p))
        halves = [[fullest[i] for i in half] for half in _balanced_shares([lengths[i] for i in fullest], 2)]
        position = packs.index(fullest)
        packs[position : position + 1] = halves
