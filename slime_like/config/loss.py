"""Advantages, losses, corrections for off-policy samples, and what a mean is taken over.

docs/algorithms.md has the papers.
"""

from __future__ import annotations

import dataclasses
import os

from slime_like.config.algorithms import (
    CUSTOM_POLICY_LOSS,
    ESTIMATOR_FLAGS,
    ESTIMATORS,
    POLICY_LOSS_FLAGS,
    POLICY_LOSSES,
    Estimator,
    PolicyLoss,
    owners,
    summaries,
)
from slime_like.config.base import flag
from slime_like.errors import CheckpointError


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossConfig:
    """Loss and advantages"""

    loss_type: str = flag(
        "policy_loss",
        choices=("policy_loss", "sft_loss", "custom_loss"),
        help=(
            'sft_loss trains on each row\'s "response" and starts no engines; custom_loss: --custom-loss-function-path.'
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
    eps_clip: float = flag(
        0.2, help="Clip range of the ratio below 1; with --policy-loss gmpo of the log-ratio below 0."
    )
    eps_clip_high: float | None = flag(
        None, help="Clip range above 1 (clip-higher), gmpo: above 0. Default: --eps-clip."
    )
    eps_clip_c: float | None = flag(None, help="Dual clip: bound for negative advantages, above 1; --policy-loss clip.")
    sapo_temperature_pos: float = flag(
        1.0, help="How fast the gate closes as the ratio leaves 1, where the advantage is positive; --policy-loss sapo."
    )
    sapo_temperature_neg: float = flag(1.05, help="The same where the advantage is not positive.")
    clip_cov_ratio: float = flag(
        0.0002, help="Share of a train step's trained tokens that --policy-loss clip_cov leaves out; at least one."
    )
    clip_cov_lb: float = flag(
        1.0, help="Left out are tokens whose covariance is above this, drawn at random; clip_cov."
    )
    clip_cov_ub: float = flag(5.0, help="And below this; clip_cov.")
    kl_cov_ratio: float = flag(
        0.0002,
        help=(
            "Share of a train step's trained tokens that --policy-loss kl_cov holds back: those of highest covariance."
        ),
    )
    ppo_kl_coef: float = flag(1.0, help="Weight of their |log new - log old probability|; kl_cov.")
    use_kl_loss: bool = flag(False, help="Add --kl-loss-coef x KL(policy, reference) to the loss; loads the reference.")
    kl_loss_coef: float = flag(0.0, help="Weight of the KL loss. At 0 the KL is only measured.")
    kl_loss_type: str = flag(
        "k1",
        choices=("k1", "k2", "k3", "low_var_kl"),
        help=(
            "KL estimator of the KL loss (Schulman); low_var_kl is k3 clamped to +-10. k1 without --use-unbiased-kl"
            " teaches nothing on average."
        ),
    )
    use_unbiased_kl: bool = flag(
        False, help="Weigh the KL loss by new / old probability, so that it stays unbiased when samples are off-policy."
    )
    kl_coef: float = flag(
        0.0,
        help=(
            "Weight of a KL penalty (k1, to --ref-load) inside each token's reward; with ppo, reinforce_plus_plus or"
            " reinforce_plus_plus_baseline."
        ),
    )
    ref_update_interval: int | None = flag(
        None, help="Every this many rollouts the reference becomes the present policy. Default: it stays --ref-load."
    )
    gamma: float = flag(1.0, help="Discount of a later token's reward; ppo, reinforce_plus_plus.")
    lambd: float = flag(1.0, help="GAE's lambda: 1 trusts the rewards, 0 the critic; ppo.")
    normalize_advantages: bool = flag(
        False, help="Whiten the advantages over the tokens of the rollout; needed by reinforce_plus_plus(_baseline)."
    )
    value_clip: float = flag(
        0.2,
        help="How far the critic's value of a token may move in one rollout step before its loss stops pulling; ppo.",
    )
    num_critic_only_steps: int = flag(0, help="Rollout steps at the start that train the critic only; ppo.")
    use_opd: bool = flag(
        False,
        help="On-policy distillation: subtract --opd-kl-coef x (log-prob - teacher's) from each token's advantage.",
    )
    opd_type: str = flag(
        "megatron",
        choices=("megatron",),
        help="Where the teacher is scored: by the trainer itself, with the teacher's weights swapped in.",
    )
    opd_kl_coef: float = flag(1.0, help="Weight of the distillation; with --use-opd.")
    opd_teacher_load: str | None = flag(
        None, help="HF folder or Megatron checkpoint of the teacher, a model of the same architecture; with --use-opd."
    )
    opd_teacher_ckpt_step: int | None = flag(
        None, help="Which checkpoint of --opd-teacher-load, a Megatron folder. Default: the newest."
    )
    use_rollout_logprobs: bool = flag(
        False,
        help="Take the ratio against the engine's log-probs instead of the trainer's before the rollout's first step.",
    )
    use_tis: bool = flag(
        False,
        help="Weigh each token's policy loss by trainer's / engine's probability (truncated importance sampling).",
    )
    tis_level: str = flag(
        "token",
        choices=("token", "sequence", "geometric"),
        help="Whose probability: the token's, the whole sample's (a product), or its tokens' geometric mean.",
    )
    tis_mode: str = flag(
        "truncate",
        choices=("truncate", "mask"),
        help="A weight beyond the bounds: truncate holds it at the bound, mask makes it 0 (IcePop).",
    )
    tis_clip: float = flag(2.0, help="Upper bound of that weight.")
    tis_clip_low: float = flag(0.0, help="Lower bound of that weight.")
    tis_reject_level: str | None = flag(
        None,
        choices=("sequence", "geometric"),
        help=(
            "Reject whole samples, too: those whose product of weights, or its mean per token, is outside"
            " --tis-reject-low and --tis-reject-high."
        ),
    )
    tis_reject_low: float | None = flag(None, help="Lower bound of what --tis-reject-level keeps. Default: 0.")
    tis_reject_high: float | None = flag(None, help="Upper bound of what --tis-reject-level keeps; needed by it.")
    custom_tis_function_path: str | None = flag(
        None,
        help=(
            "Instead of --tis-level and --tis-mode: function(args, pg_loss, train_log_probs, rollout_log_probs,"
            " sample_of_token) -> (pg_loss, metrics)."
        ),
    )
    get_mismatch_metrics: bool = flag(
        False,
        help=(
            "Report how far the engine's probabilities are from the trainer's (train/mismatch_*); changes no gradient."
        ),
    )
    use_rollout_routing_replay: bool = flag(
        False,
        help=(
            "Train with the experts that the engine's routers chose (R3); models with experts only. Log-probs of the"
            " policy are computed with them too."
        ),
    )
    use_routing_replay: bool = flag(
        False,
        help=(
            "Train each step of a rollout with the experts that the pass before the first step chose (R2);"
            " --use-rollout-routing-replay includes it."
        ),
    )
    use_opsm: bool = flag(
        False,
        help=(
            "Off-policy sequence masking: bad samples that the policy has moved away from by more than --opsm-delta"
            " teach nothing."
        ),
    )
    opsm_delta: float = flag(
        1e-4, help="That distance: mean over a sample's tokens of the engine's log-prob - the policy's."
    )
    entropy_coef: float = flag(0.0, help="Weight of the entropy bonus.")
    calculate_per_token_loss: bool = flag(
        False,
        help="Mean over all tokens of the batch instead of per sample, then over samples: --loss-reduction token.",
    )
    loss_reduction: str | None = flag(
        None,
        choices=("sample", "token", "rollout", "constant"),
        help=(
            "sample: mean over each sample's tokens, then over samples (default). token: over all tokens. rollout: as"
            " sample, where samples that are parts of one response count as one. constant: sum over tokens / (samples x"
            " --loss-divisor)."
        ),
    )
    loss_divisor: int | None = flag(
        None, help="Tokens that a sample is divided by with --loss-reduction constant, whatever its length (Dr. GRPO)."
    )
    custom_pg_loss_reducer_function_path: str | None = flag(
        None,
        help=(
            "function(args, samples) -> what one trained token of each sample of a train step weighs in the policy"
            " loss, instead of --loss-reduction."
        ),
    )
    reset_optimizer_states: bool = flag(
        False, help="Forget Adam's moments and step count before each rollout's first step."
    )

    def problems(self) -> list[str]:
        """What is impossible about the loss."""
        problems = []
        if self.eps_clip < 0 or (self.eps_clip_high or 0) < 0:
            problems.append(f"--eps-clip {self.eps_clip}, --eps-clip-high {self.eps_clip_high}: must not be negative.")
        if self.eps_clip_c is not None and self.eps_clip_c <= 1:
            problems.append(f"--eps-clip-c {self.eps_clip_c}: must be above 1.")
        if self.disable_compute_advantages_and_returns and self.loss_type != "sft_loss":
            problems.append(
                "--disable-compute-advantages-and-returns leaves a policy loss without advantages. Fix: drop it, or"
                " --loss-type sft_loss."
            )
        if self.kl_loss_coef and not self.use_kl_loss:
            problems.append(f"--kl-loss-coef {self.kl_loss_coef} does nothing without --use-kl-loss. Fix: add it.")
        if self.kl_coef and not self.use_kl_loss and self.kl_loss_type != LossConfig.kl_loss_type:
            problems.append(
                f"--kl-loss-type {self.kl_loss_type} is for the KL loss; the KL of --kl-coef {self.kl_coef} is always"
                " k1. Fix: drop one of them."
            )
        if self.use_unbiased_kl and not self.use_kl_loss:
            problems.append("--use-unbiased-kl does nothing without --use-kl-loss. Fix: add it.")
        if self.use_unbiased_kl and self.kl_loss_type == "k2":
            problems.append(
                "--use-unbiased-kl with --kl-loss-type k2: half a square is no unbiased KL, however it is weighed. Fix:"
                " k1, k3 or low_var_kl."
            )
        if self.ref_update_interval is not None and self.ref_update_interval < 1:
            problems.append(f"--ref-update-interval {self.ref_update_interval}: must be at least 1.")
        return (
            problems
            + self._advantage_problems()
            + self._policy_problems()
            + self._correction_problems()
            + self._reduction_problems()
        )

    def _advantage_problems(self) -> list[str]:
        """What the estimators have or lack."""
        problems, name, row = [], self.advantage_estimator, self.estimator
        if not 0 <= self.gamma <= 1 or not 0 <= self.lambd <= 1:
            problems.append(f"--gamma {self.gamma}, --lambd {self.lambd}: must be from 0 to 1.")
        if self.value_clip <= 0:
            problems.append(f"--value-clip {self.value_clip}: must be above 0.")
        if self.num_critic_only_steps < 0:
            problems.append(f"--num-critic-only-steps {self.num_critic_only_steps}: must not be negative.")
        if self.kl_coef < 0:
            problems.append(f"--kl-coef {self.kl_coef}: must not be negative.")
        if self.kl_coef and self.kl_loss_coef:
            problems.append(
                f"--kl-coef {self.kl_coef} and --kl-loss-coef {self.kl_loss_coef} punish the same KL twice. Fix: one of"
                " them."
            )
        if self.kl_coef and not row.takes_kl:
            takers = ", ".join(other for other, its in ESTIMATORS.items() if its.takes_kl)
            problems.append(
                f"--kl-coef {self.kl_coef} needs rewards per token: --advantage-estimator {takers}. Fix: --use-kl-loss"
                " --kl-loss-coef."
            )
        if row.is_whitened and not self.normalize_advantages:
            problems.append(
                f"--advantage-estimator {name} is defined with whitened advantages. Fix: --normalize-advantages."
            )
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
                        f"{_shown(flag_name)} is about groups, and --advantage-estimator {name} {comparing}. Fix:"
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
        for flag_name in self._changed(ESTIMATOR_FLAGS):
            if flag_name not in row.flags:
                known = " or ".join(reversed(owners(ESTIMATORS, flag_name)))
                problems.append(
                    f"{_shown(flag_name)} does nothing without --advantage-estimator {known}. Fix: add it, or drop"
                    " this."
                )
        return problems + self._distillation_problems()

    def _distillation_problems(self) -> list[str]:
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

    def _policy_problems(self) -> list[str]:
        """Which loss, and what goes with it."""
        problems = []
        custom = self.loss_type == "custom_loss"
        if custom != bool(self.custom_loss_function_path):
            problems.append(
                "--loss-type custom_loss and --custom-loss-function-path belong together. Fix: give both, or neither."
            )
        if custom:
            parts = (
                "use_tis",
                "use_opsm",
                "custom_pg_loss_reducer_function_path",
                "kl_loss_coef",
                "entropy_coef",
                "policy_loss",
            )
            for name in (*parts, "custom_policy_loss_function_path"):
                if getattr(self, name):
                    problems.append(
                        f"{_shown(name)} is a part of the policy loss, which --loss-type custom_loss replaces whole."
                        " Fix: drop it; or drop --loss-type and give --custom-policy-loss-function-path, which"
                        " replaces the loss of a token only."
                    )
        elif self.loss_type == "policy_loss":
            problems += self._policy_loss_problems()
        return problems

    def _policy_loss_problems(self) -> list[str]:
        """What --policy-loss, or the user's own loss of a token, has no use for."""
        problems, name, row = [], self.policy_loss_name, self.policy_row
        if self.policy_loss and self.custom_policy_loss_function_path:
            problems.append(
                f"--policy-loss {self.policy_loss} is what --custom-policy-loss-function-path replaces. Fix: drop one"
                " of them."
            )
        for flag_name in self._changed(POLICY_LOSS_FLAGS):
            if flag_name not in row.flags:
                known = ", ".join(owners(POLICY_LOSSES, flag_name))
                value = getattr(self, flag_name)
                problems.append(
                    f"{_shown(flag_name)} {value} does nothing with --policy-loss {name}, only with {known}. Fix: one"
                    " of them, or drop this."
                )
        if self.use_rollout_logprobs and not row.has_ratio:
            problems.append(
                f"--use-rollout-logprobs is about a ratio, and --policy-loss {name} has none. Fix: drop it."
            )
        if row.needs_sample_advantages and self.varies_within_samples:
            origin = (
                "--use-opd"
                if self.use_opd
                else f"--advantage-estimator {self.advantage_estimator}" + (" with --kl-coef" if self.kl_coef else "")
            )
            problems.append(
                f"--policy-loss {name} has one term a sample, and {origin} gives each token an advantage of its own."
                " Fix: --policy-loss gspo or clip."
            )
        if min(self.sapo_temperature_pos, self.sapo_temperature_neg) <= 0:
            problems.append(
                f"--sapo-temperature-pos {self.sapo_temperature_pos}, --sapo-temperature-neg"
                f" {self.sapo_temperature_neg}: must be above 0."
            )
        for flag_name in ("clip_cov_ratio", "kl_cov_ratio"):
            if not 0 < getattr(self, flag_name) <= 1:
                problems.append(
                    f"{_shown(flag_name)} {getattr(self, flag_name)}: a share of the tokens is above 0 and at most 1."
                )
        if self.clip_cov_lb >= self.clip_cov_ub:
            problems.append(
                f"--clip-cov-lb {self.clip_cov_lb} and --clip-cov-ub {self.clip_cov_ub}: nothing lies between them."
                " Fix: lower < upper."
            )
        if self.ppo_kl_coef < 0:
            problems.append(f"--ppo-kl-coef {self.ppo_kl_coef}: must not be negative.")
        return problems

    def _correction_problems(self) -> list[str]:
        """What is impossible about off-policy corrections."""
        problems = []
        if not 0 <= self.tis_clip_low <= self.tis_clip:
            problems.append(
                f"--tis-clip-low {self.tis_clip_low} and --tis-clip {self.tis_clip}: need 0 <= low <= high."
            )
        if self.use_tis and self.use_rollout_logprobs:
            problems.append("--use-tis and --use-rollout-logprobs both correct for the engine. Fix: one of them.")
        if self.custom_tis_function_path and not self.use_tis:
            problems.append("--custom-tis-function-path does nothing without --use-tis. Fix: add it.")
        for name in self._changed(("tis_level", "tis_mode", "tis_reject_level")):
            shown = f"{_shown(name)} {getattr(self, name)}"
            if not self.use_tis:
                problems.append(f"{shown} does nothing without --use-tis. Fix: add it.")
            if self.custom_tis_function_path:
                problems.append(
                    f"{shown} is for the built-in correction, which --custom-tis-function-path replaces. Fix: drop one"
                    " of them."
                )
        low, high = self.tis_reject_low or 0.0, self.tis_reject_high
        if self.tis_reject_level is None and (high is not None or self.tis_reject_low is not None):
            problems.append(
                "--tis-reject-low and --tis-reject-high do nothing without --tis-reject-level. Fix: add it, or drop"
                " them."
            )
        if self.tis_reject_level is not None and high is None:
            problems.append(
                f"--tis-reject-level {self.tis_reject_level} needs --tis-reject-high, above which a sample is rejected."
            )
        if high is not None and not 0 <= low < high:
            problems.append(f"--tis-reject-low {low} and --tis-reject-high {high}: need 0 <= low < high.")
        if self.opsm_delta < 0:
            problems.append(f"--opsm-delta {self.opsm_delta}: must not be negative.")
        if self.opsm_delta != LossConfig.opsm_delta and not self.use_opsm:
            problems.append(f"--opsm-delta {self.opsm_delta} does nothing without --use-opsm. Fix: add it.")
        return problems

    def _reduction_problems(self) -> list[str]:
        """What is impossible about means."""
        problems = []
        if self.calculate_per_token_loss and self.loss_reduction not in (None, "token"):
            problems.append(
                f"--calculate-per-token-loss is --loss-reduction token, not {self.loss_reduction}. Fix: one of them."
            )
        if (self.loss_reduction == "constant") != (self.loss_divisor is not None):
            problems.append("--loss-reduction constant and --loss-divisor belong together. Fix: give both, or neither.")
        if self.loss_divisor is not None and self.loss_divisor < 1:
            problems.append(f"--loss-divisor {self.loss_divisor}: must be at least 1.")
        return problems

    def missing_files(self) -> list[str]:
        """Paths that do not exist; checked before anything starts."""
        if self.use_opd and self.opd_teacher_load and not os.path.isdir(self.opd_teacher_load):
            return [f"--opd-teacher-load {self.opd_teacher_load}: no such folder."]
        return []

    def _changed(self, names: tuple[str, ...]) -> list[str]:
        """Those fields that are not at their defaults."""
        return [name for name in names if getattr(self, name) != getattr(LossConfig, name)]

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

    @property
    def clip_high(self) -> float:
        """Clip range above 1."""
        return self.eps_clip if self.eps_clip_high is None else self.eps_clip_high

    @property
    def reduction(self) -> str:
        """sample, token, rollout or constant."""
        return self.loss_reduction or ("token" if self.calculate_per_token_loss else "sample")

    @property
    def kl_in_trainer(self) -> bool:
        """Whether the policy's trainer puts the KL into advantages by itself.

        With a critic, which needs it too, it comes with the samples.
        """
        return self.kl_coef > 0 and self.estimator.compares_with != "critic"

    def updates_reference_after(self, step: int) -> bool:
        """Whether the reference becomes the policy when rollout step `step` has been trained on."""
        return bool(self.ref_update_interval) and (step + 1) % (self.ref_update_interval or 1) == 0

    def check_resume(self, num_rollouts_done: int) -> None:
        """Raise CheckpointError if a checkpoint was written between two updates of the reference: the one of that time
        is not in it.
        """
        late = num_rollouts_done % (self.ref_update_interval or 1)
        if late:
            raise CheckpointError(
                f"a checkpoint after {num_rollouts_done} rollouts does not hold the reference, which was updated {late}"
                f" rollouts before (--ref-update-interval {self.ref_update_interval}). Fix: --ckpt-step of a multiple"
                " of the interval; or --finetune, with another --ref-load."
            )

    @property
    def varies_within_samples(self) -> bool:
        """Whether the tokens of one sample may have different advantages."""
        return self.estimator.tokens is not None or self.kl_coef > 0 or self.use_opd

    @property
    def has_token_advantages(self) -> bool:
        """Whether the trainer makes an advantage for each token; else every token has its sample's."""
        return (self.varies_within_samples or self.normalize_advantages) and self.loss_type != "sft_loss"


def _shown(field: str) -> str:
    return f"--{field.replace('_', '-')}"
