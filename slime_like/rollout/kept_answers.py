"""What engines have answered for groups that are still being made, so that a checkpoint can hold it: a run that goes on
asks only for the rest.

Whoever makes a group stands in `KeptAnswers.group`; a client finds the slot of a request there by its seed and its
tokens, however deep in somebody's function it is asked. Outside, as in evaluations, nothing is kept.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass
class AnswerSlot:
    """One request, and what came of it so far."""

    prompt: int  # position of the group's prompt in the stream
    seed: int | None  # of the request
    sent: tuple[int, ...]  # its tokens
    #: a Generation (generate.py), whole, or as far as it was when we ended it (status "aborted"); None: nothing yet
    answer: Any = None


#: (prompt, slots of this process, those of the one that the checkpoint is of)
_Notes = tuple[int, list[AnswerSlot], list[AnswerSlot]]
_NOTES: contextvars.ContextVar[_Notes | None] = contextvars.ContextVar("kept answers", default=None)


def slot_of(sampling_params: Mapping[str, Any], tokens: Sequence[int] | np.ndarray) -> AnswerSlot:
    """Where the answer to this request is kept; with what an earlier process had of it.

    A request without a seed could be anybody's: it is not kept.
    """
    notes, seed = _NOTES.get(), sampling_params.get("sampling_seed")
    if notes is None or seed is None:
        return AnswerSlot(-1, None, ())
    prompt, own, earlier = notes
    slot = AnswerSlot(prompt, int(seed), tuple(map(int, tokens)))
    for number, before in enumerate(earlier):
        if (before.seed, before.sent) == (slot.seed, slot.sent):
            slot = earlier.pop(number)
            break
    own.append(slot)
    return slot


class KeptAnswers:
    """Of the groups that are being made, by prompt. Use it inside one event loop."""

    def __init__(self) -> None:
        self._own: dict[int, list[AnswerSlot]] = {}
        self._earlier: dict[int, list[AnswerSlot]] = {}

    @contextlib.contextmanager
    def group(self, prompt: int) -> Iterator[None]:
        """While this prompt's group is made."""
        own: list[AnswerSlot] = []
        self._own[prompt] = own
        before = _NOTES.set((prompt, own, self._earlier.pop(prompt, [])))
        try:
            yield
        finally:
            _NOTES.reset(before)
            if self._own.get(prompt) is own:  # else it was thrown away, and is being made again
                del self._own[prompt]

    def slots(self) -> tuple[AnswerSlot, ...]:
        """All that hold something, with those of an earlier process that nobody has asked for yet."""
        prompts = {**self._earlier, **self._own}
        return tuple(
            dataclasses.replace(slot)  # its answer goes on growing
            for prompt in sorted(prompts)
            for slot in prompts[prompt]
            if slot.answer is not None
        )

    def put(self, slots: Sequence[AnswerSlot]) -> None:
        """After a resume."""
        for slot in slots:
            self._earlier.setdefault(slot.prompt, []).append(slot)
