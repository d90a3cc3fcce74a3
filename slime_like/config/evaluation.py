"""Evaluation."""

from __future__ import annotations

import dataclasses
import math
import os

from slime_like.config.base import flag
from slime_like.config.data import names_file, split_slice


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluation"""

    eval_prompt_data: list[str] | None = flag(None, help="Pairs 'name file.jsonl …' (a single path is called 'eval').")
    eval_interval: int | None = flag(None, help="Evaluate before the first rollout and after every this many.")
    skip_eval_before_train: bool = flag(False, help="No evaluation before the first rollout.")
    eval_input_key: str | None = flag(None, help="Default: --input-key.")
    eval_label_key: str | None = flag(None, help="Default: --label-key.")
    eval_tool_key: str | None = flag(None, help="Default: --tool-key.")
    n_samples_per_eval_prompt: int = flag(1, help="Samples per evaluation prompt.")
    eval_temperature: float | None = flag(None, help="Default: --rollout-temperature; 0 is greedy.")
    eval_top_p: float | None = flag(None, help="Default: --rollout-top-p.")
    eval_top_k: int | None = flag(None, help="Default: --rollout-top-k.")
    eval_max_response_len: int | None = flag(None, help="Default: --rollout-max-response-len.")
    eval_function_path: str | None = flag(
        None,
        help=(
            "async module.function(args, step, evaluation) -> {set: groups}, or that and metrics, instead of the"
            " built-in evaluation."
        ),
    )
    custom_eval_rollout_log_function_path: str | None = flag(
        None, help="module.function(step, args, data, metrics) -> further metrics, or None; after each evaluation."
    )
    eval_pass_threshold: float = flag(1.0, help="Least reward with which a sample passes, for eval/*/pass@k.")

    def datasets(self) -> dict[str, str]:
        """Name -> path; {} when there is no evaluation."""
        items = self.eval_prompt_data or []
        return {"eval": items[0]} if len(items) == 1 else dict(zip(items[::2], items[1::2], strict=True))

    def problems(self) -> list[str]:
        """What is impossible about evaluation."""
        problems = []
        items = self.eval_prompt_data or []
        if len(items) > 1 and len(items) % 2:
            return [f"--eval-prompt-data takes pairs of name and path, but got {len(items)} values."]
        if len(items) > 1 and len(set(items[::2])) != len(items) // 2:
            problems.append("--eval-prompt-data names a data set twice.")
        if self.eval_interval is not None and not (items or self.eval_function_path):
            problems.append("--eval-interval needs --eval-prompt-data.")
        if items and self.eval_interval is None:
            problems.append("--eval-prompt-data needs --eval-interval.")
        for name in ("eval_function_path", "custom_eval_rollout_log_function_path"):
            if getattr(self, name) and self.eval_interval is None:
                problems.append(f"--{name.replace('_', '-')} does nothing without --eval-interval. Fix: add it.")
        if self.eval_interval is not None and self.eval_interval < 1:
            problems.append(f"--eval-interval {self.eval_interval}: must be at least 1.")
        if self.n_samples_per_eval_prompt < 1:
            problems.append(f"--n-samples-per-eval-prompt {self.n_samples_per_eval_prompt}: must be at least 1.")
        if not math.isfinite(self.eval_pass_threshold):
            problems.append(f"--eval-pass-threshold {self.eval_pass_threshold}: must be a finite number.")
        return problems

    def missing_files(self) -> list[str]:
        """Paths that do not exist."""
        return [
            f"--eval-prompt-data {name}: {split_slice(path)[0]}: no such file."
            for name, path in self.datasets().items()
            if names_file(path) and not os.path.isfile(split_slice(path)[0])
        ]
