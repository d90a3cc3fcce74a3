"""The second proof of a weight sync: fixed prompts' log-probs from every engine against the trainer's own forward pass.

Digests prove that the engine holds what was sent; this proves that what was sent means to the engine what it means to
the trainer.
"""

from __future__ import annotations

import functools

import numpy as np

from slime_like.config.quantisation import PROBE_TOLERANCE, scheme_of
from slime_like.config.run import RunConfig
from slime_like.errors import WeightSyncError
from slime_like.records import TrainSample
from slime_like.sglang_backend.client import EngineClient
from slime_like.weight_sync.together import run_together

_NUM_PROMPTS = 2
_MAX_TOKENS = 32
#: SGLang refuses prompts that leave it fewer tokens than this.
_RESERVED_TOKENS = 8
_SEED = 1234
#: Mean |difference| that is still rounding. In bf16 that of a trained model of 135M parameters is 0.06 to 0.09, where
#: other weights of its shape give 3.5 and more.
_TOLERANCE_FP32, _TOLERANCE_BF16 = 1e-3, 0.3


def probe_samples(config: RunConfig) -> list[TrainSample]:
    """The same random token ids at every sync, in the form that the trainer scores."""
    context = (
        config.rollout.rollout_max_context_len or config.model.max_position_embeddings or _MAX_TOKENS + _RESERVED_TOKENS
    )
    length = max(2, min(_MAX_TOKENS, context - _RESERVED_TOKENS))
    generator = np.random.default_rng(_SEED)
    routed = None
    if config.loss.use_rollout_routing_replay:  # the trainer's routers choose for themselves, as the engine's do
        routed = np.full((length, config.model.num_layers, config.model.moe_router_topk), -1, dtype=np.int8)
    return [
        TrainSample(
            prompt_index=index,
            sample_index=0,
            tokens=generator.integers(0, config.model.vocab_size, length).astype(np.int32),
            loss_mask=np.ones(length, dtype=np.int8),
            engine_logprobs=np.zeros(length, dtype=np.float32),
            weight_versions=np.full(length, -1, dtype=np.int32),
            reward=0.0,
            advantages=np.zeros(length, dtype=np.float32),
            weights=np.ones(length, dtype=np.float32),
            routed_experts=routed,
        )
        for index in range(_NUM_PROMPTS)
    ]


def tolerance_of(config: RunConfig, *, bf16: bool) -> float:
    """The largest mean |log-prob difference| that is still rounding: the flag's, or of what rounds most."""
    # a transform is there to send something coarser than the trainer has
    rounds = bf16 or config.sync.custom_weight_transform_path
    default = _TOLERANCE_BF16 if rounds else _TOLERANCE_FP32
    if scheme_of(config.sync.rollout_quantization) is not None:
        default = PROBE_TOLERANCE
    return config.sync.verify_weight_sync_tolerance or default


def compare_probe(
    config: RunConfig,
    clients: list[EngineClient],
    samples: list[TrainSample],
    trainer: list[np.ndarray],
    *,
    version: int,
    bf16: bool,
    adapter: str | None = None,
) -> float:
    """Largest mean |log-prob difference| of a prompt between any engine and the trainer.

    trainer: [T] each, at temperature 1, entry 0 without meaning. bf16: whether it trains in it. adapter: the name of
    those that engines serve beside the base. Raises WeightSyncError
    naming the engine where it is above the tolerance, all of them.
    """
    timeout_s = config.sync.update_weight_timeout_s
    tasks = {
        f"engine {client.endpoint.index} at {client.url}": functools.partial(
            client.prompt_log_probs, [sample.tokens.tolist() for sample in samples], timeout_s, adapter
        )
        for client in clients
    }
    answers = run_together(tasks, timeout_s=timeout_s, who="driver", phase=f"probe weight version {version}")
    tolerance = tolerance_of(config, bf16=bf16)
    largest, wrong = 0.0, []
    for engine in tasks:
        differences = [
            float(np.abs(np.asarray(theirs) - ours[1:]).mean())
            for theirs, ours in zip(answers[engine], trainer, strict=True)
        ]
        if not all(difference <= tolerance for difference in differences):  # also where one is nan
            wrong.append(f"{engine}: {', '.join(f'{difference:.3g}' for difference in differences)}")
        largest = max(largest, *differences)
    if wrong:
        raise WeightSyncError(
            f"{len(wrong)} of {len(tasks)} engines do not compute with the trainer's weights (version {version}): over"
            f" fixed prompts their log-probs differ, on average by ({'; '.join(wrong)}); allowed is {tolerance:.3g}. No"
            " sample was generated. Fix: if only rounding differs, --verify-weight-sync-tolerance."
        )
    return largest
