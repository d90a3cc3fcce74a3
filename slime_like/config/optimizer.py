"""The optimizer."""

from __future__ import annotations

import dataclasses

from slime_like.config.base import flag


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Optimizer and learning rate (Megatron's names)"""

    train_backend: str = flag("megatron", choices=("megatron",), help="What trains.")
    optimizer: str = flag("adam", choices=("adam",), help="AdamW with decoupled weight decay.")
    lr: float = flag(1e-6, help="Peak learning rate.", least=0)
    critic_lr: float | None = flag(
        None,
        help="Peak learning rate of the critic, with --advantage-estimator ppo. Default: --lr.",
        least=0,
    )
    min_lr: float = flag(0.0, help="Floor of the learning rate.", least=0)
    lr_decay_style: str = flag("constant", choices=("constant", "linear", "cosine"), help="Shape after the warm-up.")
    lr_decay_iters: int | None = flag(None, help="Optimizer steps until --min-lr. Default: the whole run.", least=1)
    lr_warmup_iters: int = flag(0, help="Optimizer steps of linear warm-up.", least=0)
    lr_warmup_fraction: float | None = flag(
        None,
        help="Warm-up as a share of --lr-decay-iters, instead of --lr-warmup-iters.",
        least=0,
        below=1,
    )
    weight_decay: float = flag(0.01, help="Decoupled weight decay (not on norms and biases).", least=0)
    adam_beta1: float = flag(0.9, help="First moment.", least=0, below=1)
    adam_beta2: float = flag(0.999, help="Second moment.", least=0, below=1)
    adam_eps: float = flag(1e-8, help="Added to the root of the second moment.", above=0)
    clip_grad: float = flag(1.0, help="Largest gradient norm; 0 switches clipping off.", least=0)
    bf16: bool | None = flag(None, help="Train in bf16. Default: on a host with CUDA yes, on a CPU host no (fp32).")
    fake_quantization: str = flag(
        "none",
        choices=("none", "int4"),
        help=(
            "Quantisation-aware training: every pass computes with weights of attention, MLPs and experts that are"
            " rounded to int4, engines are sent the rounded ones, and gradients go to those in full precision."
        ),
    )
    fake_quantization_group_size: int = flag(
        128, help="Columns of a row that share a scale, with --fake-quantization.", least=1
    )
    accumulate_allreduce_grads_in_fp32: bool = flag(True, help="Keep and reduce gradients in fp32.")
    optimizer_cpu_offload: bool = flag(
        False, help="Keep optimizer state and master weights in the host's memory, and step there."
    )
    overlap_cpu_optimizer_d2h_h2d: bool = flag(
        False, help="Copy gradients and weights while the host steps; with --optimizer-cpu-offload."
    )
    use_precision_aware_optimizer: bool = flag(
        False, help="TransformerEngine's Adam, which keeps each state in a precision of its own."
    )

    @property
    def int4_group_size(self) -> int | None:
        """Columns that share a scale where weights are rounded to int4; None: they are not."""
        return self.fake_quantization_group_size if self.fake_quantization == "int4" else None

    def problems(self) -> list[str]:
        """What is impossible about the optimizer."""
        problems = []
        if self.lr < 0 or self.min_lr < 0 or self.min_lr > self.lr:
            problems.append(f"--lr {self.lr} and --min-lr {self.min_lr}: need 0 <= min-lr <= lr.")
        if self.critic_lr is not None and self.critic_lr < self.min_lr:
            problems.append(f"--critic-lr {self.critic_lr} and --min-lr {self.min_lr}: need min-lr <= critic-lr.")
        if self.lr_warmup_fraction is not None and not 0 <= self.lr_warmup_fraction < 1:
            problems.append(f"--lr-warmup-fraction {self.lr_warmup_fraction}: must be in [0, 1).")
        if self.overlap_cpu_optimizer_d2h_h2d and not self.optimizer_cpu_offload:
            problems.append("--overlap-cpu-optimizer-d2h-h2d does nothing without --optimizer-cpu-offload.")
        if self.lr_warmup_fraction is not None and self.lr_warmup_iters:
            problems.append("--lr-warmup-fraction and --lr-warmup-iters exclude each other.")
        if self.lr_decay_iters is not None and self.lr_warmup_iters >= self.lr_decay_iters:
            problems.append(
                f"--lr-warmup-iters {self.lr_warmup_iters} does not end before --lr-decay-iters {self.lr_decay_iters}."
            )
        for name in ("adam_beta1", "adam_beta2"):
            if not 0 <= getattr(self, name) < 1:
                problems.append(f"--{name.replace('_', '-')} {getattr(self, name)}: must be in [0, 1).")
        return problems


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamParams:
    """The numbers of one optimizer step that a caller gives itself, instead of the flags and the learning rate's
    schedule.

    weight_decay is decoupled, and not taken from norms and biases.
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self):
        wrong = []
        if not 0 <= self.lr < float("inf"):
            wrong.append(f"lr {self.lr}: must be at least 0")
        wrong += [f"beta {beta}: must be in [0, 1)" for beta in self.betas if not 0 <= beta < 1]
        if not 0 < self.eps < float("inf"):
            wrong.append(f"eps {self.eps}: must be above 0")
        if not 0 <= self.weight_decay < float("inf"):
            wrong.append(f"weight_decay {self.weight_decay}: must be at least 0")
        if wrong:
            raise ValueError("; ".join(wrong))
