"""A scenario from a plan, before anything was measured: peak rates of an H100 and how much of them is usually had.

An order of magnitude, for the plan's verdict. A run's own measurements (measured.py) replace it.
"""

from __future__ import annotations

import dataclasses

from slime_like.config.model import ModelConfig
from slime_like.config.parallel import ParallelConfig
from slime_like.config.run import RunConfig
from slime_like.planning.memory.parameters import stage_parameters
from slime_like.planning.placement import PlacementPlan
from slime_like.planning.simulate.answer import Comparison, compare
from slime_like.planning.simulate.scenario import EnginePace, Scenario, TrainerPace, Workload
from slime_like.planning.simulate.spread import Spread
from slime_like.planning.sync_bound import SyncPlan, weight_bytes

#: Peak rates of one H100 SXM (NVIDIA H100 data sheet): operations a second in bf16 without sparsity, bytes a second.
CARD_FLOPS, CARD_MEMORY_RATE = 989e12, 3.35e12
#: Shares of the peak rates that training, prefill and decoding have. Assumptions, as published runs of dense models
#: have them (Llama 3, arXiv:2407.21783, table 4: 38 to 43 % in training).
TRAINING_SHARE, PREFILL_SHARE, DECODE_SHARE = 0.4, 0.5, 0.6
#: A decode step takes no less: kernels are launched, a scheduler runs.
LEAST_DECODE_S = 0.005
#: Prompt tokens of a sample, where only a limit of answers is known.
PROMPT_TOKENS = 512
#: Mean and 95th percentile of an answer, as shares of the longest that is allowed.
ANSWER_MEAN, ANSWER_P95 = 0.25, 0.7
#: The verdict simulates whole batches as arrays, never one event at a time: --plan answers at once.
_EXACT_SAMPLES = 1


def active_parameters(model: ModelConfig) -> float:
    """Parameters that one token meets: of experts only the chosen share."""
    whole = dataclasses.replace(model, make_vocab_size_divisible_by=1)
    share = model.moe_router_topk / model.num_experts if model.num_experts else 1.0
    return sum(
        parameter.numel * (share if ".local_experts." in parameter.name else 1.0)
        for parameter in stage_parameters(whole, ParallelConfig(), 0)
    )


def estimate(config: RunConfig, plan: PlacementPlan, sync: SyncPlan | None) -> Scenario | None:
    """What the run would be if the cards were H100s; None where it does not generate, train and sync."""
    if sync is None or not plan.engines or "actor" not in plan.roles or not config.model.is_known or config.is_sft:
        return None
    model, engine, rollout = config.model, plan.engines[0], config.rollout
    active = active_parameters(model)
    gpus_per_engine = max(1, len(engine.bundles)) if engine.bundles else config.placement.rollout_num_gpus_per_engine
    trainer_gpus = plan.roles["actor"].num_gpus
    # A decode step reads every weight once; each request adds its arithmetic, and its share of KV, which is left out.
    reading = weight_bytes(config) / (CARD_MEMORY_RATE * gpus_per_engine * DECODE_SHARE)
    # Forward, backward, and once more forward for each set of log-probs, and for what is recomputed.
    passes = 6 + 2 + 2 * bool(config.loss.use_kl_loss or config.loss.kl_coef)
    passes += 2 * (config.parallel.recompute_granularity == "full")
    longest = rollout.rollout_max_response_len
    answers = Spread("lognormal", (ANSWER_MEAN * longest, ANSWER_P95 * longest), limit=float(longest))
    return Scenario(
        work=Workload(
            batch=rollout.rollout_batch_size,
            group_size=rollout.n_samples_per_prompt,
            response_tokens=answers,
            prompt_tokens=PROMPT_TOKENS,
        ),
        engines=EnginePace(
            num_engines=len(plan.engines),
            slots=2 * rollout.rollout_batch_size * rollout.n_samples_per_prompt,  # all: what a cache holds is not known
            base_s=max(reading, LEAST_DECODE_S),
            per_request_s=2 * active / (CARD_FLOPS * gpus_per_engine * PREFILL_SHARE),
            prefill_s=2 * active / (CARD_FLOPS * gpus_per_engine * PREFILL_SHARE),
            gpus_per_engine=gpus_per_engine,
        ),
        trainer=TrainerPace(
            per_token_s=passes * active / (CARD_FLOPS * trainer_gpus * TRAINING_SHARE),
            sync_s=Spread.constant(sync.bound_s),
            num_gpus=trainer_gpus,
        ),
        colocated=plan.mode == "colocate",
        steps=4,
    )


def plan_comparison(scenario: Scenario) -> Comparison:
    """All modes, computed at once."""
    return compare(scenario, exact_samples=_EXACT_SAMPLES, next_gpu=False)


def verdict_line(scenario: Scenario) -> str:
    """The plan's one line."""
    line = f"async (estimate, as of H100 cards and answers of {scenario.work.response_tokens.mean:.0f} tokens): "
    return line + plan_comparison(scenario).verdict
