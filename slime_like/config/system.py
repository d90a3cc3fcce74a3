"""Where things run: placement, engines, weight sync, the run directory, debugging."""

from __future__ import annotations

import dataclasses
import os
from urllib.parse import urlsplit

from slime_like.config.base import flag

TRANSPORTS = ("ipc", "broadcast", "disk")


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
    rollout_num_gpus: int | None = flag(None, help="GPUs of all engines. With --colocate: the trainer's by default. With --rollout-external: derived.")
    rollout_num_gpus_per_engine: int = flag(1, help="GPUs of one engine: its tensor parallel size.")
    num_gpus_per_node: int | None = flag(None, help="GPUs of a machine. Default: --actor-num-gpus-per-node, at most 8.")
    colocate: bool = flag(False, help="Engines share the trainer's GPUs and take turns.")
    offload_rollout: bool | None = flag(None, help="Engines give their memory back while training. Default: with --colocate.")
    rollout_external: bool = flag(False, help="Use engines that already run, at --rollout-external-engine-addrs; no GPU is reserved for them.")
    rollout_external_engine_addrs: list[str] | None = flag(None, help="host:port or URL of each running engine.")
    rollout_external_api_key_env: str = flag(
        "SLIME_LIKE_ENGINE_API_KEY", help="Environment variable that holds the external engines' API key, if they have one."
    )
    debug_rollout_only: bool = flag(False, help="Generate and score only: no trainer, no weight sync.")
    debug_train_only: bool = flag(False, help="Train only, on --load-debug-rollout-data: no engines.")
    placement_timeout: float = flag(300.0, help="Deadline for getting the GPUs, in seconds.")

    @property
    def actor_num_gpus(self) -> int:
        """GPUs of the trainer."""
        return self.actor_num_nodes * self.actor_num_gpus_per_node

    def external_urls(self) -> list[str]:
        """The external engines' URLs."""
        return [engine_url(address) for address in self.rollout_external_engine_addrs or []]

    def problems(self) -> list[str]:
        """What is impossible about the flags by themselves; planning/placement judges the sizes."""
        found = []
        for name in ("actor_num_nodes", "actor_num_gpus_per_node", "rollout_num_gpus_per_engine"):
            if getattr(self, name) < 1:
                found.append(f"--{name.replace('_', '-')} {getattr(self, name)}: must be at least 1.")
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
        for address in self.rollout_external_engine_addrs or []:
            try:
                engine_url(address)
            except ValueError as error:
                found.append(f"--rollout-external-engine-addrs: {error}.")
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

    def problems(self) -> list[str]:
        """What is impossible about the engine flags."""
        found = []
        if self.sglang_router_ip and not self.sglang_router_port:
            found.append("--sglang-router-ip needs --sglang-router-port.")
        if self.sglang_server_concurrency < 1:
            found.append(f"--sglang-server-concurrency {self.sglang_server_concurrency}: must be at least 1.")
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyncConfig:
    """Weight sync"""

    update_weight_transport: str | None = flag(None, choices=TRANSPORTS, help="How weights travel. Default: ipc with --colocate, else broadcast.")
    update_weight_buffer_size: int = flag(512 * 1024 * 1024, help="Bytes of one bucket of tensors.")
    update_weight_disk_dir: str | None = flag(None, help="Folder that trainer and engines both see, for the disk transport. Default: in the run directory.")
    update_weight_timeout_s: float = flag(600.0, help="Deadline of one weight sync, in seconds.")

    def problems(self) -> list[str]:
        """What is impossible about weight sync."""
        found = []
        if self.update_weight_buffer_size < 1:
            found.append(f"--update-weight-buffer-size {self.update_weight_buffer_size}: must be at least 1 byte.")
        if self.update_weight_disk_dir and self.update_weight_transport != "disk":
            found.append("--update-weight-disk-dir needs --update-weight-transport disk.")
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class ObservabilityConfig:
    """Run directory, metrics and debugging"""

    seed: int = flag(1234, help="Seed of everything random in the trainer.")
    run_name: str = flag("train", help="Last part of the default run directory.")
    run_dir: str | None = flag(None, help="Where metrics, logs and samples go. Default: runs/<time>-<name>.")
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
