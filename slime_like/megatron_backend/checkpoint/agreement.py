"""Ranks that write agree on whether it went well, so that none waits for another in a collective that never comes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from safetensors import SafetensorError

from slime_like.errors import SaveError

#: What writing raises.
_FAILURES = (OSError, SafetensorError)
_T = TypeVar("_T")


def agreed(what: str, action: Callable[[], _T], *, writes: bool | None = None) -> list[_T | None]:
    """Do `action` on the ranks that write (None: on rank 0), and give what it gave on each, None for the others.

    Collective. Raises SaveError on every rank if one could not write.
    """
    rank, error, answer = torch.distributed.get_rank(), None, None
    if writes if writes is not None else rank == 0:
        try:
            answer = action()
        except _FAILURES as failure:
            error = f"rank {rank}: {type(failure).__name__}: {failure}"
    answers: list = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(answers, (error, answer))
    errors = [error for error, _ in answers if error]
    if errors:
        raise SaveError(f"{what} could not be written by {len(errors)} of {len(answers)} ranks. {'; '.join(errors)}")
    return [answer for _, answer in answers]
