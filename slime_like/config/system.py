"""Where things run: placement, engines, weight sync, the run directory, debugging."""

from __future__ import annotations

import dataclasses
import os
from urllib.parse import urlsplit

from slime_like.config.base import flag
from slime_like.config.transports import RECEIVER, SHARED_FOLDER, Transport, choices, modes, transport_of
from slime_like.utils.logs import LOG_LEVELS

#: SGLang's /pause_generation.
PAUSE_MODES = ("abort", "retract", "in_place")

#: What --plan-bandwidth may set.
BANDWIDTHS = ("ipc", "nvlink", "network", "disk", "pcie")

#: Spellings that SGLang takes for an engine's parallel sizes.
_ENGINE_SIZES = {
    "pp": ("pp_size", "pipeline_parallel_size", "pp"),
    "dp": ("dp_size", "data_parallel_size", "dp"),
    "ep": ("ep_size", "expert_parallel_size", "ep"),
}


def engine_url(address: str) -> str:
    """`host:port` or a URL -> a URL without a trailing slash (IPv6 hosts in brackets). Raises ValueError."""
    url = address if "://" in address else f"http://{address}"
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{address!r} is no host:port or http(s) URL")
    if parts.port is None and "://" not in address:
        raise ValueError(f"{address!r} has no port")
    return url.rstrip("/")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlacementConfig:
    """Placement: which role sits on which GPUs (logical ones on a CPU host)"""

    actor_num_nodes: int = flag(1, help="Nodes of the trainer.")
    actor_num_gpus_per_node: int = flag(8, help="GPUs of the trainer on each node.")
    critic_num_nodes: int | None = flag(None, help="Nodes of the critic, with --advantage-estimator ppo. Default: the actor's.")
    critic_num_gpus_per_node: int | None = flag(None, help="GPUs of the critic on each node. Default: the actor's.")
    ref_num_nodes: int | None = flag(None, help="Nodes of the reference model. Default: the actor's.")
    ref_num_gpus_per_node: int | None = flag(None, help="GPUs of the reference model on each node. Default: the actor's.")
    reward_num_nodes: int | None = flag(None, help="Nodes of a reward model, with --reward-load. Default: the actor's.")
    reward_num_gpus_per_node: int | None = flag(None, help="GPUs of the reward model on each node. Default: the actor's.")
    colocate_policy_ref: bool = flag(True, help="Reference model swapped into the actor's processes; --no-colocate-policy-ref gives it GPUs of its own.")
    colocate_critic_reward: bool = flag(False, help="Critic and reward model share GPUs.")
    colocate_training: bool = flag(False, help="Policy, critic, reference and reward model all share the same GPUs.")
    rollout_num_gpus: int | None = flag(None, help="GPUs of all engines. With --colocate: the trainer's by default. With --rollout-external: derived.")
    rollout_num_gpus_per_engine: int = flag(1, help="GPUs of one engine: its tensor x pipeline parallel size.")
    num_gpus_per_node: int | None = flag(None, help="GPUs of a machine. Default: --actor-num-gpus-per-node, at most 8.")
    colocate: bool = flag(False, help="Engines share the trainer's GPUs and take turns.")
    offload_rollout: bool | None = flag(None, help="Engines give their memory back while training. Default: with --colocate.")
    rollout_external: bool = flag(False, help="Use engines that already run, at --rollout-external-engine-addrs; no GPU is reserved for them.")
    rollout_external_engine_addrs: list[str] | None = flag(None, help="host:port or URL of each running engine.")
    rollout_external_api_key_env: str = flag(
        "SLIME_LIKE_ENGINE_API_KEY", help="Environment variable that holds the external engines' API key, if they have one."
    )
    rollout_external_receiver_addrs: list[str] | None = flag(
        None, help="With --update-weight-mode delta: host:port or URL of the receiver beside each external engine, in the same order; one may serve several."
    )
    rollout_external_receiver_api_key_env: str = flag("SLIME_LIKE_RECEIVER_API_KEY", help="Environment variable that holds those receivers' key.")
    debug_rollout_only: bool = flag(False, help="Generate and score only: no trainer, no weight sync.")
    debug_train_only: bool = flag(False, help="Train only, on --load-debug-rollout-data: no engines.")
    placement_timeout: float = flag(300.0, help="Deadline for getting the GPUs, in seconds.")
    gpu_memory_gib: float | None = flag(None, help="Memory of one GPU, for the plan's verdict, in GiB.")
    plan_bandwidth: list[str] | None = flag(
        None, help="name=GB/s for the plan's bound on a weight sync; names: " + ", ".join(BANDWIDTHS) + ". Default: H100-class hosts."
    )

    @property
    def actor_num_gpus(self) -> int:
        """GPUs of the trainer."""
        return self.actor_num_nodes * self.actor_num_gpus_per_node

    def bandwidths(self) -> dict[str, float]:
        """--plan-bandwidth as name -> GB/s. Raises ValueError."""
        found = {}
        for pair in self.plan_bandwidth or []:
            name, equals, number = pair.partition("=")
            if name not in BANDWIDTHS or not equals:
                raise ValueError(f"{pair!r} is no name=GB/s. Known names: {', '.join(BANDWIDTHS)}")
            try:
                found[name] = float(number)
            except ValueError:
                raise ValueError(f"{pair!r}: {number!r} is no number") from None
            if not 0 < found[name] < float("inf"):
                raise ValueError(f"{pair!r}: must be above 0")
        return found

    def external_urls(self) -> list[str]:
        """The external engines' URLs."""
        return [engine_url(address) for address in self.rollout_external_engine_addrs or []]

    def problems(self) -> list[str]:
        """What is impossible about the flags by themselves; planning/placement judges the sizes."""
        found = []
        roles = [f"{role}_num_{what}" for role in ("actor", "critic", "ref", "reward") for what in ("nodes", "gpus_per_node")]
        for name in (*roles, "rollout_num_gpus_per_engine", "num_gpus_per_node"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                found.append(f"--{name.replace('_', '-')} {getattr(self, name)}: must be at least 1.")
        if self.gpu_memory_gib is not None and not self.gpu_memory_gib > 0:
            found.append(f"--gpu-memory-gib {self.gpu_memory_gib}: must be above 0.")
        try:
            self.bandwidths()
        except ValueError as error:
            found.append(f"--plan-bandwidth {error}.")
        if self.debug_rollout_only and self.debug_train_only:
            found.append("--debug-rollout-only and --debug-train-only exclude each other.")
        if self.rollout_external_engine_addrs and not self.rollout_external:
            found.append("--rollout-external-engine-addrs needs --rollout-external.")
        if self.rollout_external:
            if not self.rollout_external_engine_addrs:
                found.append("--rollout-external needs --rollout-external-engine-addrs: host:port of each running engine.")
            if self.colocate:
                found.append("--rollout-external and --colocate exclude each other: external engines hold GPUs of their own. Fix: drop one.")
            if self.debug_rollout_only:
                found.append("--rollout-external and --debug-rollout-only exclude each other. Fix: drop one.")
        for name in ("rollout_external_engine_addrs", "rollout_external_receiver_addrs"):
            for address in getattr(self, name) or []:
                try:
                    engine_url(address)
                except ValueError as error:
                    found.append(f"--{name.replace('_', '-')}: {error}.")
        if self.offload_rollout and not self.colocate and not self.rollout_external:
            found.append("--offload-rollout needs --colocate: engines on GPUs of their own have no one to give memory to.")
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Rollout engines and router (every SGLang server flag is taken as --sglang-<flag>)"""

    sglang_router_ip: str | None = flag(None, help="Use a router that already runs, at this address.")
    sglang_router_port: int | None = flag(None, help="Port of the router; of ours too. Default: a free one.")
    sglang_router_api_key_env: str = flag(
        "SLIME_LIKE_ROUTER_API_KEY", help="Environment variable that holds the key of a router at --sglang-router-ip, if it has one."
    )
    sglang_router_policy: str = flag("cache_aware", choices=("cache_aware", "round_robin", "random", "power_of_two"), help="How our router picks an engine.")
    sglang_server_concurrency: int = flag(512, help="Most requests in flight per engine.")
    engine_start_timeout_s: float = flag(600.0, help="Deadline for an engine or the router to become healthy, in seconds.")
    sglang: dict = dataclasses.field(default_factory=dict)  # --sglang-<name>: name -> value, list, or True for a switch

    @property
    def pp_size(self) -> int:
        """Pipeline stages of one engine (--sglang-pp-size). Raises ValueError, as the two below."""
        return self._size("pp")

    @property
    def dp_size(self) -> int:
        """Data parallel copies of the attention inside one engine's tensor parallel GPUs (--sglang-dp-size)."""
        return self._size("dp")

    @property
    def ep_size(self) -> int:
        """GPUs of one engine that share the experts (--sglang-ep-size)."""
        return self._size("ep")

    @property
    def dp_attention(self) -> bool:
        """Whether the data parallel copies lie within the tensor parallel GPUs (--sglang-enable-dp-attention)."""
        return str(self.sglang.get("enable_dp_attention", False)).lower() == "true"

    def tp_size(self, num_gpus: int) -> int:
        """SGLang's tensor parallel size of an engine of `num_gpus` GPUs; its data and expert parallel GPUs lie within it."""
        return max(1, num_gpus // self.pp_size)

    def _size(self, kind: str) -> int:
        for name in _ENGINE_SIZES[kind]:
            if name in self.sglang:
                try:
                    size = int(self.sglang[name])
                except (TypeError, ValueError):
                    size = 0
                if size < 1 or self.sglang[name] is True:
                    raise ValueError(f"--sglang-{name.replace('_', '-')} {self.sglang[name]}: must be a whole number of at least 1")
                return size
        return 1

    def problems(self) -> list[str]:
        """What is impossible about the engine flags."""
        found = []
        for kind in _ENGINE_SIZES:
            try:
                self._size(kind)
            except ValueError as error:
                found.append(f"{error}.")
        if self.sglang_router_ip and not self.sglang_router_port:
            found.append("--sglang-router-ip needs --sglang-router-port.")
        if self.sglang_server_concurrency < 1:
            found.append(f"--sglang-server-concurrency {self.sglang_server_concurrency}: must be at least 1.")
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyncConfig:
    """Weight sync"""

    update_weight_transport: str | None = flag(None, choices=choices(), help="How weights travel. Default: ipc with --colocate, else broadcast.")
    update_weight_mode: str = flag(
        "full", choices=("full", *modes()), help="Send all weights at each sync, or only what changed, to a receiver beside each engine: for slow links."
    )
    update_weight_delta_encoding: str | None = flag(
        None, choices=("xor", "overwrite"), help="With delta: send changed values as their difference in bits, or as they are. Default: xor, which is smaller."
    )
    update_weight_delta_checksum: str | None = flag(None, choices=("xxh3-128",), help="With delta: digest of each tensor before and after the change.")
    update_weight_local_checkpoint_dir: str | None = flag(
        None, help="With delta: folder on each engine's machine where our receiver keeps the weights. Default: in the run directory."
    )
    update_weight_buffer_size: int = flag(512 * 1024 * 1024, help="Bytes of one bucket of tensors.")
    update_weight_disk_dir: str | None = flag(None, help="Folder that trainer and engines both see, for the disk transport. Default: in the run directory.")
    update_weight_disk_keep_files: bool = flag(False, help="With the disk transport: keep older versions instead of removing them.")
    update_weight_interface: str | None = flag(
        None,
        help="Network interface of the trainer's machines for the broadcast transport (on GPUs for all of the trainer's NCCL). "
        "Default: the one that reaches the engines.",
    )
    update_weight_pause_mode: str = flag(
        "abort",
        choices=PAUSE_MODES,
        help="Requests that still run when a sync begins: abort ends them, retract computes their tokens again with the new weights, in_place goes on "
        "with what the old weights left in the cache.",
    )
    custom_weight_transform_path: str | None = flag(
        None,
        help="Your function (args, name, tensor) -> (name, tensor) pairs: what is sent instead of each tensor, as quantised weights with their scales. "
        "Built in: slime_like.weight_sync.transform.to_bf16.",
    )
    update_weight_timeout_s: float = flag(
        600.0, help="How long a weight sync waits for an engine in each step, in seconds; for a trainer rank all steps together."
    )
    verify_weight_sync: str = flag(
        "digest",
        choices=("off", "digest", "probe", "full"),
        help="Proof after each sync: digest compares each engine's weights with those sent, and at intervals probes; probe compares log-probs of fixed prompts "
        "only, at each sync; full does both at each, and looks for weights that were never sent.",
    )
    verify_weight_sync_interval: int = flag(10, help="With --verify-weight-sync digest: probe at the first sync and every this many; 0: never.")
    verify_weight_sync_tolerance: float | None = flag(
        None, help="Largest mean |log-prob difference| between engine and trainer over a probe. Default: 1e-3 in fp32, 0.1 in bf16 or with a transform."
    )

    def problems(self) -> list[str]:
        """What is impossible about weight sync."""
        found = []
        if self.update_weight_buffer_size < 1:
            found.append(f"--update-weight-buffer-size {self.update_weight_buffer_size}: must be at least 1 byte.")
        given = self.transport_row
        writes_folder = given is not None and given.loads_from == SHARED_FOLDER
        if self.update_weight_disk_dir and not writes_folder and not self.sends_deltas:
            found.append("--update-weight-disk-dir needs --update-weight-transport disk.")
        for name in ("update_weight_delta_encoding", "update_weight_delta_checksum", "update_weight_local_checkpoint_dir"):
            if getattr(self, name) is not None and not self.sends_deltas:
                found.append(f"--{name.replace('_', '-')} does nothing without --update-weight-mode delta. Fix: add it, or drop this.")
        if self.sends_deltas and self.update_weight_transport is not None:
            found.append(
                f"--update-weight-transport {self.update_weight_transport} does not go with --update-weight-mode delta, which is sent over HTTP to a receiver "
                "beside each engine. Fix: leave it out."
            )
        if self.update_weight_disk_keep_files and not writes_folder:
            found.append("--update-weight-disk-keep-files needs --update-weight-transport disk.")
        if self.update_weight_interface and given is not None and not given.takes_interface:
            found.append(f"--update-weight-interface does nothing with --update-weight-transport {self.update_weight_transport}. Fix: drop it.")
        if self.verify_weight_sync_interval < 0:
            found.append(f"--verify-weight-sync-interval {self.verify_weight_sync_interval}: must not be negative.")
        if self.verify_weight_sync_tolerance is not None and self.verify_weight_sync_tolerance <= 0:
            found.append(f"--verify-weight-sync-tolerance {self.verify_weight_sync_tolerance}: must be above 0.")
        return found

    @property
    def transport_row(self) -> Transport | None:
        """What --update-weight-transport names; None: it is left to the placement."""
        return None if self.update_weight_transport is None else transport_of(self.update_weight_transport)

    @property
    def mode_row(self) -> Transport | None:
        """The transport that --update-weight-mode stands for; None with full, which any transport sends."""
        return None if self.update_weight_mode == "full" else transport_of(self.update_weight_mode)

    @property
    def sends_deltas(self) -> bool:
        """Whether only what changed is sent, to a receiver beside each engine."""
        return self.mode_row is not None and self.mode_row.loads_from == RECEIVER

    @property
    def delta_encoding(self) -> str:
        """xor or overwrite."""
        return self.update_weight_delta_encoding or "xor"

    @property
    def compares_digests(self) -> bool:
        """Whether engines are asked for digests of what they hold."""
        return self.verify_weight_sync in ("digest", "full")

    def probes_at(self, num_syncs: int) -> bool:
        """Whether the sync after `num_syncs` others of this run is followed by a probe."""
        if self.verify_weight_sync == "digest":
            return self.verify_weight_sync_interval > 0 and num_syncs % self.verify_weight_sync_interval == 0
        return self.verify_weight_sync != "off"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ObservabilityConfig:
    """Run directory, metrics and debugging"""

    seed: int = flag(1234, help="Seed of everything random in the trainer.")
    run_name: str = flag("train", help="Last part of the default run directory.")
    run_dir: str | None = flag(None, help="Where metrics, logs and samples go. Default: runs/<time>-<name>.")
    log_level: str | None = flag(
        None,
        choices=LOG_LEVELS,
        help="Least level of what our own loggers write, in the driver and in every process of the run; receivers, the router and engines "
        "(unless --sglang-log-level) are started with it too. Default: warning; of receivers and engines info.",
    )
    use_tensorboard: bool = flag(True, help="Write TensorBoard event files into the run directory.")
    save_debug_rollout_data: str | None = flag(None, help="Write each rollout's samples to this path; '{rollout_id}' is replaced.")
    load_debug_rollout_data: str | None = flag(None, help="Train on samples saved with --save-debug-rollout-data instead of generating.")

    def problems(self) -> list[str]:
        """What is impossible about debugging."""
        found = []
        for name in ("save_debug_rollout_data", "load_debug_rollout_data"):
            value = getattr(self, name)
            if value and "{rollout_id}" not in value:
                found.append(f"--{name.replace('_', '-')} {value}: the path must contain '{{rollout_id}}'.")
        return found

    def missing_files(self) -> list[str]:
        """Paths that do not exist."""
        path = self.load_debug_rollout_data
        if path and not os.path.isdir(os.path.dirname(path) or "."):
            return [f"--load-debug-rollout-data {path}: no such folder."]
        return []
