"""From a prompt to its scored group of samples, in spite of requests that fail."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar

import aiohttp

from slime_like.errors import EngineError, RewardError, RunError
from slime_like.records import ABORTED, FAILED, Prompt, Sample, SampleGroup
from slime_like.rollout.generate import GenerationClient, Sampling
from slime_like.rollout.policy import Policy
from slime_like.rollout.prefill import is_worth, prefilled
from slime_like.rollout.rewards.overlong import punish_overlong
from slime_like.rollout.rewards.scorer import RewardScorer
from slime_like.rollout.sample_builder import FAULT, SampleBuilder

#: How often a sample whose request failed or was aborted is asked for again (each time with the client's own retries).
NUM_REGENERATIONS = 2
#: A custom generate function makes several requests: it gets this many times the deadline of one.
CUSTOM_DEADLINES = 10
#: Samples that are being made at a time, in multiples of the requests that engines take: enough for generation to go on
#: while rewards or tools take seven times as long, and few enough that a queue of any length costs no memory.
_AHEAD = 8

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupOutcome:
    """A prompt's samples, all scored.

    Those whose requests failed to the end have status "failed", no response and reward 0.
    """

    group: SampleGroup
    num_failures: int  # requests that failed or were aborted, also those that were made good later
    num_interrupted: int = 0  # requests that our own weight syncs ended; asked again, and no failures

    @property
    def failed(self) -> list[Sample]:
        """The samples that could not be had."""
        return [sample for sample in self.group.samples if sample.status == FAILED]

    @property
    def got_nothing(self) -> bool:
        """Whether engines answered none of its requests: perhaps they are gone."""
        return len(self.failed) == len(self.group.samples) and self.user_error is None

    @property
    def user_error(self) -> str | None:
        """What the user's own part (a reward, an environment, an agent, a function) has failed with; None if it has
        not.
        """
        return next((sample.error for sample in self.failed if sample.metadata.get(FAULT)), None)


class PlaysEpisodes(Protocol):
    """An environment's player, or a foreign agent's."""

    async def play(self, prompt: Prompt, index: int, sampling: Sampling) -> Sequence[Sample]:
        """The samples of one episode. Raises EngineError."""
        ...


@dataclasses.dataclass(frozen=True)
class _Episode:
    """One answer to a prompt: its samples, one or the segments of it, which share a reward."""

    segments: tuple[Sample, ...]
    num_failures: int
    num_interrupted: int

    @property
    def failed(self) -> bool:
        return self.segments[-1].status == FAILED

    def rewarded(self, last: Sample) -> _Episode:
        """The episode with the reward of its last segment, `last`, at each."""
        before = [dataclasses.replace(sample, reward=last.reward) for sample in self.segments[:-1]]
        return _Episode((*before, last), self.num_failures, self.num_interrupted)


class GroupMaker:
    """Generates and scores; raises only for faults of the user's own functions, with --on-reward-error fail, and never
    for a failed request.
    """

    def __init__(
        self,
        client: GenerationClient,
        scorer: RewardScorer,
        policy: Policy,
        *,
        plugin_args: Any,
        custom_generate: Callable | None,
        custom_timeout_s: float,
        player: PlaysEpisodes | None = None,
        evaluation: bool = False,
    ):
        self._client = client
        self._scorer = scorer
        self._policy = policy
        self._args = plugin_args
        self._custom_generate = custom_generate
        self._custom_timeout_s = custom_timeout_s
        self._player = player  # of --env or --serve-rollout
        self._evaluation = evaluation  # whose rewards have a key of their own

    async def group(self, prompt: Prompt, num_samples: int, sampling: Sampling) -> GroupOutcome:
        """Generate and score num_samples answers to one prompt."""
        is_plain = self._player is None and self._custom_generate is None
        prefills = is_plain and self._client.prefills and is_worth(prompt, num_samples)
        with prefilled(prompt) if prefills else contextlib.nullcontext():
            episodes = await gather_or_cancel([self._episode(prompt, index, sampling) for index in range(num_samples)])
        if self._scorer.config.group_rm:
            episodes = await self._scored_together(episodes, prompt, sampling)
        return GroupOutcome(
            group=SampleGroup(
                prompt=prompt, samples=tuple(sample for episode in episodes for sample in episode.segments)
            ),
            num_failures=sum(episode.num_failures for episode in episodes),
            num_interrupted=sum(episode.num_interrupted for episode in episodes),
        )

    async def groups(self, prompts: Sequence[Prompt], num_samples: int, sampling: Sampling) -> list[GroupOutcome]:
        """The groups of all prompts, in the prompts' order; groups_at_a_time of them at a time."""
        outcomes: dict[int, GroupOutcome] = {}
        numbered = enumerate(prompts)

        async def work() -> None:
            for number, prompt in numbered:  # one iterator for all workers: each takes the next
                outcomes[number] = await self.group(prompt, num_samples, sampling)

        workers = min(len(prompts), groups_at_a_time(self._client, num_samples))
        await gather_or_cancel([work() for _ in range(workers)])
        return [outcomes[number] for number in range(len(prompts))]

    async def _scored_together(self, episodes: list[_Episode], prompt: Prompt, sampling: Sampling) -> list[_Episode]:
        """The episodes with --group-rm's rewards; failed ones have theirs already and are not shown to the function."""
        last = [episode.segments[-1] for episode in episodes if not episode.failed]
        try:
            scored = iter(await self._scorer.score_group(last, prompt, evaluation=self._evaluation))
        except RewardError as error:
            return [_Episode((self._failed_by_user(prompt, i, error),), 0, 0) for i in range(len(episodes))]
        return [
            episode if episode.failed else episode.rewarded(self._shaped(next(scored), sampling))
            for episode in episodes
        ]

    async def _episode(self, prompt: Prompt, index: int, sampling: Sampling) -> _Episode:
        """One answer, scored unless --group-rm waits for its siblings.

        Only this one is asked for again: its siblings are good.
        """
        failures = interrupted = 0
        while True:
            changes = self._policy.num_changes
            segments = await self._generate(prompt, index, sampling)
            ended = {sample.status for sample in segments}
            if not ended & {FAILED, ABORTED}:
                episode = _Episode(tuple(segments), failures, interrupted)
                if self._scorer.config.group_rm:
                    return episode
                try:
                    scored = await self._scorer.score(segments[-1], prompt, evaluation=self._evaluation)
                except RewardError as of_user:
                    return _Episode((self._failed_by_user(prompt, index, of_user),), failures, interrupted)
                return episode.rewarded(self._shaped(scored, sampling))
            if any(sample.metadata.get(FAULT) for sample in segments) and self._scorer.config.drops_errors:
                return _Episode((segments[-1],), failures, interrupted)  # its prompt is asked again, if at all
            if FAILED not in ended and self._policy.explains_abort(changes):
                # Our own sync ended the request: that is no failure of the prompt's, and long answers meet it more
                # often.
                interrupted += 1
                await self._policy.settled(self._custom_timeout_s)
                continue
            failures += 1
            if failures > NUM_REGENERATIONS:
                error = next((sample.error for sample in segments if sample.error), "the engine aborted the request")
                return _Episode((SampleBuilder(prompt, index).fail(error),), failures, interrupted)

    def _failed_by_user(self, prompt: Prompt, index: int, error: RunError) -> Sample:
        """A failed sample for an error of the user's own part. Raises it with --on-reward-error fail."""
        if not self._scorer.config.drops_errors:
            raise error
        return SampleBuilder(prompt, index).fail(f"{type(error).__name__}: {error}", of_user=True)

    def _shaped(self, sample: Sample, sampling: Sampling) -> Sample:
        """The scored sample, punished for its length if that is asked for; never in evaluations."""
        return (
            sample
            if self._evaluation
            else punish_overlong(sample, self._scorer.config, max_response_tokens=sampling.max_response_tokens)
        )

    async def _generate(self, prompt: Prompt, index: int, sampling: Sampling) -> Sequence[Sample]:
        """The segments of one answer: one, but for an episode or a custom function that gives several."""
        request, builder = sampling.request(prompt, index), SampleBuilder(prompt, index)
        try:
            if self._player is not None:
                return await self._player.play(prompt, index, sampling)
            if self._custom_generate is not None:
                try:
                    return await self._custom(self._custom_generate, prompt, index, request)
                except EngineError:
                    raise
                except RunError as error:
                    return [self._failed_by_user(prompt, index, error)]
            sample = builder.generated(await self._client.generate(prompt.tokens, request)).finish()
        except (EngineError, aiohttp.ClientError, OSError) as error:  # OSError includes TimeoutError
            return [builder.fail(f"{type(error).__name__}: {error}")]
        # A request that was aborted before its first token is an abort, whatever ended it.
        if sample.num_response_tokens == 0 and sample.status != ABORTED:
            return [builder.fail(f"the engine gave no token (status {sample.status})")]
        return [sample]

    async def _custom(self, function: Callable, prompt: Prompt, index: int, request: dict) -> list[Sample]:
        where = f"--custom-generate-function-path, prompt {prompt.index}, sample {index}"
        try:
            async with asyncio.timeout(self._custom_timeout_s):
                answer = await function(self._args, prompt, request, self._client)
        except (EngineError, aiohttp.ClientError, OSError):
            raise  # a request or tool that failed: may be tried again
        except Exception as error:
            raise RunError(f"{where}: the function raised {type(error).__name__}: {error}") from error
        samples = list(answer) if isinstance(answer, (list, tuple)) else [answer]
        if not samples or not all(isinstance(sample, Sample) for sample in samples):
            kinds = [type(item).__name__ for item in samples]
            raise RunError(
                f"{where}: the function gave {kinds}; it must give one Sample, or a list of them: the segments of one"
                " answer."
            )
        return [self._checked(sample, prompt, index, number, where) for number, sample in enumerate(samples)]

    def _checked(self, sample: Sample, prompt: Prompt, index: int, segment: int, where: str) -> Sample:
        """A custom function's sample, numbered as what it is. Raises RunError if it cannot be trained on."""
        experts = sample.routed_experts
        if self._client.routing and sample.status not in (FAILED, ABORTED) and experts is None:
            if sample.loss_mask.any():
                raise RunError(
                    f"{where}: the sample has no routed_experts, which --use-rollout-routing-replay trains with. Fix:"
                    " pass on those of the last engine.generate (they cover all tokens that were sent and came), or"
                    " drop the flag."
                )
            experts = self._client.routing.unsaid(len(sample.tokens))
        return dataclasses.replace(
            sample, prompt_index=prompt.index, sample_index=index, segment_index=segment, routed_experts=experts
        )


def groups_at_a_time(client: GenerationClient, num_samples: int) -> int:
    """How many groups of num_samples are made at a time; more than the engines take, and bounded."""
    return max(1, -(-_AHEAD * client.concurrency // num_samples))


def refuse_if_all_failed(outcomes: Sequence[GroupOutcome]) -> None:
    """Raise RunError naming the last error if not one sample could be generated: the engines are gone, and trying on is
    in vain.
    """
    samples = [sample for outcome in outcomes for sample in outcome.group.samples]
    if samples and all(outcome.got_nothing for outcome in outcomes):
        raise RunError(f"rollout: all {len(samples)} samples failed. Last error: {samples[-1].error}")


async def gather_or_cancel(awaitables: Sequence[Awaitable[_T]]) -> list[_T]:
    """All results in order; at the first error the others are cancelled and waited for, then the error is raised."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
