"""Data, sampling, rewards and evaluation."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from urllib.parse import urlsplit

from slime_like.config.base import flag

_SLICE = re.compile(r"^(?P<path>.*)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]$")


def split_slice(path: str) -> tuple[str, slice]:
    """`data.jsonl@[10:20]` -> ("data.jsonl", slice(10, 20)); without a slice, all rows."""
    match = _SLICE.match(path)
    if not match:
        return path, slice(None)
    return match["path"], slice(*(int(match[k]) if match[k] else None for k in ("start", "stop")))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Prompts and how long to run"""

    prompt_data: str | None = flag(None, help="JSONL of prompts; 'file.jsonl@[10:20]' takes rows 10 to 19.")
    input_key: str = flag("input", help="Key of the prompt: a string, or a list of chat messages.")
    label_key: str | None = flag(None, help="Key of the reference answer handed to the reward.")
    metadata_key: str = flag("metadata", help="Key of a dict handed to the reward; may be absent.")
    tool_key: str = flag("tools", help="Key of a list of tools (or that list as JSON text) handed to the chat template; may be absent.")
    response_key: str = flag("response", help="Key of the answer to imitate, with --loss-type sft_loss.")
    apply_chat_template: bool = flag(False, help="Render the prompt with the tokenizer's chat template.")
    apply_chat_template_kwargs: str = flag("{}", help="JSON object of extra arguments for the chat template.")
    rollout_shuffle: bool = flag(False, help="Shuffle the rows of each epoch by --rollout-seed and the epoch.")
    rollout_seed: int = flag(42, help="Seed of shuffling and sampling.")
    rollout_max_prompt_len: int | None = flag(None, help="Leave out prompts of more tokens; the count is printed.")
    num_rollout: int | None = flag(None, help="Rollout steps to do.")
    num_epoch: int | None = flag(None, help="Passes over the data, instead of --num-rollout.")

    @property
    def chat_template_kwargs(self) -> dict:
        """--apply-chat-template-kwargs as a dict."""
        return json.loads(self.apply_chat_template_kwargs)

    def problems(self) -> list[str]:
        """What is impossible about the data flags."""
        found = []
        if (self.num_rollout is None) == (self.num_epoch is None):
            found.append("give exactly one of --num-rollout and --num-epoch.")
        for name in ("num_rollout", "num_epoch"):
            if getattr(self, name) is not None and getattr(self, name) < 0:
                found.append(f"--{name.replace('_', '-')} {getattr(self, name)}: must not be negative.")
        try:
            if not isinstance(self.chat_template_kwargs, dict):
                raise ValueError("not an object")
        except ValueError as error:
            found.append(f"--apply-chat-template-kwargs is no JSON object: {error}.")
        return found

    def missing_files(self) -> list[str]:
        """Paths that do not exist."""
        if not self.prompt_data:
            return ["--prompt-data is missing: a JSONL file of prompts."]
        path, _ = split_slice(self.prompt_data)
        return [] if os.path.isfile(path) else [f"--prompt-data {path}: no such file."]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Rollout size and sampling"""

    rollout_batch_size: int = flag(32, help="Prompts per rollout step.")
    n_samples_per_prompt: int = flag(1, help="Samples per prompt: the group.")
    over_sampling_batch_size: int | None = flag(None, help="Prompts drawn at a time when a dynamic filter rejects groups. Default: --rollout-batch-size.")
    dynamic_sampling_filter_path: str | None = flag(None, help="module.function(args, samples) -> bool or (keep, reason): which groups are trained on.")
    dynamic_sampling_max_draws: int = flag(
        10, help="With a filter: stop after this many times the rollout batch size of prompts, naming why groups were dropped."
    )
    custom_generate_function_path: str | None = flag(
        None, help="async module.function(args, prompt, sampling_params, engine) -> Sample, instead of one request."
    )
    rollout_max_response_len: int = flag(1024, help="Most new tokens.")
    rollout_max_context_len: int | None = flag(None, help="Most tokens of prompt and response together. Default: the model's.")
    rollout_temperature: float = flag(1.0, help="Sampling temperature; the trainer's log-probs use it too.")
    rollout_top_p: float = flag(1.0, help="Nucleus sampling.")
    rollout_top_k: int = flag(-1, help="Sample among the k most likely; -1: all.")
    rollout_allow_filtered_sampling: bool = flag(
        False, help="Train although --rollout-top-p or --rollout-top-k draws from another distribution than the one whose log-probs are trained on."
    )
    rollout_stop: list[str] | None = flag(None, help="Strings that end a response, and stay at its end.")
    rollout_stop_token_ids: list[int] | None = flag(None, help="Token ids that end a response.")
    rollout_skip_special_tokens: bool = flag(True, help="Leave special tokens out of the decoded text that rewards see.")
    mask_truncated_samples: bool = flag(False, help="Samples cut off at a length limit train nothing; their group's others are still compared with them.")
    rollout_request_timeout_s: float = flag(600.0, help="Deadline of one generation request, in seconds.")
    rollout_request_retries: int = flag(3, help="Tries of a request that failed for a reason that may pass (connection, 5xx).")

    @property
    def filters_sampling(self) -> bool:
        """Whether unlikely tokens are never drawn."""
        return self.rollout_top_p < 1 or self.rollout_top_k != -1

    def problems(self) -> list[str]:
        """What is impossible about sampling."""
        found = []
        for name in ("rollout_batch_size", "n_samples_per_prompt", "rollout_max_response_len", "dynamic_sampling_max_draws", "rollout_request_retries"):
            if getattr(self, name) < 1:
                found.append(f"--{name.replace('_', '-')} {getattr(self, name)}: must be at least 1.")
        if self.rollout_temperature <= 0:
            found.append(f"--rollout-temperature {self.rollout_temperature}: must be above 0 (a greedy policy has no gradient).")
        if not 0 < self.rollout_top_p <= 1:
            found.append(f"--rollout-top-p {self.rollout_top_p}: must be in (0, 1].")
        if self.rollout_top_k != -1 and self.rollout_top_k < 1:
            found.append(f"--rollout-top-k {self.rollout_top_k}: must be at least 1, or -1 for all tokens.")
        if self.rollout_allow_filtered_sampling and not self.filters_sampling:
            found.append("--rollout-allow-filtered-sampling does nothing without --rollout-top-p or --rollout-top-k. Fix: drop it.")
        if self.over_sampling_batch_size is not None and self.over_sampling_batch_size < self.rollout_batch_size:
            found.append(f"--over-sampling-batch-size {self.over_sampling_batch_size} is below --rollout-batch-size {self.rollout_batch_size}.")
        if self.over_sampling_batch_size and not self.dynamic_sampling_filter_path:
            found.append("--over-sampling-batch-size does nothing without --dynamic-sampling-filter-path.")
        return found


#: Built-in rewards; rollout/rewards implements exactly these.
REWARD_TYPES = ("math", "math_strict", "deepscaler", "deepscaler_strict", "exact", "remote_rm")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """Rewards"""

    rm_type: str | None = flag(None, help=f"Built-in reward: {', '.join(REWARD_TYPES)}.")
    custom_rm_path: str | None = flag(None, help="module.function(args, sample) -> float or dict, sync or async, instead of --rm-type.")
    group_rm: bool = flag(False, help="--custom-rm-path gets all samples of a prompt at once, (args, samples), and gives a list of as many rewards.")
    rm_url: str | None = flag(None, help='--rm-type remote_rm: gets {"prompt", "response", "label"} by POST, answers a number or an object (--reward-key).')
    rm_concurrency: int = flag(64, help="Most requests to --rm-url at a time.")
    rm_retries: int = flag(5, help="Tries of a request to --rm-url that failed for a reason that may pass (connection, 5xx).")
    reward_key: str | None = flag(None, help="Key of the reward when the function, or --rm-url, gives a dict.")
    eval_reward_key: str | None = flag(None, help="The key in evaluations. Default: --reward-key.")
    reward_timeout_s: float = flag(60.0, help="Deadline of scoring one sample (with --group-rm: one prompt's), in seconds.")
    reward_model_weight: float = flag(1.0, help="Reward = the rule's (--rm-type or --custom-rm-path) + this x the model's (--reward-load).")
    overlong_buffer_len: int | None = flag(
        None, help="Punish responses by their length within the last so many tokens before --rollout-max-response-len (DAPO's soft overlong punishment)."
    )
    overlong_penalty_factor: float = flag(1.0, help="The punishment at the limit; it grows to it in proportion.")
    reward_batch_size: int = flag(16, help="Most samples in one forward pass of the reward model.")
    reward_model_timeout_s: float = flag(300.0, help="Deadline of one forward pass of the reward model, in seconds.")

    @property
    def needs_label(self) -> bool:
        """Whether the built-in reward compares with a label."""
        return self.rm_type not in (None, "remote_rm")

    def problems(self) -> list[str]:
        """What is impossible about the reward."""
        found = []
        if self.custom_rm_path and self.rm_type:
            found.append("--rm-type and --custom-rm-path exclude each other.")
        if self.rm_type and self.rm_type not in REWARD_TYPES:
            found.append(f"--rm-type {self.rm_type} is unknown. Known: {', '.join(REWARD_TYPES)}; or --custom-rm-path module.function.")
        if self.group_rm and not self.custom_rm_path:
            found.append("--group-rm does nothing without --custom-rm-path: built-in rewards look at one sample. Fix: drop it, or give a function.")
        if self.rm_type == "remote_rm" and not self.rm_url:
            found.append("--rm-type remote_rm needs --rm-url, where the samples are sent to.")
        if self.rm_url and self.rm_type != "remote_rm":
            found.append("--rm-url does nothing without --rm-type remote_rm. Fix: add it, or drop this.")
        if self.rm_url and urlsplit(self.rm_url).scheme not in ("http", "https"):
            found.append(f"--rm-url {self.rm_url}: is no http(s) URL.")
        for name in ("reward_key", "eval_reward_key"):
            if getattr(self, name) and not (self.custom_rm_path or self.rm_type == "remote_rm"):
                found.append(f"--{name.replace('_', '-')} does nothing without --custom-rm-path or --rm-type remote_rm: other rewards are plain numbers.")
        if self.overlong_buffer_len is None and self.overlong_penalty_factor != RewardConfig.overlong_penalty_factor:
            found.append(f"--overlong-penalty-factor {self.overlong_penalty_factor} does nothing without --overlong-buffer-len. Fix: add it, or drop this.")
        if not (self.overlong_penalty_factor > 0 and math.isfinite(self.overlong_penalty_factor)):
            found.append(f"--overlong-penalty-factor {self.overlong_penalty_factor}: must be above 0 and finite.")
        for name in ("rm_concurrency", "rm_retries", "reward_batch_size", "overlong_buffer_len"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                found.append(f"--{name.replace('_', '-')} {getattr(self, name)}: must be at least 1.")
        for name in ("reward_timeout_s", "reward_model_timeout_s"):
            if not getattr(self, name) > 0:
                found.append(f"--{name.replace('_', '-')} {getattr(self, name)}: must be above 0.")
        if not math.isfinite(self.reward_model_weight):
            found.append(f"--reward-model-weight {self.reward_model_weight}: must be a finite number.")
        return found


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
    eval_pass_threshold: float = flag(1.0, help="Least reward with which a sample passes, for eval/*/pass@k.")

    def datasets(self) -> dict[str, str]:
        """Name -> path; {} when there is no evaluation."""
        items = self.eval_prompt_data or []
        return {"eval": items[0]} if len(items) == 1 else dict(zip(items[::2], items[1::2], strict=True))

    def problems(self) -> list[str]:
        """What is impossible about evaluation."""
        found = []
        items = self.eval_prompt_data or []
        if len(items) > 1 and len(items) % 2:
            return [f"--eval-prompt-data takes pairs of name and path, but got {len(items)} values."]
        if len(items) > 1 and len(set(items[::2])) != len(items) // 2:
            found.append("--eval-prompt-data names a data set twice.")
        if self.eval_interval is not None and not items:
            found.append("--eval-interval needs --eval-prompt-data.")
        if items and self.eval_interval is None:
            found.append("--eval-prompt-data needs --eval-interval.")
        if self.eval_interval is not None and self.eval_interval < 1:
            found.append(f"--eval-interval {self.eval_interval}: must be at least 1.")
        if self.n_samples_per_eval_prompt < 1:
            found.append(f"--n-samples-per-eval-prompt {self.n_samples_per_eval_prompt}: must be at least 1.")
        if not math.isfinite(self.eval_pass_threshold):
            found.append(f"--eval-pass-threshold {self.eval_pass_threshold}: must be a finite number.")
        return found

    def missing_files(self) -> list[str]:
        """Paths that do not exist."""
        return [
            f"--eval-prompt-data {name}: {split_slice(path)[0]}: no such file."
            for name, path in self.datasets().items()
            if not os.path.isfile(split_slice(path)[0])
        ]
