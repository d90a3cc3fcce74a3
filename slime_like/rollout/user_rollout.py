"""What a rollout function, or an evaluation function, of the user's own works with (--rollout-function-path)."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from slime_like.records import Prompt, Sample, SampleGroup
from slime_like.rollout.generate import GenerationClient, Sampling
from slime_like.rollout.group_pool import Taken
from slime_like.rollout.groups import GroupMaker, GroupOutcome, refuse_if_all_failed
from slime_like.rollout.hooks import checked_metrics
from slime_like.rollout.ledger import IN_FLIGHT, READY, TAKEN
from slime_like.rollout.prompt_feed import PromptFeed
from slime_like.rollout.rewards.scorer import RewardScorer
from slime_like.utils.user_functions import Hook

#: The reason in the ledger for prompts that a rollout function drew and gave no group for.
NOT_RETURNED = "not_returned"

EvalSets = dict[str, tuple[SampleGroup, ...]]


class RolloutTools:
    """`rollout` in `async function(args, step, rollout) -> groups`.

    num_groups: --rollout-batch-size, what is usually wanted; any number of groups from 1 on will do. engine, sampling:
    as custom generate functions have them; `sampling.request(prompt, sample_index)` makes the parameters.
    A prompt that was drawn, and whose group is neither returned nor put back, is dropped and never seen again.
    """

    def __init__(
        self,
        feed: PromptFeed,
        maker: GroupMaker,
        scorer: RewardScorer,
        engine: GenerationClient,
        builtin: Callable[[int], Awaitable[Taken]],
        *,
        sampling: Sampling,
        num_groups: int,
        group_size: int,
    ):
        self.engine, self.sampling, self.num_groups = engine, sampling, num_groups
        self._feed, self._maker, self._scorer, self._builtin = feed, maker, scorer, builtin
        self._group_size = group_size
        self._drawn: set[int] = set()
        self._outcomes: dict[int, GroupOutcome] = {}
        self._dropped: collections.Counter[str] = collections.Counter()

    def draw(self, count: int) -> list[Prompt]:
        """The next prompts of the data."""
        prompts = self._feed.draw(count)
        self._drawn |= {prompt.index for prompt in prompts}
        return prompts

    def put_back(self, prompts: list[Prompt]) -> None:
        """They will be drawn again, before new ones."""
        indexes = {prompt.index for prompt in prompts}
        self._feed.ledger.put_back(sorted(indexes & self._drawn))
        self._drawn -= indexes

    async def group(self, prompt: Prompt, num_samples: int | None = None) -> SampleGroup:
        """Answers of one prompt, scored, as the flags say; requests that fail to the end leave "failed" samples."""
        with self.engine.activity.call():
            outcome = await self._maker.group(prompt, num_samples or self._group_size, self.sampling)
        self._outcomes[prompt.index] = outcome
        return outcome.group

    async def score(self, sample: Sample, prompt: Prompt) -> Sample:
        """A sample of one's own with its reward. Raises RewardError."""
        with self.engine.activity.call():
            return await self._scorer.score(sample, prompt)

    async def builtin(self, num_groups: int | None = None) -> list[SampleGroup]:
        """What would be trained on without this function, filters included."""
        with self.engine.activity.call():
            taken = await self._builtin(num_groups or self.num_groups)
        self._outcomes |= {outcome.group.prompt.index: outcome for outcome in taken.outcomes}
        self._dropped += taken.dropped
        self._drawn |= {group.prompt.index for group in taken.groups}
        return list(taken.groups)

    async def run(self, hook: Hook, args: Any, step: int) -> tuple[Taken, dict[str, float]]:
        """The function's groups, accounted for, and its own metrics. If it fails, what it drew is put back."""
        try:
            answer = await hook.awaited(args, step, self, activity=self.engine.activity)
            groups, metrics = answer if isinstance(answer, tuple) and len(answer) == 2 else (answer, {})
            self._check(hook, groups)
            metrics = checked_metrics(hook, metrics)
        except BaseException:
            self._feed.ledger.put_back(sorted(self._drawn))
            raise
        return self._settled(groups), metrics

    def _check(self, hook: Hook, groups: Any) -> None:
        if not isinstance(groups, (list, tuple)) or not groups or not all(isinstance(g, SampleGroup) for g in groups):
            raise hook.error(f"gave {str(groups)[:200]}; it must give a list of records.SampleGroup, at least one.")
        prompts = [group.prompt.index for group in groups]
        if len(set(prompts)) != len(prompts):
            raise hook.error(f"gave two groups of one prompt, of {sorted(prompts)}.")
        strangers = sorted(set(prompts) - self._drawn)
        if strangers:
            raise hook.error(f"gave groups of the prompts {strangers}, which it did not draw in this rollout.")
        for group in groups:
            for sample in group.samples:
                if sample.reward is None or sample.prompt_index != group.prompt.index:
                    what = "has no reward. Fix: await rollout.score(sample, prompt)"
                    if sample.prompt_index != group.prompt.index:
                        what = f"is in the group of prompt {group.prompt.index}"
                    raise hook.error(f"sample {sample.prompt_index}/{sample.sample_index} {what}.")
            if not group.samples:
                raise hook.error(f"the group of prompt {group.prompt.index} has no sample.")

    def _settled(self, groups: list[SampleGroup]) -> Taken:
        """The ledger knows what became of every prompt."""
        ledger = self._feed.ledger
        for group in groups:
            index = group.prompt.index
            before = self._outcomes.get(index, GroupOutcome(group=group, num_failures=0))
            self._outcomes[index] = dataclasses.replace(before, group=group)
            for state in (IN_FLIGHT, READY, TAKEN):
                if ledger.open[index] != TAKEN:
                    ledger.move(index, state)
        for index in sorted(self._drawn - {group.prompt.index for group in groups}):
            ledger.drop(index, NOT_RETURNED)
            self._dropped[NOT_RETURNED] += 1
        outcomes = tuple(self._outcomes[index] for index in sorted(self._outcomes))
        refuse_if_all_failed(outcomes)
        return Taken(groups=tuple(groups), outcomes=outcomes, dropped=self._dropped)


class EvalTools:
    """`evaluation` in `async function(args, step, evaluation) -> {set: groups}`.

    sets: name -> prompts of each evaluation set; any other name may be returned too.
    """

    def __init__(
        self,
        maker: GroupMaker,
        scorer: RewardScorer,
        engine: GenerationClient,
        *,
        sets: Mapping[str, list[Prompt]],
        sampling: Callable[[str], Sampling],
        num_samples: Callable[[str], int],
    ):
        self.engine, self.sets, self.sampling = engine, sets, sampling
        self._maker, self._scorer, self._num_samples = maker, scorer, num_samples

    async def group(self, name: str, prompt: Prompt, num_samples: int | None = None) -> SampleGroup:
        """Answers of one prompt, scored, as the flags say for the set of this name."""
        with self.engine.activity.call():
            outcome = await self._maker.group(prompt, num_samples or self._num_samples(name), self.sampling(name))
        return outcome.group

    async def score(self, sample: Sample, prompt: Prompt) -> Sample:
        """A sample of one's own with its reward in evaluations. Raises RewardError."""
        with self.engine.activity.call():
            return await self._scorer.score(sample, prompt, evaluation=True)

    async def run(self, hook: Hook, args: Any, step: int) -> tuple[EvalSets, dict[str, float]]:
        """The function's groups by set, and its own metrics."""
        answer = await hook.awaited(args, step, self, activity=self.engine.activity)
        sets, metrics = answer if isinstance(answer, tuple) and len(answer) == 2 else (answer, {})
        if not isinstance(sets, Mapping) or not sets:
            raise hook.error(f"gave {str(answer)[:200]}; it must give {{name of a set: list of records.SampleGroup}}.")
        for name, groups in sets.items():
            if not groups or not all(isinstance(g, SampleGroup) and g.samples for g in groups):
                raise hook.error(f"the set {name!r} is {str(groups)[:200]}; it must be a list of groups, at least one.")
            try:
                for group in groups:
                    _ = group.rewards
            except ValueError as error:
                raise hook.error(f"the set {name!r}: {error}. Fix: await evaluation.score(sample, prompt).") from error
        return {str(name): tuple(groups) for name, groups in sets.items()}, checked_metrics(hook, metrics)
