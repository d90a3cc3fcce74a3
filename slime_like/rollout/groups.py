"""From a prompt to its scored group of samples, in spite of requests that fail."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import aiohttp

from slime_like.errors import EngineError, RunError
from slime_like.records import ABORTED, FAILED, Prompt, Sample, SampleGroup
from slime_like.rollout.generate import GenerationClient, Sampling, failed_sample, sample_from
from slime_like.rollout.rewards.overlong import punish_overlong
from slime_like.rollout.rewards.scorer import RewardScorer

#: How often a sample whose request failed or was aborted is asked for again (each time with the client's own retries).
NUM_REGENERATIONS = 2
#: A custom generate function makes several requests: it gets this many times the deadline of one.
CUSTOM_DEADLINES = 10

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupOutcome:
    """A prompt's samples, all scored. Those whose requests failed to the end have status "failed", no response and reward 0."""

    group: SampleGroup
    num_failures: int  # requests that failed or were aborted, also those that were made good later

    @property
    def failed(self) -> list[Sample]:
        """The samples that could not be had."""
        return [sample for sample in self.group.samples if sample.status == FAILED]


class GroupMaker:
    """Generates and scores; raises only for faults of the user's own functions, never for a failed request."""

    def __init__(
        self,
        client: GenerationClient,
        scorer: RewardScorer,
        *,
        plugin_args: Any,
        custom_generate: Callable | None,
        custom_timeout_s: float,
        evaluation: bool = False,
    ):
        self._client = client
        self._scorer = scorer
        self._args = plugin_args
        self._custom_generate = custom_generate
        self._custom_timeout_s = custom_timeout_s
        self._evaluation = evaluation  # whose rewards have a key of their own

    async def group(self, prompt: Prompt, num_samples: int, sampling: Sampling) -> GroupOutcome:
        """Generate and score num_samples answers to one prompt."""
        made = await gather_or_cancel([self._sample(prompt, index, sampling) for index in range(num_samples)])
        samples = [sample for sample, _ in made]
        if self._scorer.config.group_rm:
            samples = await self._scored_together(samples, prompt, sampling)
        return GroupOutcome(group=SampleGroup(prompt=prompt, samples=tuple(samples)), num_failures=sum(failures for _, failures in made))

    async def groups(self, prompts: Sequence[Prompt], num_samples: int, sampling: Sampling) -> list[GroupOutcome]:
        """The groups of all prompts, in the prompts' order."""
        return await gather_or_cancel([self.group(prompt, num_samples, sampling) for prompt in prompts])

    async def _scored_together(self, samples: list[Sample], prompt: Prompt, sampling: Sampling) -> list[Sample]:
        """The samples with --group-rm's rewards; failed ones have theirs already and are not shown to the function."""
        good = [sample for sample in samples if sample.status != FAILED]
        scored = iter(self._shaped(sample, sampling) for sample in await self._scorer.score_group(good, prompt, evaluation=self._evaluation))
        return [sample if sample.status == FAILED else next(scored) for sample in samples]

    async def _sample(self, prompt: Prompt, index: int, sampling: Sampling) -> tuple[Sample, int]:
        """(sample, scored unless --group-rm waits for its siblings, failures on the way). Only this sample is asked for again: its siblings are good."""
        failures = 0
        while True:
            sample = await self._generate(prompt, index, sampling)
            if sample.status not in (FAILED, ABORTED):
                if self._scorer.config.group_rm:
                    return sample, failures
                return self._shaped(await self._scorer.score(sample, prompt, evaluation=self._evaluation), sampling), failures
            failures += 1
            if failures > NUM_REGENERATIONS:
                return failed_sample(prompt, index, sample.error or "the engine aborted the request"), failures

    def _shaped(self, sample: Sample, sampling: Sampling) -> Sample:
        """The scored sample, punished for its length if that is asked for; never in evaluations."""
        return sample if self._evaluation else punish_overlong(sample, self._scorer.config, max_response_tokens=sampling.max_response_tokens)

    async def _generate(self, prompt: Prompt, index: int, sampling: Sampling) -> Sample:
        request = sampling.request(prompt, index)
        try:
            if self._custom_generate is not None:
                return await self._custom(self._custom_generate, prompt, index, request)
            generation = await self._client.generate(prompt.tokens, request)
        except (EngineError, aiohttp.ClientError, OSError) as error:  # OSError includes TimeoutError
            return failed_sample(prompt, index, f"{type(error).__name__}: {error}")
        sample = sample_from(prompt, index, generation)
        if sample.num_response_tokens == 0:
            return failed_sample(prompt, index, f"the engine gave no token (status {sample.status})")
        return sample

    async def _custom(self, function: Callable, prompt: Prompt, index: int, request: dict) -> Sample:
        where = f"--custom-generate-function-path, prompt {prompt.index}, sample {index}"
        try:
            async with asyncio.timeout(self._custom_timeout_s):
                made = await function(self._args, prompt, request, self._client)
        except (EngineError, aiohttp.ClientError, OSError):
            raise  # a request or tool that failed: may be tried again
        except Exception as error:
            raise RunError(f"{where}: the function raised {type(error).__name__}: {error}") from error
        samples = made if isinstance(made, (list, tuple)) else [made]
        if len(samples) != 1 or not isinstance(samples[0], Sample):
            kinds = [type(item).__name__ for item in samples]
            raise RunError(f"{where}: the function gave {kinds}; it must give one Sample (batch sizes count one per request).")
        sample = samples[0]
        experts = sample.routed_experts
        if self._client.routing and sample.status not in (FAILED, ABORTED) and experts is None:
            if sample.loss_mask.any():
                raise RunError(
                    f"{where}: the sample has no routed_experts, which --use-rollout-routing-replay trains with. Fix: pass on those of the last "
                    "engine.generate (they cover all tokens that were sent and came), or drop the flag."
                )
            experts = self._client.routing.unsaid(len(sample.tokens))
        return dataclasses.replace(sample, prompt_index=prompt.index, sample_index=index, routed_experts=experts)


def refuse_if_all_failed(outcomes: Sequence[GroupOutcome]) -> None:
    """Raise RunError naming the last error if not one sample could be generated: the engines are gone, and trying on is in vain."""
    samples = [sample for outcome in outcomes for sample in outcome.group.samples]
    if samples and all(sample.status == FAILED for sample in samples):
        raise RunError(f"rollout: all {len(samples)} samples failed. Last error: {samples[-1].error}")


async def gather_or_cancel(awaitables: Sequence[Awaitable[_T]]) -> list[_T]:
    """All results in order; at the first error the others are cancelled and waited for, then the error is raised."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
