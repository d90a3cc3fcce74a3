"""Flags that run scripts of this kind use and that are not taken here: each with the reason and what to do instead."""

from __future__ import annotations

_MTP = (
    "layers that predict several tokens ahead are neither built nor trained. Fix: leave it out; engines may still speculate (--sglang-speculative-algorithm)."
)
_QWEN3_NEXT = "it belongs to families that are not supported (Qwen3-Next, Qwen3.5). Fix: a model of scripts/models."
_DELTA = "weights are sent whole. Fix: leave it out; --update-weight-transport disk writes whole weights to --update-weight-disk-dir."

#: Flag -> why it is refused, and the fix. Their values are skipped.
REFUSED = {
    "--spec": (
        "layers follow from the model flags, not from a plugin. Fix: leave it out; GLM-4's further norms are --post-self-attn-layernorm --post-mlp-layernorm."
    ),
    "--model-name": "the family is read from config.json of --hf-checkpoint. Fix: leave it out.",
    "--rollout-function-path": (
        "the rollout loop is built in. Fix: --custom-generate-function-path for how a response is made, --loss-type sft_loss for supervised data."
    ),
    "--multimodal-keys": "prompts are text only. Fix: leave it out, and take data without images.",
    "--prefill-num-servers": (
        "engines that only prefill are not started here. Fix: leave it out; or start prefill and decode engines by hand and use --rollout-external."
    ),
    "--allgather-cp": "it is for sparse attention (DeepSeek-V3.2, GLM-5), which is not supported. Fix: leave it out.",
    "--enable-experimental": "nothing here is behind it. Fix: leave it out.",
    "--no-check-for-nan-in-loss-and-grad": "a step whose loss or gradients are not finite always ends the run before it spoils the weights. Fix: leave it out.",
    "--enable-mtp-training": _MTP,
    "--mtp-num-layers": _MTP,
    "--mtp-loss-scaling-factor": _MTP,
    "--apply-layernorm-1p": _QWEN3_NEXT,
    "--attention-output-gate": _QWEN3_NEXT,
    "--use-gated-attention": _QWEN3_NEXT,
    "--update-weight-delta-checksum": _DELTA,
    "--update-weight-delta-encoding": _DELTA,
    "--update-weight-local-checkpoint-dir": _DELTA,
}

#: Value of a known flag -> why that value is refused, and the fix.
REFUSED_VALUES = {
    ("--update-weight-mode", "delta"): _DELTA,
    ("--update-weight-transport", "nccl"): "this transport is called broadcast here (NCCL on GPUs, gloo on CPU hosts). Fix: broadcast.",
    ("--dynamic-sampling-filter-path", "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"): (
        "it is built in. Fix: slime_like.rollout.filters.reward_nonzero_std."
    ),
    ("--train-backend", "fsdp"): "Megatron is the only trainer. Fix: megatron.",
    ("--position-embedding-type", "learned_absolute"): "the supported families use rope. Fix: rope.",
    ("--position-embedding-type", "none"): "the supported families use rope. Fix: rope.",
    ("--optimizer", "sgd"): "only AdamW is supported. Fix: adam.",
    ("--moe-router-load-balancing-type", "sinkhorn"): "it is not a policy's routing. Fix: none, aux_loss or seq_aux_loss.",
}


def take_refused(argv: list[str]) -> tuple[list[str], list[str]]:
    """(the command line without refused flags and their values, one problem for each)."""
    rest: list[str] = []
    problems: list[str] = []
    skipping, flag = False, ""
    for text in argv:
        if text.startswith("--"):
            flag, equals, value = text.partition("=")
            skipping = flag in REFUSED
            if skipping:
                problems.append(f"{flag} is refused: {REFUSED[flag]}")
            elif equals and (flag, value) in REFUSED_VALUES:
                skipping = True
                problems.append(f"{flag} {value} is refused: {REFUSED_VALUES[flag, value]}")
        elif not skipping and (flag, text) in REFUSED_VALUES:
            rest.pop()  # the flag itself
            skipping = True
            problems.append(f"{flag} {text} is refused: {REFUSED_VALUES[flag, text]}")
        if not skipping:
            rest.append(text)
    return rest, problems
