"""Which loss, and what a sample's reward is compared with: what the other flags of a loss are for."""

from __future__ import annotations

import dataclasses

from slime_like.config.algorithms import (
    CUSTOM_POLICY_LOSS,
    ESTIMATORS,
    POLICY_LOSSES,
    Estimator,
    PolicyLoss,
    summaries,
)
from slime_like.config.base import flag


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossChoice:
    """Which loss, which estimator, and the user's own functions instead of either."""

    loss_type: str = flag(
        "policy_loss",
        choices=("policy_loss", "sft_loss", "custom_loss"),
        help=(
            'sft_loss trains on each row\'s "response", or on conversations (docs/supervised.md), and starts no'
            " engines; custom_loss: --custom-loss-function-path."
        ),
    )
    custom_loss_function_path: str | None = flag(
        None, help="The loss of --loss-type custom_loss: function(args, batch, reduce) -> (loss, metrics)."
    )
    advantage_estimator: str = flag(
        "grpo",
        choices=tuple(ESTIMATORS),
        help=f"What a sample's reward is compared with: {summaries(ESTIMATORS)}.",
    )
    policy_loss: str | None = flag(
        None,
        choices=tuple(POLICY_LOSSES),
        help=(
            f"The loss of a token: {summaries(POLICY_LOSSES)}. Default: clip; with --advantage-estimator gspo or cispo"
            " the one of that name."
        ),
    )
    custom_policy_loss_function_path: str | None = flag(
        None,
        help=(
            "Instead of --policy-loss: function(args, batch) -> (loss of each token, metrics of each token); means, KL,"
            " entropy and corrections stay."
        ),
    )
    custom_advantage_function_path: str | None = flag(
        None,
        help=(
            "function(args, samples) -> one advantage for each of a group's samples, instead of the estimator's"
            " comparison within the group."
        ),
    )
    disable_compute_advantages_and_returns: bool = flag(
        False, help="Supervised runs need no advantages; only with --loss-type sft_loss."
    )
    disable_grpo_std_normalization: bool = flag(False, help="Centre rewards only (Dr. GRPO).")
    disable_rewards_normalization: bool = flag(False, help="Use raw rewards as advantages.")

    @property
    def estimator(self) -> Estimator:
        """The row of --advantage-estimator."""
        return ESTIMATORS[self.advantage_estimator]

    @property
    def policy_loss_name(self) -> str:
        """What --policy-loss is, given or by the estimator."""
        return self.policy_loss or self.estimator.policy_loss

    @property
    def policy_row(self) -> PolicyLoss:
        """The row of the policy loss."""
        return CUSTOM_POLICY_LOSS if self.custom_policy_loss_function_path else POLICY_LOSSES[self.policy_loss_name]

    @property
    def picks_tokens(self) -> bool:
        """Whether the policy loss treats some tokens of a train step apart; who they are is known before the step."""
        return self.loss_type == "policy_loss" and self.policy_row.picks is not None

    def problems(self) -> list[str]:
        """What cannot be chosen together."""
        problems = []
        if self.disable_compute_advantages_and_returns and self.loss_type != "sft_loss":
            problems.append(
                "--disable-compute-advantages-and-returns leaves a policy loss without advantages. Fix: drop it, or"
                " --loss-type sft_loss."
            )
        if self.loss_type == "policy_loss" and self.policy_loss and self.custom_policy_loss_function_path:
            problems.append(
                f"--policy-loss {self.policy_loss} is what --custom-policy-loss-function-path replaces. Fix: drop one"
                " of them."
            )
        return problems + self._group_problems() + self._custom_loss_problems()

    def _group_problems(self) -> list[str]:
        """What is about the comparison within a group, where there is none or another one."""
        problems, name, row = [], self.advantage_estimator, self.estimator
        if row.compares_with != "group":
            comparing = {"critic": "compares with a critic", "batch": "compares with the whole batch"}[
                row.compares_with
            ]
            for flag_name in (
                "disable_grpo_std_normalization",
                "disable_rewards_normalization",
                "custom_advantage_function_path",
            ):
                if getattr(self, flag_name):
                    problems.append(
                        f"{shown(flag_name)} is about groups, and --advantage-estimator {name} {comparing}. Fix:"
                        " drop it."
                    )
        if row.scale == "batch" and self.disable_grpo_std_normalization:
            problems.append(
                f"--disable-grpo-std-normalization takes away what --advantage-estimator {name} is about. Fix: dr_grpo."
            )
        if self.custom_advantage_function_path and (
            self.disable_grpo_std_normalization or self.disable_rewards_normalization
        ):
            problems.append(
                "--custom-advantage-function-path replaces the comparison that --disable-…-normalization is about. Fix:"
                " drop one of them."
            )
        return problems

    def _custom_loss_problems(self) -> list[str]:
        """What a loss that is the user's own as a whole has no place for."""
        problems = []
        is_custom = self.loss_type == "custom_loss"
        if is_custom != bool(self.custom_loss_function_path):
            problems.append(
                "--loss-type custom_loss and --custom-loss-function-path belong together. Fix: give both, or neither."
            )
        parts = (
            "use_tis",
            "use_opsm",
            "custom_pg_loss_reducer_function_path",
            "kl_loss_coef",
            "entropy_coef",
            "policy_loss",
            "custom_policy_loss_function_path",
        )
        return problems + [
            f"{shown(name)} is a part of the policy loss, which --loss-type custom_loss replaces whole. Fix: drop it;"
            " or drop --loss-type and give --custom-policy-loss-function-path, which replaces the loss of a token only."
            for name in parts
            if is_custom and getattr(self, name)
        ]

    def changed(self, names: tuple[str, ...]) -> list[str]:
        """Those flags of a loss that are not at their defaults."""
        return [name for name in names if getattr(self, name) != getattr(type(self), name)]


def shown(field: str) -> str:
    """A field as the user writes it. Example: shown("eps_clip") -> "--eps-clip"."""
    return f"--{field.replace('_', '-')}"
