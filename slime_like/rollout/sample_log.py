"""What a run's answers look like: a few of every rollout as JSON lines, the best and worst of them for the console."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from slime_like.records import Sample, SampleGroup
from slime_like.utils.files import write_atomic
from slime_like.utils.full_disk import LOST_WRITES

#: Characters of a prompt's end and of an answer that a console line shows.
_PROMPT_SHOWN, _ANSWER_SHOWN = 60, 160

Episode = tuple[SampleGroup, tuple[Sample, ...]]


class SampleLog:
    """Writes `rollout-<step>.jsonl` below a run's samples/. count: how many answers of each rollout; 0 writes nothing.

    tokenizer: says what the tokens of a span mean; None leaves their texts out.
    """

    def __init__(self, folder: Path, tokenizer: Any, count: int):
        self.folder, self._tokenizer, self._count = folder, tokenizer, count

    def write(self, step: int, groups: Sequence[SampleGroup]) -> Path | None:
        """One line a sample, the best answers first; its file, or None if nothing is to be written."""
        chosen = pick(groups, self._count)
        if not chosen:
            return None
        lines = [
            json.dumps(self._line(step, group, sample), default=str) for group, samples in chosen for sample in samples
        ]
        path = self.folder / f"rollout-{step}.jsonl"
        with LOST_WRITES.going_on(str(self.folder)):
            write_atomic(path, "".join(line + "\n" for line in lines))
        return path

    def best_and_worst(self, groups: Sequence[SampleGroup]) -> list[str]:
        """Two lines for a person; none where nothing is logged, one where there is but one answer."""
        chosen = pick(groups, min(self._count, 1) * 2)
        names = ("best", "worst")[: len(chosen)]
        return [
            f"  {name:<5} {segments[-1].reward:g}  {_end_of(group.prompt.text)} -> {_short(segments[-1].response)}"
            for name, (group, segments) in zip(names, chosen, strict=True)
        ]

    def _line(self, step: int, group: SampleGroup, sample: Sample) -> dict:
        return {
            "step": step,
            "prompt_index": sample.prompt_index,
            "sample_index": sample.sample_index,
            "segment_index": sample.segment_index,
            "status": sample.status,
            "reward": sample.reward,
            "reward_parts": sample.reward_parts,
            "label": sample.label,
            "prompt": group.prompt.text,
            "response": sample.response,
            "trained_tokens": sample.num_response_tokens,
            "weight_versions": sorted(set(sample.weight_versions[sample.loss_mask != 0].tolist())),
            "spans": [self._span(sample, begin, end) for begin, end in spans(sample.loss_mask)],
            "metadata": sample.metadata,
        }

    def _span(self, sample: Sample, begin: int, end: int) -> dict:
        tokens = sample.tokens[begin:end].tolist()
        span: dict[str, Any] = {"trained": bool(sample.loss_mask[begin])}
        if self._tokenizer is not None:
            span["text"] = self._tokenizer.decode(tokens)  # special tokens too: this is what the model saw
        if span["trained"]:
            span["logprob_mean"] = float(np.mean(sample.engine_logprobs[begin:end]))
        return span | {"tokens": tokens}


def pick(groups: Sequence[SampleGroup], count: int) -> list[Episode]:
    """`count` answers from the best to the worst reward, and evenly between; of equal rewards the first comes first.

    An answer is an episode: its group and its segments, compared by the reward of the last.
    Example: rewards [0, 1, .5, .2], 3 -> those with 1, .5 (or .2) and 0.
    """
    episodes = [(group, segments) for group in groups for segments in group.episodes]
    order = sorted(episodes, key=lambda episode: -(episode[1][-1].reward or 0.0))
    places = np.linspace(0, len(order) - 1, min(count, len(order))).round().astype(int)
    return [order[place] for place in places]


def spans(loss_mask: np.ndarray) -> list[tuple[int, int]]:
    """(begin, end) of the stretches of equal loss mask. Example: [0, 0, 1, 0] -> (0, 2) (2, 3) (3, 4)"""
    if not len(loss_mask):
        return []
    changes = np.flatnonzero(np.diff(np.asarray(loss_mask) != 0)) + 1
    edges = [0, *changes.tolist(), len(loss_mask)]
    return list(zip(edges, edges[1:], strict=False))


def _end_of(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _PROMPT_SHOWN else "…" + line[-_PROMPT_SHOWN:]


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _ANSWER_SHOWN else line[: _ANSWER_SHOWN // 2] + " … " + line[-_ANSWER_SHOWN // 2 :]
