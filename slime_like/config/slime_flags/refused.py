"""Flags that run scripts of this kind use and that are not taken here: each with the reason and what to do instead."""

from __future__ import annotations

_MTP = (
    "layers that predict several tokens ahead are neither built nor trained. Fix: leave it out; engines may still"
    " speculate (--sglang-speculative-algorithm)."
)
_QWEN3_NEXT = "it belongs to families that are not supported (Qwen3-Next, Qwen3.5). Fix: a model of scripts/models."

_FREEZE = (
    "training a part of the weights is not supported: a pipeline stage, or a recomputed layer, may be left without any."
    " Fix: leave it out."
)

_WANDB = (
    "metrics are not sent to Weights & Biases. Fix: leave it out; `wandb sync --sync-tensorboard RUN_DIR/tensorboard`"
    " sends a run's."
)
_PROFILE = "memory and time are not recorded by the trainer. Fix: leave it out; trace.json has the phases of a run."
_CI = "it is for slime's own tests. Fix: leave it out."
_DEEPGEMM = "the trainer computes in bf16 or fp32. Fix: leave it out."
_MEGATRON_HOOK = "functions inside the trainer are those of docs/algorithms.md. Fix: leave it out, or one of these."
_HEALTH = (
    "an engine that dies ends the run, with its log; requests are tried again (--rollout-request-retries). Fix: leave"
    " it out, and resume from --load."
)
_BUFFER = "samples do not come from another server. Fix: --rollout-function-path makes groups from anywhere."

#: Flag -> why it is refused, and the fix. Their values are skipped.
REFUSED = {
    "--spec": (
        "layers follow from the model flags, not from a plugin. Fix: leave it out; GLM-4's further norms are"
        " --post-self-attn-layernorm --post-mlp-layernorm."
    ),
    "--use-stateless-adam": (
        "Adam's moments are always kept in memory. Fix: --reset-optimizer-states; with one step a rollout it computes"
        " the same update."
    ),
    "--only-train-params-name-list": _FREEZE,
    "--freeze-params-name-list": _FREEZE,
    "--multimodal-keys": "prompts are text only. Fix: leave it out, and take data without images.",
    "--prefill-num-servers": (
        "engines that only prefill are not started here. Fix: leave it out; or start prefill and decode engines by hand"
        " and use --rollout-external."
    ),
    "--allgather-cp": "it is for sparse attention (DeepSeek-V3.2, GLM-5), which is not supported. Fix: leave it out.",
    **dict.fromkeys(
        (
            "--use-wandb",
            "--wandb-mode",
            "--wandb-dir",
            "--wandb-key",
            "--wandb-host",
            "--wandb-team",
            "--wandb-group",
            "--wandb-project",
            "--wandb-run-id",
            "--disable-wandb-random-suffix",
            "--wandb-always-use-train-step",
        ),
        _WANDB,
    ),
    **dict.fromkeys(
        (
            "--memory-snapshot-dir",
            "--memory-snapshot-num-steps",
            "--profile-target",
            "--memory-recorder",
            "--record-memory-history",
        ),
        _PROFILE,
    ),
    **dict.fromkeys(
        (
            "--ci-test",
            "--ci-disable-kl-checker",
            "--ci-train-rollout-logprob-abs-diff-threshold",
            "--ci-save-grad-norm",
            "--ci-load-grad-norm",
        ),
        _CI,
    ),
    **dict.fromkeys(
        (
            "--megatron-deepgemm-forward-layers",
            "--megatron-deepgemm-forward-modules",
            "--megatron-deepgemm-moe-forward-layers",
            "--megatron-deepgemm-moe-forward-modules",
        ),
        _DEEPGEMM,
    ),
    **dict.fromkeys(
        (
            "--custom-megatron-init-path",
            "--custom-megatron-before-log-prob-hook-path",
            "--custom-megatron-before-train-step-hook-path",
            "--custom-model-provider-path",
        ),
        _MEGATRON_HOOK,
    ),
    **dict.fromkeys(
        (
            "--use-fault-tolerance",
            "--rollout-health-check-interval",
            "--rollout-health-check-timeout",
            "--rollout-health-check-first-wait",
        ),
        _HEALTH,
    ),
    **dict.fromkeys(("--rollout-buffer-url", "--fetch-trajectory-retry-times", "--rollout-task-type"), _BUFFER),
    "--release-train": "trainers stay for the whole run. Fix: leave it out; --colocate gives memory to and fro.",
    "--qwen-gdn-backend": _QWEN3_NEXT,
    "--freeze-indexer": "it is for sparse attention, which is not supported. Fix: leave it out.",
    "--custom-update-weight-post-write-path": (
        "--custom-weight-transform-path changes weights on their way. Fix: that, or leave it out."
    ),
    "--rollout-sample-hook-path": (
        "samples are not changed one by one. Fix: --custom-generate-function-path, or --rollout-function-path."
    ),
    "--rollout-data-postprocess-path": (
        "train samples are made on the rollout side. Fix: --custom-convert-samples-to-train-data-path."
    ),
    "--disable-rollout-global-dataset": "prompts come from somewhere. Fix: --data-source-path.",
    "--start-rollout-id": "a run goes on where its checkpoint stopped. Fix: --load, with --ckpt-step for an older one.",
    "--megatron-config-path": "roles differ by flags. Fix: --critic-lr and the like; --config for a file of flags.",
    "--log-reward-category": "rewards are numbers. Fix: --custom-rollout-log-function-path counts what you like.",
    "--load-debug-rollout-data-subsample": "recorded rollouts are taken whole. Fix: leave it out.",
    "--load-forge-rollout-data": "rollouts of other formats are not read. Fix: --data-source-path with a reader.",
    "--save-debug-train-data": "Fix: --save-debug-rollout-data keeps what train samples are made of.",
    "--dump-details": "Fix: --save-debug-rollout-data keeps rollouts; samples/ and logs/ are in the run directory.",
    "--padded-vocab-size": "it follows from the vocabulary. Fix: --make-vocab-size-divisible-by.",
    "--sglang-router-request-timeout-secs": "Fix: --rollout-request-timeout-s.",
    "--enable-mtp-training": _MTP,
    "--mtp-num-layers": _MTP,
    "--mtp-loss-scaling-factor": _MTP,
    "--apply-layernorm-1p": _QWEN3_NEXT,
    "--attention-output-gate": _QWEN3_NEXT,
    "--use-gated-attention": _QWEN3_NEXT,
}

#: Value of a known flag -> why that value is refused, and the fix.
REFUSED_VALUES = {
    (
        "--update-weight-delta-checksum",
        "blake3",
    ): "every tensor is checked with one digest, as fast as memory. Fix: xxh3-128.",
    (
        "--update-weight-delta-checksum",
        "adler32",
    ): "it misses changes that one digest of 128 bits finds as fast. Fix: xxh3-128.",
    ("--opd-type", "sglang"): (
        "the teacher is scored by the trainer, which holds its weights and swaps them in. Fix: --opd-type megatron with"
        " --opd-teacher-load."
    ),
    (
        "--advantage-estimator",
        "on_policy_distillation",
    ): "distillation is added to an estimator. Fix: --use-opd with --advantage-estimator grpo.",
    (
        "--update-weight-transport",
        "nccl",
    ): "this transport is called broadcast here (NCCL on GPUs, gloo on CPU hosts). Fix: broadcast.",
    ("--train-backend", "fsdp"): "Megatron is the only trainer. Fix: megatron.",
    ("--position-embedding-type", "learned_absolute"): "the supported families use rope. Fix: rope.",
    ("--position-embedding-type", "none"): "the supported families use rope. Fix: rope.",
    ("--optimizer", "sgd"): "only AdamW is supported. Fix: adam.",
    (
        "--moe-router-load-balancing-type",
        "sinkhorn",
    ): "it is not a policy's routing. Fix: none, aux_loss or seq_aux_loss.",
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
