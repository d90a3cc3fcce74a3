"""What --share-prompt saves a trainer, before anything was generated: counted for prompts and answers of one length."""

from __future__ import annotations

import dataclasses

from slime_like.config.run import RunConfig
from slime_like.config.share_prompt import cannot_share, changed_by_sharing, shares_prompts
from slime_like.planning.simulate.scenario import Workload


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedPromptPlan:
    """Tokens of a rollout's samples, and those that its train steps compute.

    Example: 2 prompts of 100 tokens with 4 answers of 50 each: 1200 tokens, of which 600 are computed.
    """

    is_on: bool
    why_not: str | None
    prompt_tokens: int
    tokens: int
    computed_tokens: int

    def to_dict(self) -> dict:
        """Its part of `--plan json`."""
        return dataclasses.asdict(self)

    def text(self) -> str:
        """One line."""
        line = f"shared prompts (prompts of {self.prompt_tokens} tokens): "
        if not self.is_on:
            return f"{line}off{'' if self.why_not is None else f', {self.why_not}'}"
        return f"{line}a rollout's {self.tokens} tokens are trained on by computing {self.computed_tokens}"


def shared_prompt_plan(config: RunConfig, work: Workload) -> SharedPromptPlan:
    """As if every group stayed together: one that is cut, above the token cap or among ranks, computes its prompt in
    each part.
    """
    is_on = shares_prompts(config)
    answers = work.batch * work.group_size * work.response_tokens.mean
    prompts = work.batch * work.prompt_tokens
    why_not = None
    if not is_on:
        asked_off = "as asked" if config.batch.share_prompt == "off" else None
        why_not = asked_off or cannot_share(config) or changed_by_sharing(config)
    return SharedPromptPlan(
        is_on=is_on,
        why_not=why_not,
        prompt_tokens=round(work.prompt_tokens),
        tokens=round(prompts * work.group_size + answers),
        computed_tokens=round(prompts * (1 if is_on else work.group_size) + answers),
    )
