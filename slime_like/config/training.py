"""Batches, optimizer, checkpoints and the loss."""

from __future__ import annotations

import dataclasses
import os

from slime_like.config.base import flag


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """How a rollout is cut into train steps and micro-batches"""

    global_batch_size: int | None = flag(None, help="Samples per optimizer step. Default: the whole rollout / --num-steps-per-rollout.")
    num_steps_per_rollout: int | None = flag(None, help="Optimizer steps per rollout. Default: samples per rollout / --global-batch-size, else 1.")
    micro_batch_size: int = flag(1, help="Samples per micro-batch, without --use-dynamic-batch-size.")
    use_dynamic_batch_size: bool = flag(False, help="Pack samples into micro-batches of at most --max-tokens-per-gpu tokens.")
    max_tokens_per_gpu: int | None = flag(None, help="Tokens of a micro-batch on one GPU, with --use-dynamic-batch-size. A longer sample gets one of its own.")
    data_pad_size_multiplier: int = flag(1, help="Pad each micro-batch to a multiple of this times the tensor parallel size, in tokens.")
    log_probs_chunk_size: int = flag(-1, help="Turn logits into log-probs this many tokens at a time, which needs less memory; -1: all at once.")
    balance_data: bool = flag(False, help="Give the data parallel ranks equal work instead of equal sample counts.")

    def problems(self) -> list[str]:
        """What is impossible about the batch flags by themselves."""
        found = []
        if self.log_probs_chunk_size < 1 and self.log_probs_chunk_size != -1:
            found.append(f"--log-probs-chunk-size {self.log_probs_chunk_size}: must be at least 1, or -1 for all tokens at once.")
        if self.use_dynamic_batch_size and not self.max_tokens_per_gpu:
            found.append("--use-dynamic-batch-size needs --max-tokens-per-gpu.")
        if self.max_tokens_per_gpu and not self.use_dynamic_batch_size:
            found.append("--max-tokens-per-gpu does nothing without --use-dynamic-batch-size. Fix: add it.")
        for name in ("global_batch_size", "num_steps_per_rollout", "micro_batch_size", "max_tokens_per_gpu", "data_pad_size_multiplier"):
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossConfig:
    """Loss and advantages"""

    loss_type: str = flag("policy_loss", choices=("policy_loss", "sft_loss"), help='sft_loss trains on each row\'s "response" and starts no engines.')
    advantage_estimator: str = flag(
        "grpo",
        choices=("grpo", "gspo", "cispo", "rloo", "ppo"),
        help="grpo, gspo (one ratio a sample), cispo (clipped weight), rloo (leave-one-out): compared within a prompt's group; ppo: against a critic.",
    )
    disable_compute_advantages_and_returns: bool = flag(False, help="Supervised runs need no advantages; only with --loss-type sft_loss.")
    disable_grpo_std_normalization: bool = flag(False, help="Centre rewards only (Dr. GRPO).")
    disable_rewards_normalization: bool = flag(False, help="Use raw rewards as advantages.")
    eps_clip: float = flag(0.2, help="PPO clip range below 1.")
    eps_clip_high: float | None = flag(None, help="PPO clip range above 1 (clip-higher). Default: --eps-clip.")
    eps_clip_c: float | None = flag(None, help="Dual clip: bound for negative advantages, above 1.")
    use_kl_loss: bool = flag(False, help="Add --kl-loss-coef x KL(policy, reference) to the loss; loads the reference.")
    kl_loss_coef: float = flag(0.0, help="Weight of the KL loss. At 0 the KL is only measured.")
    kl_loss_type: str = flag("k1", choices=("k1", "k2", "k3", "low_var_kl"), help="KL estimator (Schulman); low_var_kl is k3 clamped to +-10.")
    kl_coef: float = flag(0.0, help="Weight of a KL penalty (k1, to --ref-load) inside each token's reward; with --advantage-estimator ppo.")
    gamma: float = flag(1.0, help="Discount of a later token's reward; ppo.")
    lambd: float = flag(1.0, help="GAE's lambda: 1 trusts the rewards, 0 the critic; ppo.")
    normalize_advantages: bool = flag(False, help="Whiten the advantages over the tokens of the rollout; ppo.")
    value_clip: float = flag(0.2, help="How far the critic's value of a token may move in one rollout step before its loss stops pulling; ppo.")
    num_critic_only_steps: int = flag(0, help="Rollout steps at the start that train the critic only; ppo.")
    use_tis: bool = flag(False, help="Weigh each token's policy loss by trainer's / engine's probability (truncated importance sampling).")
    tis_clip: float = flag(2.0, help="Upper bound of that weight.")
    tis_clip_low: float = flag(0.0, help="Lower bound of that weight.")
    entropy_coef: float = flag(0.0, help="Weight of the entropy bonus.")
    calculate_per_token_loss: bool = flag(False, help="Mean over all tokens of the batch instead of per sample, then over samples.")

    def problems(self) -> list[str]:
        """What is impossible about the loss."""
        found = []
        if self.eps_clip < 0 or (self.eps_clip_high or 0) < 0:
            found.append(f"--eps-clip {self.eps_clip}, --eps-clip-high {self.eps_clip_high}: must not be negative.")
        if self.eps_clip_c is not None and self.eps_clip_c <= 1:
            found.append(f"--eps-clip-c {self.eps_clip_c}: must be above 1.")
        if self.eps_clip_c is not None and self.advantage_estimator in ("gspo", "cispo"):
            found.append(
                f"--eps-clip-c {self.eps_clip_c} belongs to PPO's token ratio; --advantage-estimator {self.advantage_estimator} has none. Fix: drop it."
            )
        if self.disable_compute_advantages_and_returns and self.loss_type != "sft_loss":
            found.append("--disable-compute-advantages-and-returns leaves a policy loss without advantages. Fix: drop it, or --loss-type sft_loss.")
        if not 0 <= self.tis_clip_low <= self.tis_clip:
            found.append(f"--tis-clip-low {self.tis_clip_low} and --tis-clip {self.tis_clip}: need 0 <= low <= high.")
        if self.kl_loss_coef and not self.use_kl_loss:
            found.append(f"--kl-loss-coef {self.kl_loss_coef} does nothing without --use-kl-loss. Fix: add it.")
        return found + self._critic_problems()

    def _critic_problems(self) -> list[str]:
        """What only advantages against a critic have."""
        found = []
        if not 0 <= self.gamma <= 1 or not 0 <= self.lambd <= 1:
            found.append(f"--gamma {self.gamma}, --lambd {self.lambd}: must be from 0 to 1.")
        if self.value_clip <= 0:
            found.append(f"--value-clip {self.value_clip}: must be above 0.")
        if self.num_critic_only_steps < 0:
            found.append(f"--num-critic-only-steps {self.num_critic_only_steps}: must not be negative.")
        if self.kl_coef < 0:
            found.append(f"--kl-coef {self.kl_coef}: must not be negative.")
        if self.kl_coef and self.kl_loss_coef:
            found.append(f"--kl-coef {self.kl_coef} and --kl-loss-coef {self.kl_loss_coef} punish the same KL twice. Fix: one of them.")
        if self.advantage_estimator == "ppo":
            for name in ("disable_grpo_std_normalization", "disable_rewards_normalization"):
                if getattr(self, name):
                    found.append(f"--{name.replace('_', '-')} is about groups, and --advantage-estimator ppo compares with a critic. Fix: drop it.")
            return found
        if self.kl_coef:
            found.append(
                f"--kl-coef {self.kl_coef} needs rewards per token: --advantage-estimator ppo, not {self.advantage_estimator}. "
                "Fix: --use-kl-loss --kl-loss-coef."
            )
        for name in ("gamma", "lambd", "normalize_advantages", "value_clip", "num_critic_only_steps"):
            if getattr(self, name) != getattr(LossConfig, name):
                found.append(f"--{name.replace('_', '-')} does nothing without --advantage-estimator ppo. Fix: add it, or drop this.")
        return found

    @property
    def clip_high(self) -> float:
        """Clip range above 1."""
        return self.eps_clip if self.eps_clip_high is None else self.eps_clip_high
