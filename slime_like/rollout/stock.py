"""What a rollout side that works ahead has made between two rollouts, for a checkpoint: groups that wait, answers of
groups in the making, and its account.
"""

from __future__ import annotations

import dataclasses
import io
import json
import zipfile
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from slime_like.errors import DataError
from slime_like.records import Prompt, SampleGroup
from slime_like.rollout.debug_data import flatten, split
from slime_like.rollout.generate import Generation
from slime_like.rollout.group_flow import GroupFlow
from slime_like.rollout.group_pool import PoolState
from slime_like.rollout.groups import GroupOutcome
from slime_like.rollout.kept_answers import AnswerSlot, KeptAnswers
from slime_like.utils.files import write_atomic

#: Of an answer, what is no array.
_FIELDS = ("text", "status", "weight_version")

_Make = Callable[[Prompt], Coroutine[Any, Any, GroupOutcome]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stock:
    """Beside a ledger of the same moment."""

    groups: tuple[SampleGroup, ...]
    answers: tuple[AnswerSlot, ...]
    record: dict  # JSON: what is known of the groups, and the account


class AheadKeeper:
    """Of one flow. bound: --max-staleness, beyond which nothing is kept; None: there is none."""

    def __init__(self, bound: int | None):
        self._bound = bound
        self._answers = KeptAnswers()

    def keeping(self, make: _Make) -> _Make:
        """`make`, with its requests' answers kept as long as it goes on."""

        async def group(prompt: Prompt) -> GroupOutcome:
            with self._answers.group(prompt.index):
                return await make(prompt)

        return group

    def stock(self, flow: GroupFlow, trained_on: dict[int, int]) -> Stock:
        """Of now. trained_on: weight version -> rollouts that it was trained on."""
        state = flow.state()
        versions = {str(version): steps for version, steps in trained_on.items()}
        return Stock(groups=state.groups, answers=self._answers.slots(), record=state.record | {"trained_on": versions})

    def load(self, flow: GroupFlow, stock: Stock, step: int) -> dict[int, int]:
        """Go on with it in rollout `step`, after the ledger has; what `trained_on` was.

        Raises CheckpointError if the groups are not those of the ledger.
        """
        begun = {int(prompt): begun_with for prompt, begun_with in stock.record["begun_with"].items()}
        kept = [
            slot
            for slot in stock.answers
            if slot.prompt in begun and (self._bound is None or begun[slot.prompt] + self._bound >= step)
        ]
        self._answers.put(kept)
        flow.load(PoolState(groups=stock.groups, record=stock.record), {slot.prompt for slot in kept})
        return {int(version): steps for version, steps in stock.record["trained_on"].items()}


def save_answers(path: Path, slots: Sequence[AnswerSlot]) -> Path:
    """Write them as NumPy's npz; the path."""
    answers = [slot.answer for slot in slots]  # KeptAnswers.slots gives those that hold something
    described = [
        {"prompt": slot.prompt, "seed": slot.seed} | {name: getattr(slot.answer, name) for name in _FIELDS}
        for slot in slots
    ]
    versions = [np.zeros(0) if answer.weight_versions is None else answer.weight_versions for answer in answers]
    arrays: dict[str, Any] = {"described": np.frombuffer(json.dumps(described).encode(), dtype=np.uint8)}
    arrays |= flatten("sent", [np.array(slot.sent) for slot in slots], np.int64)
    arrays |= flatten("tokens", [np.array(answer.tokens) for answer in answers], np.int64)
    arrays |= flatten("logprobs", [np.array(answer.logprobs) for answer in answers], np.float64)
    arrays |= flatten("weight_versions", versions, np.int32)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    write_atomic(path, buffer.getvalue())
    return path


def load_answers(path: str | Path) -> tuple[AnswerSlot, ...]:
    """What save_answers wrote. Raises DataError."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        described = json.loads(arrays["described"].tobytes())
        columns = [split(name, arrays) for name in ("sent", "tokens", "logprobs", "weight_versions")]
        return tuple(
            AnswerSlot(
                prompt=int(one["prompt"]),
                seed=int(one["seed"]),
                sent=tuple(sent.tolist()),
                answer=Generation(
                    tokens=tokens.tolist(),
                    logprobs=logprobs.tolist(),
                    weight_versions=versions if len(versions) or not len(tokens) else None,
                    **{name: one[name] for name in _FIELDS},
                ),
            )
            for one, sent, tokens, logprobs, versions in zip(described, *columns, strict=True)
        )
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} is no file of kept answers: {type(error).__name__}: {error}") from error
