"""Checkpoints: what is loaded and what is saved."""

from __future__ import annotations

import dataclasses
import os

from slime_like.config.base import flag

#: Longest time between a signal and the end of the save that it asks for: utils/supervise.py waits a little longer.
MOST_PREEMPTION_S = 110.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Where weights come from and go to"""

    hf_checkpoint: str | None = flag(
        None,
        help="HF model folder: tokenizer, config and the engines' first weights; the trainer's too, without --load.",
    )
    ref_load: str | None = flag(
        None,
        help=(
            "HF folder or Megatron checkpoint of the reference model. Needed for a KL loss; the trainer's first weights"
            " when --load has none."
        ),
    )
    reward_load: str | None = flag(None, help="HF folder of a reward model, which then scores the samples.")
    critic_load: str | None = flag(
        None,
        help=(
            "HF folder or Megatron checkpoint of the critic, with --advantage-estimator ppo. Default: as the trainer's."
        ),
    )
    load: str | None = flag(
        None,
        help=(
            "Megatron checkpoint folder to resume from (or an HF folder to start from). A folder without a checkpoint"
            " starts fresh."
        ),
    )
    resume: str | None = flag(
        None,
        choices=("auto",),
        help=(
            "auto: go on with the run in --run-dir from the newest checkpoint in --save (default: checkpoints/ in the"
            " run directory) that is whole; where there is none, start. The same command for the first start and every"
            " later one."
        ),
    )
    save: str | None = flag(None, help="Folder for Megatron checkpoints.")
    save_interval: int | None = flag(
        None, help="Save every this many rollouts; the last rollout is always saved.", least=1
    )
    save_hf: str | None = flag(
        None,
        help=(
            "Also write an HF folder at each save; '{rollout_id}' in the path is replaced by the number of rollouts"
            " done."
        ),
    )
    async_save: bool = flag(
        False, help="Write checkpoints while the run goes on; each counts once all ranks have written it."
    )
    save_retain_interval: int | None = flag(
        None,
        help=(
            "Keep only checkpoints whose number divides by this, and the newest: each save deletes the one before."
            " Default: keep all."
        ),
        least=1,
    )
    save_total_limit: int | None = flag(
        None,
        help="Most checkpoints that are kept: each save deletes the oldest beyond them. Default: no limit.",
        least=1,
    )
    max_failed_saves: int = flag(
        3,
        help=(
            "End the run at so many saves in a row that could not be written (a full disk); until then it goes on, and"
            " the checkpoint before them stays the newest. The last rollout's must succeed."
        ),
        least=1,
    )
    preemption_timeout_s: float = flag(
        60.0,
        help=(
            "With --save: SIGTERM or SIGUSR1 saves what is trained and ends the run with status 143, at the latest"
            " after so many seconds."
        ),
        above=0,
        most=MOST_PREEMPTION_S,
    )
    max_trainer_restarts: int = flag(
        2,
        help=(
            "How often in a run all training ranks are started anew, from its newest checkpoint or its beginning, when"
            " one of them is killed; engines stay. 0: a lost rank ends the run."
        ),
        least=0,
    )
    ckpt_step: int | None = flag(None, help="Take this checkpoint of --load (rollouts done), not the newest.", least=0)
    ref_ckpt_step: int | None = flag(None, help="Take this checkpoint of --ref-load, not the newest.", least=0)
    verify_checkpoint: bool = flag(
        True, help="Compare every file of a Megatron checkpoint with its digest before it is loaded."
    )
    no_save_optim: bool = flag(False, help="Leave the optimizer state out of checkpoints.")
    no_load_optim: bool = flag(False, help="Do not read optimizer state.")
    no_load_rng: bool = flag(False, help="Do not read random states.")
    finetune: bool = flag(
        False, help="Take only the weights of --load: rollout count, data position and optimizer start anew."
    )

    def problems(self) -> list[str]:
        """What is impossible about the paths; --plan skips the ones that need a file."""
        problems = []
        if (self.save_interval or self.save_hf) and not self.save:
            problems.append("--save-interval and --save-hf need --save, the folder for checkpoints.")
        if self.save_interval is not None and self.save_interval < 1:
            problems.append(f"--save-interval {self.save_interval}: must be at least 1.")
        for name, needed in (
            ("async_save", "save"),
            ("save_retain_interval", "save"),
            ("save_total_limit", "save"),
            ("ckpt_step", "load"),
            ("ref_ckpt_step", "ref_load"),
        ):
            value = getattr(self, name)
            if value is not None and value is not False and not getattr(self, needed):
                problems.append(
                    f"--{name.replace('_', '-')} does nothing without --{needed.replace('_', '-')}. Fix: add it, or"
                    " drop this."
                )
        for name in ("ckpt_step", "ref_ckpt_step"):
            if (getattr(self, name) or 0) < 0:
                problems.append(f"--{name.replace('_', '-')} {getattr(self, name)}: must not be negative.")
        if self.resume and self.ckpt_step is not None:
            problems.append("--ckpt-step and --resume auto both say where to go on. Fix: drop one of them.")
        interval = self.save_retain_interval
        if interval is not None and (interval < 1 or self.save_interval is None or interval % self.save_interval):
            problems.append(
                f"--save-retain-interval {interval}: must be a multiple of --save-interval {self.save_interval}."
            )
        return problems

    def missing_files(self) -> list[str]:
        """Paths that do not exist; checked before anything starts."""
        problems = []
        if not self.hf_checkpoint:
            problems.append("--hf-checkpoint is missing: the folder with config.json and the tokenizer.")
        elif not os.path.isdir(self.hf_checkpoint):
            problems.append(f"--hf-checkpoint {self.hf_checkpoint}: no such folder.")
        elif not os.path.isfile(os.path.join(self.hf_checkpoint, "config.json")):
            problems.append(f"--hf-checkpoint {self.hf_checkpoint}: has no config.json.")
        for name in ("ref_load", "reward_load", "critic_load"):
            folder = getattr(self, name)
            if folder and not os.path.isdir(folder):
                problems.append(f"--{name.replace('_', '-')} {folder}: no such folder.")
        return problems
