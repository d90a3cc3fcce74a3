"""The run directory, logs, debugging."""

from __future__ import annotations

import dataclasses
import os

from slime_like.config.base import flag
from slime_like.utils.logs import LOG_LEVELS


@dataclasses.dataclass(frozen=True, kw_only=True)
class ObservabilityConfig:
    """Run directory, metrics and debugging"""

    seed: int = flag(1234, help="Seed of everything random in the trainer.", least=0)
    deterministic: bool = flag(
        False,
        help=(
            "Two runs of one command are equal to the bit, and a resumed one to one that was never stopped: engines"
            " whose answers do not depend on the rest of the batch, fixed orders of sums in the trainer. Slower."
        ),
    )
    run_name: str = flag("train", help="Last part of the default run directory.")
    run_dir: str | None = flag(None, help="Where metrics, logs and samples go. Default: runs/<time>-<name>.")
    share_run_dir: bool = flag(
        False,
        help="Let others read what the run writes, as your umask has it. Default: it is yours alone (0600, 0700).",
    )
    log_level: str | None = flag(
        None,
        choices=LOG_LEVELS,
        help=(
            "Least level of what our own loggers write, in the driver and in every process of the run; receivers, the"
            " router and engines (unless --sglang-log-level) are started with it too. Default: warning; of receivers"
            " and engines info."
        ),
    )
    use_tensorboard: bool = flag(True, help="Write TensorBoard event files into the run directory.")
    log_samples: int = flag(
        4,
        help="Answers of each rollout, best to worst, written to samples/ in the run directory; 0: none.",
        least=0,
    )
    log_passrate: bool = flag(False, help="Add pass@1, pass@2, … of each rollout (--eval-pass-threshold).")
    log_multi_turn: bool = flag(False, help="Add turns, and tokens that the policy did not choose, of each rollout.")
    log_correct_samples: bool = flag(
        False, help="Add lengths and log-probs of the samples that pass (--eval-pass-threshold)."
    )
    save_debug_rollout_data: str | None = flag(
        None, help="Write each rollout's samples to this path; '{rollout_id}' is replaced."
    )
    load_debug_rollout_data: str | None = flag(
        None, help="Train on samples saved with --save-debug-rollout-data instead of generating."
    )

    def problems(self) -> list[str]:
        """What is impossible about debugging."""
        problems = []
        if self.log_samples < 0:
            problems.append(f"--log-samples {self.log_samples}: must not be negative.")
        for name in ("save_debug_rollout_data", "load_debug_rollout_data"):
            value = getattr(self, name)
            if value and "{rollout_id}" not in value:
                problems.append(f"--{name.replace('_', '-')} {value}: the path must contain '{{rollout_id}}'.")
        return problems

    def missing_files(self) -> list[str]:
        """Paths that do not exist."""
        path = self.load_debug_rollout_data
        if path and not os.path.isdir(os.path.dirname(path) or "."):
            return [f"--load-debug-rollout-data {path}: no such folder."]
        return []
