"""What ranks tell each other over the pretended NCCL (gloo underneath), noted for each group in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from tests.pretend_gpu import streams
from tests.pretend_gpu.record import RECORD

#: One side's name -> the other's.
_SENDS, _RECEIVES = {"send"}, {"recv_"}
#: A peer has no part in these with our group's others.
_BETWEEN_TWO = _SENDS | _RECEIVES


def note(func, args: tuple, kwargs: dict) -> None:
    """Add one c10d operation to the record: its group's ranks, what and how much, on which stream."""
    operation = func._schema.name.removeprefix("c10d::")
    leaves = tree_leaves((args, kwargs))
    tensors = [x for x in leaves if isinstance(x, torch.Tensor) and x.numel()]
    groups = [x for x in leaves if isinstance(x, torch.ScriptObject) and "ProcessGroup" in str(x._type())]
    name, ranks = _group(groups[0]) if groups else ("?", ())
    detail: dict = {
        "operation": operation,
        "group": name,
        "ranks": ranks,
        "numbers": sum(x.numel() for x in tensors),
        "dtype": str(tensors[0].dtype).removeprefix("torch.") if tensors else "",
        "stream": streams.current().name,
    }
    if operation == "alltoall_base_":
        detail["numbers"] = 0  # each rank has its own; its splits say them
        (out, given), (takes, gives) = args[:2], args[3:5]
        row = out[:1].numel() or 1
        detail["takes"] = [n * row for n in takes] or [out.numel() // len(ranks)] * len(ranks)
        detail["gives"] = [n * row for n in gives] or [given.numel() // len(ranks)] * len(ranks)
    if operation in _BETWEEN_TWO:
        peer = next(x for x in args[1:] if isinstance(x, int))
        detail["peer"] = ranks[peer] if ranks else peer
        detail["rank"] = dist.get_rank()
    RECORD.note("collective", **detail)


def _group(boxed) -> tuple[str, tuple[int, ...]]:
    group = dist.ProcessGroup.unbox(boxed)
    names = dist.distributed_c10d._world.pg_names
    for known, name in names.items():
        if known == group or name == group.group_name:
            return name, tuple(dist.get_process_group_ranks(known))
    return group.group_name, ()


def differences(calls: Mapping[int, Sequence[dict]]) -> list[str]:
    """What would make real NCCL hang or mix data up. calls: rank -> the details of its "collective" events.

    Members of a group must call the same operations with the same amounts in the same order; what one sends, the other
    receives, in order.
    """
    by_group: dict[tuple, dict[int, list[tuple]]] = {}
    pairs: dict[tuple, dict[str, list[tuple]]] = {}
    for rank, details in calls.items():
        for detail in details:
            for place, peer in enumerate(detail["ranks"] if "gives" in detail else ()):
                sides = (
                    pairs.setdefault((rank, peer, detail["group"]), {}),
                    pairs.setdefault((peer, rank, detail["group"]), {}),
                )
                sides[0].setdefault("sent", []).append(detail["gives"][place])
                sides[1].setdefault("received", []).append(detail["takes"][place])
            what = (detail["operation"], detail["numbers"], detail["dtype"])
            if detail["operation"] in _BETWEEN_TWO:
                is_send = detail["operation"] in _SENDS
                pair = (rank, detail["peer"]) if is_send else (detail["peer"], rank)
                pairs.setdefault(pair, {}).setdefault("sent" if is_send else "received", []).append(what[1:])
            else:
                by_group.setdefault((detail["group"], detail["ranks"]), {}).setdefault(rank, []).append(what)
    problems = [
        f"rank {key[0]} -> {key[1]}: {sides}"
        for key, sides in pairs.items()
        if sides.get("sent") != sides.get("received")
    ]
    for (name, ranks), of_rank in by_group.items():
        first, *others = (of_rank.get(rank, []) for rank in ranks)
        for rank, other in zip(ranks[1:], others, strict=True):
            if first != other:
                place = next((i for i, (a, b) in enumerate(zip(first, other, strict=False)) if a != b), -1)
                problems.append(
                    f"group {name} of ranks {ranks}: rank {ranks[0]} made {len(first)} calls, rank {rank} {len(other)};"
                    f" first difference at {place}: {first[place : place + 1]} and {other[place : place + 1]}"
                )
    return problems
