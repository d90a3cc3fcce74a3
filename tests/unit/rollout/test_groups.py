"""Several samples at once: the first error ends the others, and a rollout in which all failed ends the run.

test_manager.py makes whole groups.
"""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from slime_like.errors import RunError
from slime_like.records import COMPLETED, FAILED, Prompt, Sample, SampleGroup
from slime_like.rollout.groups import GroupOutcome, gather_or_cancel, refuse_if_all_failed


def outcome(*statuses: str) -> GroupOutcome:
    arrays = {name: np.zeros(1) for name in ("tokens", "loss_mask", "engine_logprobs", "weight_versions")}
    samples = tuple(
        Sample(
            prompt_index=0,
            sample_index=index,
            response="",
            status=status,
            error=f"error {index}" if status == FAILED else None,
            **arrays,
        )
        for index, status in enumerate(statuses)
    )
    return GroupOutcome(
        group=SampleGroup(prompt=Prompt(index=0, text="q", tokens=np.zeros(1)), samples=samples), num_failures=0
    )


def test_failed_samples_of_a_group():
    assert [sample.sample_index for sample in outcome(COMPLETED, FAILED, FAILED).failed] == [1, 2]


def test_one_good_sample_is_enough_to_go_on():
    refuse_if_all_failed([])
    refuse_if_all_failed([outcome(FAILED, FAILED), outcome(COMPLETED, FAILED)])
    with pytest.raises(RunError, match="all 3 samples failed. Last error: error 0"):
        refuse_if_all_failed([outcome(FAILED, FAILED), outcome(FAILED)])


def test_results_keep_their_order():
    async def later(value: int, turns: int) -> int:
        for _ in range(turns):
            await asyncio.sleep(0)
        return value

    async def main() -> list[int]:
        return await gather_or_cancel([later(1, 3), later(2, 0), later(3, 1)])

    assert asyncio.run(main()) == [1, 2, 3]


def test_the_first_error_cancels_the_others():
    ended = []

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cancelled")

    async def fails() -> None:
        await asyncio.sleep(0)
        raise RunError("the first one")

    async def main() -> None:
        await gather_or_cancel([waits(), fails(), waits()])

    with pytest.raises(RunError, match="the first one"):
        asyncio.run(main())
    assert ended == ["cancelled", "cancelled"]
