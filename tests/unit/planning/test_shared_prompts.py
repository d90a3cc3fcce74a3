"""What a plan says of shared prompts, counted by hand."""

from __future__ import annotations

from slime_like.config.batch import BatchConfig
from slime_like.config.run import RunConfig
from slime_like.planning.shared_prompts import shared_prompt_plan
from slime_like.planning.simulate.scenario import Workload
from slime_like.planning.simulate.spread import Spread

WORK = Workload(batch=2, group_size=4, response_tokens=Spread.constant(50), prompt_tokens=100)


def plan(asked: str, *, dynamic: bool = True):
    batch = BatchConfig(
        share_prompt=asked, use_dynamic_batch_size=dynamic, max_tokens_per_gpu=4096 if dynamic else None
    )
    return shared_prompt_plan(RunConfig(batch=batch), WORK)


def test_prompts_are_counted_once():
    shared = plan("auto")
    assert shared.to_dict() == {
        "is_on": True, "why_not": None, "prompt_tokens": 100, "tokens": 1200, "computed_tokens": 600,
    }  # fmt: skip
    assert shared.text() == (
        "shared prompts (prompts of 100 tokens): a rollout's 1200 tokens are trained on by computing 600"
    )


def test_why_they_are_not_is_said():
    off, impossible = plan("off"), plan("auto", dynamic=False)
    assert (off.computed_tokens, off.why_not) == (1200, "as asked")
    assert "off, as asked" in off.text()
    assert impossible.computed_tokens == 1200 and "--use-dynamic-batch-size" in impossible.why_not
