"""Threads that work on the CUDA device of whoever starts them: by itself a new thread works on device 0."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def on_this_device(target: Callable[P, T]) -> Callable[P, T]:
    """`target` for another thread, where it first chooses the device that this thread has chosen.

    A process that has not used CUDA gets `target` itself.
    """
    torch = sys.modules.get("torch")  # the driver starts such threads too, and does without torch
    if torch is None or not torch.cuda.is_initialized():
        return target
    device = torch.cuda.current_device()

    @functools.wraps(target)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        torch.cuda.set_device(device)
        return target(*args, **kwargs)

    return run
