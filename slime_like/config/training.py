"""Batches, optimizer, checkpoints and the loss."""

from __future__ import annotations

import dataclasses
import os

from slime_like.config.base import flag
from slime_like.config.loss import LossConfig

__all__ = ["BatchConfig", "CheckpointConfig", "LossConfig", "OptimizerConfig"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """How a rollout is cut into train steps and micro-batches"""

    global_batch_size: int | None = flag(None, help="Samples per optimizer step. Default: the whole rollout / --num-steps-per-rollout.")
    num_steps_per_rollout: int | None = flag(None, help="Optimizer steps per rollout. Default: samples per rollout / --global-batch-size, else 1.")
    micro_batch_size: int = flag(1, help="Samples per micro-batch, without --use-dynamic-batch-size.")
    use_dynamic_batch_size: bool = flag(False, help="Pack samples into micro-batches of at most --max-tokens-per-gpu tokens.")
    max_tokens_per_gpu: int | None = flag(None, help="Tokens of a micro-batch on one GPU, with --use-dynamic-batch-size. A longer sample gets one of its own.")
    qkv_format: str = flag("thd", choices=("thd", "bshd"), help="Samples of a micro-batch end to end (thd), or padded to the longest, one a row (bshd).")
    data_pad_size_multiplier: int = flag(1, help="Pad each micro-batch to a multiple of this times the tensor parallel size, in tokens.")
    log_probs_chunk_size: int = flag(-1, help="Turn logits into log-probs this many tokens at a time, which needs less memory; -1: all at once.")
    log_probs_max_tokens_per_gpu: int | None = flag(
        None, help="As --max-tokens-per-gpu, for passes without gradients (log-probs, values), which need less memory. Default: the same."
    )
    balance_data: bool = flag(False, help="Give the data parallel ranks equal numbers of tokens instead of equal sample counts.")
    balance_by_flops: bool = flag(
        False, help="Give the data parallel ranks, and their micro-batches, equal work: the model's FLOPs of each sample. Needs --use-dynamic-batch-size."
    )

    def problems(self) -> list[str]:
        """What is impossible about the batch flags by themselves."""
        found = []
        if self.log_probs_chunk_size < 1 and self.log_probs_chunk_size != -1:
            found.append(f"--log-probs-chunk-size {self.log_probs_chunk_size}: must be at least 1, or -1 for all tokens at once.")
        if self.qkv_format == "bshd" and self.use_dynamic_batch_size:
            found.append("--use-dynamic-batch-size counts tokens laid end to end; --qkv-format bshd pads them. Fix: --micro-batch-size, or --qkv-format thd.")
        if self.use_dynamic_batch_size and not self.max_tokens_per_gpu:
            found.append("--use-dynamic-batch-size needs --max-tokens-per-gpu.")
        if self.max_tokens_per_gpu and not self.use_dynamic_batch_size:
            found.append("--max-tokens-per-gpu does nothing without --use-dynamic-batch-size. Fix: add it.")
        for name in ("log_probs_max_tokens_per_gpu", "balance_by_flops"):
            if getattr(self, name) and not self.use_dynamic_batch_size:
                found.append(f"--{name.replace('_', '-')} does nothing without --use-dynamic-batch-size. Fix: add it, with --max-tokens-per-gpu.")
        counts = ("global_batch_size", "num_steps_per_rollout", "micro_batch_size", "max_tokens_per_gpu", "log_probs_max_tokens_per_gpu")
        for name in (*counts, "data_pad_size_multiplier"):
            value = getattr(self, name)
            if value is not None and value < 1:
                found.append(f"--{name.replace('_', '-')} {value}: must be at least 1.")
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Optimizer and learning rate (Megatron's names)"""

    train_backend: str = flag("megatron", choices=("megatron",), help="What trains.")
    optimizer: str = flag("adam", choices=("adam",), help="AdamW with decoupled weight decay.")
    lr: float = flag(1e-6, help="Peak learning rate.")
    critic_lr: float | None = flag(None, help="Peak learning rate of the critic, with --advantage-estimator ppo. Default: --lr.")
    min_lr: float = flag(0.0, help="Floor of the learning rate.")
    lr_decay_style: str = flag("constant", choices=("constant", "linear", "cosine"), help="Shape after the warm-up.")
    lr_decay_iters: int | None = flag(None, help="Optimizer steps until --min-lr. Default: the whole run.")
    lr_warmup_iters: int = flag(0, help="Optimizer steps of linear warm-up.")
    lr_warmup_fraction: float | None = flag(None, help="Warm-up as a share of --lr-decay-iters, instead of --lr-warmup-iters.")
    weight_decay: float = flag(0.01, help="Decoupled weight decay (not on norms and biases).")
    adam_beta1: float = flag(0.9, help="First moment.")
    adam_beta2: float = flag(0.999, help="Second moment.")
    adam_eps: float = flag(1e-8, help="Added to the root of the second moment.")
    clip_grad: float = flag(1.0, help="Largest gradient norm; 0 switches clipping off.")
    bf16: bool | None = flag(None, help="Train in bf16. Default: on a host with CUDA yes, on a CPU host no (fp32).")
    accumulate_allreduce_grads_in_fp32: bool = flag(True, help="Keep and reduce gradients in fp32.")
    optimizer_cpu_offload: bool = flag(False, help="Keep optimizer state and master weights in the host's memory, and step there.")
    overlap_cpu_optimizer_d2h_h2d: bool = flag(False, help="Copy gradients and weights while the host steps; with --optimizer-cpu-offload.")
    use_precision_aware_optimizer: bool = flag(False, help="TransformerEngine's Adam, which keeps each state in a precision of its own.")

    def problems(self) -> list[str]:
        """What is impossible about the optimizer."""
        found = []
        if self.lr < 0 or self.min_lr < 0 or self.min_lr > self.lr:
            found.append(f"--lr {self.lr} and --min-lr {self.min_lr}: need 0 <= min-lr <= lr.")
        if self.critic_lr is not None and self.critic_lr < self.min_lr:
            found.append(f"--critic-lr {self.critic_lr} and --min-lr {self.min_lr}: need min-lr <= critic-lr.")
        if self.lr_warmup_fraction is not None and not 0 <= self.lr_warmup_fraction < 1:
            found.append(f"--lr-warmup-fraction {self.lr_warmup_fraction}: must be in [0, 1).")
        if self.overlap_cpu_optimizer_d2h_h2d and not self.optimizer_cpu_offload:
            found.append("--overlap-cpu-optimizer-d2h-h2d does nothing without --optimizer-cpu-offload.")
        if self.lr_warmup_fraction is not None and self.lr_warmup_iters:
            found.append("--lr-warmup-fraction and --lr-warmup-iters exclude each other.")
        if self.lr_decay_iters is not None and self.lr_warmup_iters >= self.lr_decay_iters:
            found.append(f"--lr-warmup-iters {self.lr_warmup_iters} does not end before --lr-decay-iters {self.lr_decay_iters}.")
        for name in ("adam_beta1", "adam_beta2"):
            if not 0 <= getattr(self, name) < 1:
                found.append(f"--{name.replace('_', '-')} {getattr(self, name)}: must be in [0, 1).")
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Where weights come from and go to"""

    hf_checkpoint: str | None = flag(None, help="HF model folder: tokenizer, config and the engines' first weights; the trainer's too, without --load.")
    ref_load: str | None = flag(
        None, help="HF folder or Megatron checkpoint of the reference model. Needed for a KL loss; the trainer's first weights when --load has none."
    )
    reward_load: str | None = flag(None, help="HF folder of a reward model, which then scores the samples.")
    critic_load: str | None = flag(None, help="HF folder or Megatron checkpoint of the critic, with --advantage-estimator ppo. Default: as the trainer's.")
    load: str | None = flag(None, help="Megatron checkpoint folder to resume from (or an HF folder to start from). A folder without a checkpoint starts fresh.")
    save: str | None = flag(None, help="Folder for Megatron checkpoints.")
    save_interval: int | None = flag(None, help="Save every this many rollouts; the last rollout is always saved.")
    save_hf: str | None = flag(None, help="Also write an HF folder at each save; '{rollout_id}' in the path is replaced by the number of rollouts done.")
    async_save: bool = flag(False, help="Write checkpoints while the run goes on; each counts once all ranks have written it.")
    save_retain_interval: int | None = flag(
        None, help="Keep only checkpoints whose number divides by this, and the newest: each save deletes the one before. Default: keep all."
    )
    ckpt_step: int | None = flag(None, help="Take this checkpoint of --load (rollouts done), not the newest.")
    ref_ckpt_step: int | None = flag(None, help="Take this checkpoint of --ref-load, not the newest.")
    no_save_optim: bool = flag(False, help="Leave the optimizer state out of checkpoints.")
    no_load_optim: bool = flag(False, help="Do not read optimizer state.")
    no_load_rng: bool = flag(False, help="Do not read random states.")
    finetune: bool = flag(False, help="Take only the weights of --load: rollout count, data position and optimizer start anew.")

    def problems(self) -> list[str]:
        """What is impossible about the paths; --plan skips the ones that need a file."""
        found = []
        if (self.save_interval or self.save_hf) and not self.save:
            found.append("--save-interval and --save-hf need --save, the folder for checkpoints.")
        if self.save_interval is not None and self.save_interval < 1:
            found.append(f"--save-interval {self.save_interval}: must be at least 1.")
        for name, needed in (("async_save", "save"), ("save_retain_interval", "save"), ("ckpt_step", "load"), ("ref_ckpt_step", "ref_load")):
            value = getattr(self, name)
            if value is not None and value is not False and not getattr(self, needed):
                found.append(f"--{name.replace('_', '-')} does nothing without --{needed.replace('_', '-')}. Fix: add it, or drop this.")
        for name in ("ckpt_step", "ref_ckpt_step"):
            if (getattr(self, name) or 0) < 0:
                found.append(f"--{name.replace('_', '-')} {getattr(self, name)}: must not be negative.")
        interval = self.save_retain_interval
        if interval is not None and (interval < 1 or self.save_interval is None or interval % self.save_interval):
            found.append(f"--save-retain-interval {interval}: must be a multiple of --save-interval {self.save_interval}.")
        return found

    def missing_files(self) -> list[str]:
        """Paths that do not exist; checked before anything starts."""
        found = []
        if not self.hf_checkpoint:
            found.append("--hf-checkpoint is missing: the folder with config.json and the tokenizer.")
        elif not os.path.isdir(self.hf_checkpoint):
            found.append(f"--hf-checkpoint {self.hf_checkpoint}: no such folder.")
        elif not os.path.isfile(os.path.join(self.hf_checkpoint, "config.json")):
            found.append(f"--hf-checkpoint {self.hf_checkpoint}: has no config.json.")
        for name in ("ref_load", "reward_load", "critic_load"):
            folder = getattr(self, name)
            if folder and not os.path.isdir(folder):
                found.append(f"--{name.replace('_', '-')} {folder}: no such folder.")
        return found
