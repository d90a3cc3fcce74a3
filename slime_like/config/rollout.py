"""How many samples, and how they are sampled."""

from __future__ import annotations

import dataclasses

from slime_like.config.base import flag
from slime_like.config.bounds import LONGEST_WAIT_S


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Rollout size and sampling"""

    rollout_batch_size: int = flag(32, help="Prompts per rollout step.", least=1, most=1_000_000)
    n_samples_per_prompt: int = flag(1, help="Samples per prompt: the group.", least=1, most=1_000_000)
    over_sampling_batch_size: int | None = flag(
        None,
        help=(
            "Prompts drawn at a time when a dynamic filter rejects groups, or a buffer filter chooses among them, or"
            " --partial-rollout takes what is done first. Default: --rollout-batch-size."
        ),
        least=1,
        most=1_000_000,
    )
    dynamic_sampling_filter_path: str | None = flag(
        None, help="module.function(args, samples) -> bool or (keep, reason): which groups are trained on."
    )
    dynamic_sampling_max_draws: int = flag(
        10,
        help=(
            "With a filter: stop after this many times the rollout batch size of prompts, naming why groups were"
            " dropped."
        ),
        least=1,
    )
    custom_generate_function_path: str | None = flag(
        None, help="async module.function(args, prompt, sampling_params, engine) -> Sample, instead of one request."
    )
    rollout_function_path: str | None = flag(
        None,
        help="async module.function(args, step, rollout) -> groups, or (groups, metrics), instead of the rollout loop.",
    )
    rollout_sample_filter_path: str | None = flag(
        None,
        help="module.function(args, groups) -> for each group a list of bools, one a sample: which train.",
    )
    rollout_all_samples_process_path: str | None = flag(
        None, help="module.function(args, groups, source), called with all groups of a rollout, dropped ones too."
    )
    buffer_filter_path: str | None = flag(
        None,
        help=(
            "module.function(args, groups, count) -> count of the groups: which are trained on where more are ready"
            " (--over-sampling-batch-size). Default: the first of the data."
        ),
    )
    custom_convert_samples_to_train_data_path: str | None = flag(
        None, help="module.function(args, groups) -> list of records.TrainSample, advantages included."
    )
    custom_rollout_log_function_path: str | None = flag(
        None,
        help="module.function(step, args, samples, metrics, seconds) -> further metrics, or None; after each rollout.",
    )
    custom_config_path: str | None = flag(
        None, help="YAML, TOML or JSON of values of your own, which your functions find as args.<key>."
    )
    rollout_max_response_len: int = flag(1024, help="Most new tokens.", least=1)
    rollout_max_context_len: int | None = flag(
        None,
        help="Most tokens of prompt and response together. Default: the model's.",
        least=1,
    )
    rollout_temperature: float = flag(1.0, help="Sampling temperature; the trainer's log-probs use it too.", above=0)
    rollout_top_p: float = flag(
        1.0,
        help=(
            "Nucleus sampling. Below 1 a run that trains needs --rollout-allow-filtered-sampling; --eval-top-p does"
            " not."
        ),
        above=0,
        most=1,
    )
    rollout_top_k: int = flag(-1, help="Sample among the k most likely; -1: all. As --rollout-top-p.", least=-1)
    rollout_allow_filtered_sampling: bool = flag(
        False,
        help=(
            "Train although --rollout-top-p or --rollout-top-k draws from another distribution than the one whose"
            " log-probs are trained on."
        ),
    )
    rollout_stop: list[str] | None = flag(None, help="Strings that end a response, and stay at its end.")
    rollout_stop_token_ids: list[int] | None = flag(None, help="Token ids that end a response.", least=0)
    rollout_skip_special_tokens: bool = flag(
        True, help="Leave special tokens out of the decoded text that rewards see."
    )
    mask_truncated_samples: bool = flag(
        False,
        help="Samples cut off at a length limit train nothing; their group's others are still compared with them.",
    )
    share_prefill: str = flag(
        "auto",
        choices=("auto", "on", "off"),
        help=(
            "Send a prompt through an engine once before its samples ask for it together, which compute it again each"
            " where they come into one batch. auto: where the engine that has it gets them, and keeps it in a cache;"
            " of prompts that are long enough."
        ),
    )
    rollout_request_timeout_s: float = flag(
        600.0, help="Deadline of one generation request, in seconds.", above=0, most=LONGEST_WAIT_S
    )
    rollout_request_retries: int = flag(
        3,
        help="Tries of a request that failed for a reason that may pass (connection, 5xx).",
        least=1,
    )

    @property
    def filters_sampling(self) -> bool:
        """Whether unlikely tokens are never drawn."""
        return self.rollout_top_p < 1 or self.rollout_top_k != -1

    def problems(self) -> list[str]:
        """What is impossible about sampling."""
        problems = []
        for name in (
            "rollout_batch_size",
            "n_samples_per_prompt",
            "rollout_max_response_len",
            "dynamic_sampling_max_draws",
            "rollout_request_retries",
        ):
            if getattr(self, name) < 1:
                problems.append(f"--{name.replace('_', '-')} {getattr(self, name)}: must be at least 1.")
        if self.rollout_temperature <= 0:
            problems.append(
                f"--rollout-temperature {self.rollout_temperature}: must be above 0 (a greedy policy has no gradient)."
            )
        if not 0 < self.rollout_top_p <= 1:
            problems.append(f"--rollout-top-p {self.rollout_top_p}: must be in (0, 1].")
        if self.rollout_top_k != -1 and self.rollout_top_k < 1:
            problems.append(f"--rollout-top-k {self.rollout_top_k}: must be at least 1, or -1 for all tokens.")
        if self.rollout_allow_filtered_sampling and not self.filters_sampling:
            problems.append(
                "--rollout-allow-filtered-sampling does nothing without --rollout-top-p or --rollout-top-k. Fix:"
                " drop it."
            )
        if self.over_sampling_batch_size is not None and self.over_sampling_batch_size < self.rollout_batch_size:
            problems.append(
                f"--over-sampling-batch-size {self.over_sampling_batch_size} is below --rollout-batch-size"
                f" {self.rollout_batch_size}."
            )
        return problems
