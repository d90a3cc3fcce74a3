"""Rewards: built-in rules, functions, servers, a model."""

from __future__ import annotations

import dataclasses
import math
from urllib.parse import urlsplit

from slime_like.config.base import flag
from slime_like.config.bounds import LONGEST_WAIT_S

#: Built-in rewards; rollout/rewards implements exactly these.
REWARD_TYPES = (
    "math",
    "math_strict",
    "deepscaler",
    "deepscaler_strict",
    "dapo",
    "exact",
    "f1",
    "gpqa",
    "ifbench",
    "remote_rm",
)
#: Before any of them: of the response only its last box is looked at.
BOXED = "boxed_"


def reward_type_problem(rm_type: object) -> str | None:
    """What is wrong with a name of a built-in reward; None if nothing is."""
    if str(rm_type).removeprefix(BOXED) in REWARD_TYPES:
        return None
    if rm_type == "random":
        return "--rm-type random is refused: chance teaches nothing. Fix: --custom-rm-path module.function."
    return f"--rm-type {rm_type} is unknown. Known: {', '.join(REWARD_TYPES)}; or --custom-rm-path module.function."


def needs_label(rm_type: str) -> bool:
    """Whether a built-in reward compares with a label."""
    return rm_type.removeprefix(BOXED) not in ("ifbench", "remote_rm")


def _is_http(url: str) -> bool:
    try:
        return urlsplit(url).scheme in ("http", "https")
    except ValueError:  # brackets of no IPv6 address
        return False


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """Rewards"""

    rm_type: str | None = flag(
        None,
        help=(
            f"Built-in reward: {', '.join(REWARD_TYPES)}; boxed_<one of them> looks at the last box only. A row's"
            " rm_type, in its metadata or as a key, goes before."
        ),
    )
    custom_rm_path: str | None = flag(
        None, help="module.function(args, sample) -> float or dict, sync or async, instead of --rm-type."
    )
    group_rm: bool = flag(
        False,
        help=(
            "--custom-rm-path gets all samples of a prompt at once, (args, samples), and gives a list of as many"
            " rewards."
        ),
    )
    custom_reward_post_process_path: str | None = flag(
        None,
        help=(
            "module.function(args, samples) -> as many numbers: what all answers of a rollout are pushed by, in place"
            " of rewards normalised within each group."
        ),
    )
    rm_url: str | None = flag(
        None,
        help=(
            '--rm-type remote_rm: gets {"prompt", "response", "label"} by POST, answers a number or an object'
            " (--reward-key)."
        ),
    )
    rm_concurrency: int = flag(64, help="Most requests to --rm-url at a time.", least=1)
    rm_retries: int = flag(
        5,
        help="Tries of a request to --rm-url that failed for a reason that may pass (connection, 5xx).",
        least=1,
    )
    reward_key: str | None = flag(None, help="Key of the reward when the function, or --rm-url, gives a dict.")
    eval_reward_key: str | None = flag(None, help="The key in evaluations. Default: --reward-key.")
    reward_timeout_s: float = flag(
        60.0,
        help="Deadline of scoring one sample (with --group-rm: one prompt's), in seconds.",
        above=0,
        most=LONGEST_WAIT_S,
    )
    on_reward_error: str = flag(
        "fail",
        choices=("fail", "drop"),
        help=(
            "When a reward, or --custom-generate-function-path, raises, hangs or gives no number: end the run, or throw"
            " that prompt's group away and ask it again."
        ),
    )
    reward_error_tries: int = flag(
        3,
        help=(
            "With --on-reward-error drop: groups of a prompt that may have such an error, or one of its environment,"
            " before it is put aside for the rest of the run and named."
        ),
        least=1,
    )
    max_reward_error_share: float = flag(
        0.1,
        help="With --on-reward-error drop: the run ends when more than this share of its last 256 groups had an error.",
        least=0,
        most=1,
    )
    reward_model_weight: float = flag(
        1.0, help="Reward = the rule's (--rm-type or --custom-rm-path) + this x the model's (--reward-load)."
    )
    overlong_buffer_len: int | None = flag(
        None,
        help=(
            "Punish responses by their length within the last so many tokens before --rollout-max-response-len (DAPO's"
            " soft overlong punishment)."
        ),
        least=1,
    )
    overlong_penalty_factor: float = flag(
        1.0, help="The punishment at the limit; it grows to it in proportion.", above=0
    )
    reward_batch_size: int = flag(16, help="Most samples in one forward pass of the reward model.", least=1)
    reward_model_timeout_s: float = flag(
        300.0, help="Deadline of one forward pass of the reward model, in seconds.", above=0, most=LONGEST_WAIT_S
    )

    @property
    def drops_errors(self) -> bool:
        """Whether an error of the user's own functions costs a group, and not the run."""
        return self.on_reward_error == "drop"

    @property
    def uses_server(self) -> bool:
        """Whether --rm-type is a server's."""
        return str(self.rm_type).removeprefix(BOXED) == "remote_rm"

    @property
    def needs_label(self) -> bool:
        """Whether the built-in reward compares with a label."""
        return self.rm_type is not None and needs_label(self.rm_type)

    def problems(self) -> list[str]:
        """What is impossible about the reward."""
        problems = []
        if self.custom_rm_path and self.rm_type:
            problems.append("--rm-type and --custom-rm-path exclude each other.")
        if self.rm_type and (problem := reward_type_problem(self.rm_type)):
            problems.append(problem)
        if self.group_rm and not self.custom_rm_path:
            problems.append(
                "--group-rm does nothing without --custom-rm-path: built-in rewards look at one sample. Fix: drop it,"
                " or give a function."
            )
        if self.uses_server and not self.rm_url:
            problems.append("--rm-type remote_rm needs --rm-url, where the samples are sent to.")
        if self.rm_url and not self.rm_type:
            problems.append("--rm-url does nothing without --rm-type remote_rm. Fix: add it, or drop this.")
        if self.rm_url and not _is_http(self.rm_url):
            problems.append(f"--rm-url {self.rm_url}: is no http(s) URL.")
        for name in ("reward_key", "eval_reward_key"):
            is_dapo = self.rm_type == "dapo" and getattr(self, name) == "score"  # as slime's dapo wants it
            if getattr(self, name) and not (self.custom_rm_path or self.rm_url or is_dapo):
                problems.append(
                    f"--{name.replace('_', '-')} does nothing without --custom-rm-path or --rm-type remote_rm: other"
                    " rewards are plain numbers."
                )
        if self.overlong_buffer_len is None and self.overlong_penalty_factor != RewardConfig.overlong_penalty_factor:
            problems.append(
                f"--overlong-penalty-factor {self.overlong_penalty_factor} does nothing without --overlong-buffer-len."
                " Fix: add it, or drop this."
            )
        if not (self.overlong_penalty_factor > 0 and math.isfinite(self.overlong_penalty_factor)):
            problems.append(f"--overlong-penalty-factor {self.overlong_penalty_factor}: must be above 0 and finite.")
        for name in ("rm_concurrency", "rm_retries", "reward_batch_size", "overlong_buffer_len"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                problems.append(f"--{name.replace('_', '-')} {getattr(self, name)}: must be at least 1.")
        for name in ("reward_error_tries", "max_reward_error_share"):
            if getattr(self, name) != getattr(RewardConfig, name) and not self.drops_errors:
                problems.append(
                    f"--{name.replace('_', '-')} does nothing without --on-reward-error drop. Fix: add it, or drop"
                    " this."
                )
        for name in ("reward_timeout_s", "reward_model_timeout_s"):
            if not getattr(self, name) > 0:
                problems.append(f"--{name.replace('_', '-')} {getattr(self, name)}: must be above 0.")
        if not math.isfinite(self.reward_model_weight):
            problems.append(f"--reward-model-weight {self.reward_model_weight}: must be a finite number.")
        return problems
