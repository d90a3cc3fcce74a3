"""Batches."""

from __future__ import annotations

import dataclasses

from slime_like.config.base import flag

#: Tokens whose logits a GPU works on at once by default. Two fp32 tensors of [tokens, vocabulary] are alive meanwhile:
#: 1.2 GiB for a vocabulary of 152k, where 16384 tokens at once would be 18.6 GiB.
GPU_CHUNK_TOKENS = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """How a rollout is cut into train steps and micro-batches"""

    global_batch_size: int | None = flag(
        None,
        help="Samples per optimizer step. Default: the whole rollout / --num-steps-per-rollout.",
        least=1,
    )
    num_steps_per_rollout: int | None = flag(
        None,
        help="Optimizer steps per rollout. Default: samples per rollout / --global-batch-size, else 1.",
        least=1,
    )
    micro_batch_size: int = flag(1, help="Samples per micro-batch, without --use-dynamic-batch-size.", least=1)
    use_dynamic_batch_size: bool = flag(
        False, help="Pack samples into micro-batches of at most --max-tokens-per-gpu tokens."
    )
    max_tokens_per_gpu: int | None = flag(
        None,
        help="Tokens of a micro-batch on one GPU, with --use-dynamic-batch-size. A longer sample gets one of its own.",
        least=1,
    )
    qkv_format: str = flag(
        "thd",
        choices=("thd", "bshd"),
        help="Samples of a micro-batch end to end (thd), or padded to the longest, one a row (bshd).",
    )
    data_pad_size_multiplier: int = flag(
        1,
        help="Pad each micro-batch to a multiple of this times the tensor parallel size, in tokens.",
        least=1,
    )
    share_prompt: str = flag(
        "auto",
        choices=("auto", "on", "off"),
        help=(
            "Compute the tokens that samples of a prompt begin with once for all of them, not once a sample: the same"
            " loss and gradients from fewer tokens. auto: where no number changes and a train step has at least 5 %"
            " fewer tokens. Needs --use-dynamic-batch-size."
        ),
    )
    log_probs_chunk_size: int | None = flag(
        None,
        help=(
            "Turn logits into log-probs this many tokens at a time, which needs less memory; -1: all at once. Default:"
            f" {GPU_CHUNK_TOKENS} on GPUs, all at once on a CPU host, which works on a cache's worth anyway."
        ),
        least=-1,
    )
    log_probs_max_tokens_per_gpu: int | None = flag(
        None,
        help=(
            "As --max-tokens-per-gpu, for passes without gradients (log-probs, values), which need less memory."
            " Default: the same."
        ),
        least=1,
    )
    log_probs_micro_batch_size: int | None = flag(
        None, help="As --micro-batch-size, for passes without gradients. Default: the same.", least=1
    )
    balance_data: bool = flag(
        False,
        help=(
            "Give the data parallel ranks equal numbers of tokens instead of equal sample counts. Dynamic batches get"
            " equal work anyway, unless --no-balance-by-flops."
        ),
    )
    balance_by_flops: bool | None = flag(
        None,
        help=(
            "Give the data parallel ranks, and their micro-batches, equal work: the model's FLOPs of each sample."
            " Default: with --use-dynamic-batch-size, which it needs, and several data parallel ranks."
        ),
    )

    def balances_work(self, data_parallel_size: int) -> bool:
        """Whether ranks, and the micro-batches of each, get equal work."""
        if self.balance_by_flops is None:
            return self.use_dynamic_batch_size and data_parallel_size > 1
        return self.balance_by_flops

    def log_probs_chunk_tokens(self, *, on_gpu: bool) -> int | None:
        """Tokens whose logits become log-probs at once; None: all."""
        size = self.log_probs_chunk_size
        if size is None:
            return GPU_CHUNK_TOKENS if on_gpu else None
        return size if size > 0 else None

    @property
    def scoring(self) -> BatchConfig:
        """How passes without gradients are cut."""
        return dataclasses.replace(
            self,
            max_tokens_per_gpu=self.log_probs_max_tokens_per_gpu or self.max_tokens_per_gpu,
            micro_batch_size=self.log_probs_micro_batch_size or self.micro_batch_size,
        )

    def problems(self) -> list[str]:
        """What is impossible about the batch flags by themselves."""
        problems = []
        if self.log_probs_chunk_size is not None and self.log_probs_chunk_size < 1 and self.log_probs_chunk_size != -1:
            problems.append(
                f"--log-probs-chunk-size {self.log_probs_chunk_size}: must be at least 1, or -1 for all tokens at once."
            )
        if self.qkv_format == "bshd" and self.use_dynamic_batch_size:
            problems.append(
                "--use-dynamic-batch-size counts tokens laid end to end; --qkv-format bshd pads them. Fix:"
                " --micro-batch-size, or --qkv-format thd."
            )
        if self.use_dynamic_batch_size and not self.max_tokens_per_gpu:
            problems.append("--use-dynamic-batch-size needs --max-tokens-per-gpu.")
        if self.max_tokens_per_gpu and not self.use_dynamic_batch_size:
            problems.append("--max-tokens-per-gpu does nothing without --use-dynamic-batch-size. Fix: add it.")
        for name in ("log_probs_max_tokens_per_gpu", "balance_by_flops"):
            if getattr(self, name) and not self.use_dynamic_batch_size:
                problems.append(
                    f"--{name.replace('_', '-')} does nothing without --use-dynamic-batch-size. Fix: add it, with"
                    " --max-tokens-per-gpu."
                )
        if self.log_probs_micro_batch_size and self.use_dynamic_batch_size:
            problems.append(
                "--log-probs-micro-batch-size counts samples, and --use-dynamic-batch-size packs by tokens. Fix:"
                " --log-probs-max-tokens-per-gpu."
            )
        counts = (
            "global_batch_size",
            "num_steps_per_rollout",
            "micro_batch_size",
            "max_tokens_per_gpu",
            "log_probs_max_tokens_per_gpu",
            "log_probs_micro_batch_size",
        )
        for name in (*counts, "data_pad_size_multiplier"):
            value = getattr(self, name)
            if value is not None and value < 1:
                problems.append(f"--{name.replace('_', '-')} {value}: must be at least 1.")
        return problems
