"""Evaluation."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from slime_like.config.base import flag
from slime_like.config.data import names_file, split_slice


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalSet:
    """One evaluation set: where its rows are, and what differs from the --eval-* flags; None: as they say."""

    name: str
    path: str
    n_samples_per_eval_prompt: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_response_len: int | None = None
    max_prompt_len: int | None = None
    max_context_len: int | None = None
    min_new_tokens: int | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    input_key: str | None = None
    label_key: str | None = None
    tool_key: str | None = None
    metadata_key: str | None = None
    rm_type: str | None = None
    metadata_overrides: dict = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluation"""

    eval_prompt_data: list[str] | None = flag(
        None, help="Pairs 'name file.jsonl …' or .parquet (a single path is called 'eval')."
    )
    eval_config: str | None = flag(
        None, help="YAML of evaluation sets with settings of their own, instead of --eval-prompt-data: docs/rewards.md."
    )
    eval_interval: int | None = flag(None, help="Evaluate before the first rollout and after every this many.", least=1)
    skip_eval_before_train: bool = flag(False, help="No evaluation before the first rollout.")
    eval_input_key: str | None = flag(None, help="Default: --input-key.")
    eval_label_key: str | None = flag(None, help="Default: --label-key.")
    eval_tool_key: str | None = flag(None, help="Default: --tool-key.")
    n_samples_per_eval_prompt: int = flag(1, help="Samples per evaluation prompt.", least=1, most=1_000_000)
    eval_temperature: float | None = flag(None, help="Default: --rollout-temperature; 0 is greedy.", least=0)
    eval_top_p: float | None = flag(None, help="Default: --rollout-top-p.", above=0, most=1)
    eval_top_k: int | None = flag(None, help="Default: --rollout-top-k.", least=-1)
    eval_max_response_len: int | None = flag(None, help="Default: --rollout-max-response-len.", least=1)
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
    eval_max_prompt_len: int | None = flag(None, help="Leave out evaluation prompts of more tokens.", least=1)
    eval_max_context_len: int | None = flag(None, help="Default: --rollout-max-context-len.", least=1)
    eval_min_new_tokens: int | None = flag(
        None, help="Least tokens of a response before it may end. Default: 0.", least=0
    )
    eval_pass_threshold: float = flag(1.0, help="Least reward with which a sample passes, for eval/*/pass@k.")

    #: what --eval-config holds
    eval_sets: tuple[EvalSet, ...] = ()

    def sets(self) -> dict[str, EvalSet]:
        """Name -> set, of --eval-config or --eval-prompt-data; {} when there is no evaluation."""
        if self.eval_sets:
            return {one.name: one for one in self.eval_sets}
        items = self.eval_prompt_data or []
        pairs = [("eval", items[0])] if len(items) == 1 else zip(items[::2], items[1::2], strict=True)
        return {name: EvalSet(name=name, path=path) for name, path in pairs}

    def datasets(self) -> dict[str, str]:
        """Name -> path; {} when there is no evaluation."""
        return {name: one.path for name, one in self.sets().items()}

    def setting(self, name: str, field: str) -> Any:
        """What a set says of a field, else its --eval-* flag; None if neither says anything.

        Example: setting("aime", "temperature").
        """
        own = getattr(self.sets().get(name), field, None)
        flag_name = field if field == "n_samples_per_eval_prompt" else f"eval_{field}"
        return own if own is not None else getattr(self, flag_name, None)

    def problems(self) -> list[str]:
        """What is impossible about evaluation."""
        problems = []
        items = self.eval_prompt_data or []
        if len(items) > 1 and len(items) % 2:
            return [f"--eval-prompt-data takes pairs of name and path, but got {len(items)} values."]
        if len(items) > 1 and len(set(items[::2])) != len(items) // 2:
            problems.append("--eval-prompt-data names a data set twice.")
        if self.eval_config and items:
            problems.append("--eval-config and --eval-prompt-data exclude each other. Fix: all sets in one of them.")
        if self.eval_config and self.eval_interval is None:
            problems.append("--eval-config needs --eval-interval.")
        if self.eval_interval is not None and not (items or self.eval_function_path or self.eval_config):
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
        return problems

    def missing_files(self) -> list[str]:
        """Paths that do not exist."""
        flag_name = "--eval-config" if self.eval_sets else "--eval-prompt-data"
        return [
            f"{flag_name} {name}: {split_slice(path)[0]}: no such file."
            for name, path in self.datasets().items()
            if names_file(path) and not os.path.isfile(split_slice(path)[0])
        ]
