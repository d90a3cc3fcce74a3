"""On-policy distillation: a teacher's log-probs inside each token's advantage."""

from __future__ import annotations

import dataclasses
import os

from slime_like.config.base import flag
from slime_like.config.loss.choice import LossChoice


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillationFlags(LossChoice):
    """Flags of the teacher, and how much it weighs."""

    use_opd: bool = flag(
        False,
        help="On-policy distillation: subtract --opd-kl-coef x (log-prob - teacher's) from each token's advantage.",
    )
    opd_type: str = flag(
        "megatron",
        choices=("megatron",),
        help="Where the teacher is scored: by the trainer itself, with the teacher's weights swapped in.",
    )
    opd_kl_coef: float = flag(1.0, help="Weight of the distillation; with --use-opd.", least=0)
    opd_teacher_load: str | None = flag(
        None, help="HF folder or Megatron checkpoint of the teacher, a model of the same architecture; with --use-opd."
    )
    opd_teacher_ckpt_step: int | None = flag(
        None,
        help="Which checkpoint of --opd-teacher-load, a Megatron folder. Default: the newest.",
        least=0,
    )

    def problems(self) -> list[str]:
        """What the teacher lacks, or what is for a teacher that is not there."""
        problems = []
        if self.use_opd and not self.opd_teacher_load:
            problems.append("--use-opd needs --opd-teacher-load, the teacher.")
        if not self.use_opd and (
            self.opd_teacher_load or self.opd_kl_coef != 1.0 or self.opd_teacher_ckpt_step is not None
        ):
            problems.append(
                "--opd-teacher-load, --opd-teacher-ckpt-step and --opd-kl-coef do nothing without --use-opd. Fix: add"
                " it, or drop them."
            )
        if self.opd_kl_coef < 0:
            problems.append(f"--opd-kl-coef {self.opd_kl_coef}: must not be negative.")
        if self.use_opd and self.loss_type == "sft_loss":
            problems.append(
                "--use-opd scores what the policy itself said; --loss-type sft_loss has no such samples. Fix: drop one."
            )
        return problems

    def missing_files(self) -> list[str]:
        """Paths that do not exist; checked before anything starts."""
        if self.use_opd and self.opd_teacher_load and not os.path.isdir(self.opd_teacher_load):
            return [f"--opd-teacher-load {self.opd_teacher_load}: no such folder."]
        return []
