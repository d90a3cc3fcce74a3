"""What runs on which GPUs."""

from __future__ import annotations

import dataclasses

from slime_like.config.base import flag
from slime_like.config.bounds import LONGEST_WAIT_S
from slime_like.utils.net import engine_url

#: What --plan-bandwidth may set.
BANDWIDTHS = ("ipc", "nvlink", "network", "disk", "pcie")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlacementConfig:
    """Placement: which role sits on which GPUs (logical ones on a CPU host)"""

    actor_num_nodes: int = flag(1, help="Nodes of the trainer.", least=1, most=1_000_000)
    actor_num_gpus_per_node: int = flag(8, help="GPUs of the trainer on each node.", least=1, most=1_000_000)
    critic_num_nodes: int | None = flag(
        None,
        help="Nodes of the critic, with --advantage-estimator ppo. Default: the actor's.",
        least=1,
        most=1_000_000,
    )
    critic_num_gpus_per_node: int | None = flag(
        None, help="GPUs of the critic on each node. Default: the actor's.", least=1, most=1_000_000
    )
    ref_num_nodes: int | None = flag(
        None, help="Nodes of the reference model. Default: the actor's.", least=1, most=1_000_000
    )
    ref_num_gpus_per_node: int | None = flag(
        None,
        help="GPUs of the reference model on each node. Default: the actor's.",
        least=1,
        most=1_000_000,
    )
    reward_num_nodes: int | None = flag(
        None, help="Nodes of a reward model, with --reward-load. Default: the actor's.", least=1, most=1_000_000
    )
    reward_num_gpus_per_node: int | None = flag(
        None,
        help="GPUs of the reward model on each node. Default: the actor's.",
        least=1,
        most=1_000_000,
    )
    colocate_policy_ref: bool = flag(
        True,
        help="Reference model swapped into the actor's processes; --no-colocate-policy-ref gives it GPUs of its own.",
    )
    colocate_critic_reward: bool = flag(False, help="Critic and reward model share GPUs.")
    colocate_training: bool = flag(False, help="Policy, critic, reference and reward model all share the same GPUs.")
    rollout_num_gpus: int | None = flag(
        None,
        help="GPUs of all engines. With --colocate: the trainer's by default. With --rollout-external: derived.",
        least=0,
        most=1_000_000,
    )
    rollout_num_gpus_per_engine: int = flag(
        1, help="GPUs of one engine: its tensor x pipeline parallel size.", least=1, most=1_000_000
    )
    num_gpus_per_node: int | None = flag(
        None, help="GPUs of a machine. Default: --actor-num-gpus-per-node, at most 8.", least=1, most=1_000_000
    )
    colocate: bool = flag(False, help="Engines share the trainer's GPUs and take turns.")
    offload: bool | None = flag(None, help="--offload-train and --offload-rollout in one, where these are not given.")
    offload_rollout: bool | None = flag(
        None, help="Engines give their memory back while training. Default: with --colocate."
    )
    offload_train: bool | None = flag(
        None,
        help=(
            "The trainer's weights, gradients and optimizer state lie in the host's memory while engines generate."
            " Default: with --colocate, on GPUs."
        ),
    )
    rollout_external: bool = flag(
        False, help="Use engines that already run, at --rollout-external-engine-addrs; no GPU is reserved for them."
    )
    rollout_external_engine_addrs: list[str] | None = flag(None, help="host:port or URL of each running engine.")
    rollout_external_api_key_env: str = flag(
        "SLIME_LIKE_ENGINE_API_KEY",
        help="Environment variable that holds the external engines' API key, if they have one.",
    )
    rollout_external_receiver_addrs: list[str] | None = flag(
        None,
        help=(
            "With --update-weight-mode delta: host:port or URL of the receiver beside each external engine, in the same"
            " order; one may serve several."
        ),
    )
    rollout_external_receiver_api_key_env: str = flag(
        "SLIME_LIKE_RECEIVER_API_KEY", help="Environment variable that holds those receivers' key."
    )
    debug_rollout_only: bool = flag(False, help="Generate and score only: no trainer, no weight sync.")
    debug_train_only: bool = flag(False, help="Train only, on --load-debug-rollout-data: no engines.")
    placement_timeout: float = flag(
        300.0, help="Deadline for getting the GPUs, in seconds.", above=0, most=LONGEST_WAIT_S
    )
    gpu_memory_gib: float | None = flag(
        None, help="Memory of one GPU, for the plan's verdict, in GiB.", least=0.01, most=1_000_000
    )
    plan_bandwidth: list[str] | None = flag(
        None,
        help="name=GB/s for the plan's bound on a weight sync; names: "
        + ", ".join(BANDWIDTHS)
        + ". Default: H100-class hosts.",
    )

    @property
    def actor_num_gpus(self) -> int:
        """GPUs of the trainer."""
        return self.actor_num_nodes * self.actor_num_gpus_per_node

    def bandwidths(self) -> dict[str, float]:
        """--plan-bandwidth as name -> GB/s. Raises ValueError."""
        bandwidths = {}
        for pair in self.plan_bandwidth or []:
            name, equals, number = pair.partition("=")
            if name not in BANDWIDTHS or not equals:
                raise ValueError(f"{pair!r} is no name=GB/s. Known names: {', '.join(BANDWIDTHS)}")
            try:
                bandwidths[name] = float(number)
            except ValueError:
                raise ValueError(f"{pair!r}: {number!r} is no number") from None
            if not 0 < bandwidths[name] < float("inf"):
                raise ValueError(f"{pair!r}: must be above 0")
        return bandwidths

    def external_urls(self) -> list[str]:
        """The external engines' URLs."""
        return [engine_url(address) for address in self.rollout_external_engine_addrs or []]

    def problems(self) -> list[str]:
        """What is impossible about the flags by themselves; planning/placement judges the sizes."""
        problems = []
        roles = [
            f"{role}_num_{what}" for role in ("actor", "critic", "ref", "reward") for what in ("nodes", "gpus_per_node")
        ]
        for name in (*roles, "rollout_num_gpus_per_engine", "num_gpus_per_node"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                problems.append(f"--{name.replace('_', '-')} {getattr(self, name)}: must be at least 1.")
        if self.gpu_memory_gib is not None and not self.gpu_memory_gib > 0:
            problems.append(f"--gpu-memory-gib {self.gpu_memory_gib}: must be above 0.")
        try:
            self.bandwidths()
        except ValueError as error:
            problems.append(f"--plan-bandwidth {error}.")
        if self.debug_rollout_only and self.debug_train_only:
            problems.append("--debug-rollout-only and --debug-train-only exclude each other.")
        if self.rollout_external_engine_addrs and not self.rollout_external:
            problems.append("--rollout-external-engine-addrs needs --rollout-external.")
        if self.rollout_external:
            if not self.rollout_external_engine_addrs:
                problems.append(
                    "--rollout-external needs --rollout-external-engine-addrs: host:port of each running engine."
                )
            if self.colocate:
                problems.append(
                    "--rollout-external and --colocate exclude each other: external engines hold GPUs of their own."
                    " Fix: drop one."
                )
            if self.debug_rollout_only:
                problems.append("--rollout-external and --debug-rollout-only exclude each other. Fix: drop one.")
        for name in ("rollout_external_engine_addrs", "rollout_external_receiver_addrs"):
            for address in getattr(self, name) or []:
                try:
                    engine_url(address)
                except ValueError as error:
                    problems.append(f"--{name.replace('_', '-')}: {error}.")
        if self.offload_rollout and not self.colocate and not self.rollout_external:
            problems.append(
                "--offload-rollout needs --colocate: engines on GPUs of their own have no one to give memory to."
            )
        for name in ("offload_train", "offload"):
            if getattr(self, name) and not self.colocate and not self.rollout_external:
                problems.append(
                    f"--{name.replace('_', '-')} needs --colocate: apart from the engines the trainer's GPUs are its"
                    " own."
                )
        return problems
