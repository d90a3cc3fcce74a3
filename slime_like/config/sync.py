"""How weights get to the engines."""

from __future__ import annotations

import dataclasses

from slime_like.config.base import flag
from slime_like.config.bounds import LONGEST_WAIT_S
from slime_like.config.quantisation import NONE, SCHEMES
from slime_like.config.transports import (
    RECEIVER,
    SHARED_FOLDER,
    Transport,
    choices,
    modes,
    transport_of,
)

#: SGLang's /pause_generation.
PAUSE_MODES = ("abort", "retract", "in_place")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyncConfig:
    """Weight sync"""

    update_weight_transport: str | None = flag(
        None,
        choices=choices(),
        help=(
            "How weights travel. Default: ipc with --colocate, else broadcast. With --update-weight-mode adapter: disk,"
            " or http, which needs no folder."
        ),
    )
    update_weight_mode: str = flag(
        "full",
        choices=("full", *modes()),
        help=(
            "Send all weights at each sync; only what changed, to a receiver beside each engine (delta, for slow"
            " links); or with --lora-rank only the adapters, to engines that serve the base."
        ),
    )
    update_weight_delta_encoding: str | None = flag(
        None,
        choices=("xor", "overwrite"),
        help=(
            "With delta: send changed values as their difference in bits, or as they are. Default: xor, which is"
            " smaller."
        ),
    )
    update_weight_delta_checksum: str | None = flag(
        None, choices=("xxh3-128",), help="With delta: digest of each tensor before and after the change."
    )
    update_weight_local_checkpoint_dir: str | None = flag(
        None,
        help=(
            "With delta: folder on each engine's machine where our receiver keeps the weights. Default: in the run"
            " directory."
        ),
    )
    update_weight_buffer_size: int = flag(
        512 * 1024 * 1024, help="Bytes of one bucket of tensors.", least=1, most=2**46
    )
    update_weight_disk_dir: str | None = flag(
        None, help="Folder that trainer and engines both see, for the disk transport. Default: in the run directory."
    )
    update_weight_disk_keep_files: bool = flag(
        False, help="With the disk transport: keep older versions instead of removing them."
    )
    update_weight_interface: str | None = flag(
        None,
        help=(
            "Network interface of the trainer's machines for the broadcast transport (on GPUs for all of the trainer's"
            " NCCL). Default: the one that reaches the engines."
        ),
    )
    update_weight_pause_mode: str | None = flag(
        None,
        choices=PAUSE_MODES,
        help=(
            "Requests that still run when a sync begins: abort ends them, retract computes their tokens again with the"
            " new weights, in_place goes on with what the old weights left in the cache. Default: abort; with"
            " --async-mode full retract, and there abort keeps what was answered and goes on from it."
        ),
    )
    update_weight_rolling: bool = flag(
        False,
        help=(
            "With --async-mode full, and weights by disk or delta: engines load one after another while the others"
            " serve. For engines that share one slow link to the folder; the trainer waits for all of them."
        ),
    )
    custom_weight_transform_path: str | None = flag(
        None,
        help=(
            "Your function (args, name, tensor) -> (name, tensor) pairs: what is sent instead of each tensor, as"
            " quantised weights with their scales. Built in: slime_like.weight_sync.transform.to_bf16."
        ),
    )
    rollout_quantization: str = flag(
        NONE,
        choices=(NONE, *SCHEMES),
        help=(
            "Engines keep their linear layers in eight bits: int8 (a scale for each row), fp8 (for each block of 128 x"
            " 128) or fp8-per-tensor (for each matrix). The trainer quantises what it sends, at each sync."
        ),
    )
    update_weight_timeout_s: float = flag(
        600.0,
        help=(
            "How long a weight sync waits for an engine in each step, in seconds; for a trainer rank all steps"
            " together."
        ),
        above=0,
        most=LONGEST_WAIT_S,
    )
    verify_weight_sync: str = flag(
        "digest",
        choices=("off", "digest", "probe", "full"),
        help=(
            "Proof after each sync: digest compares each engine's weights with those sent, and at intervals probes;"
            " probe compares log-probs of fixed prompts only, at each sync; full does both at each, and looks for"
            " weights that were never sent."
        ),
    )
    verify_weight_sync_interval: int = flag(
        10,
        help="With --verify-weight-sync digest: probe at the first sync and every this many; 0: never.",
        least=0,
    )
    verify_weight_sync_tolerance: float | None = flag(
        None,
        help=(
            "Largest mean |log-prob difference| between engine and trainer over a probe. Default: 1e-3 in fp32, 0.3 in"
            " bf16 or with a transform, 1.0 in eight bits."
        ),
        above=0,
    )

    def problems(self) -> list[str]:
        """What is impossible about weight sync."""
        problems = []
        if self.update_weight_buffer_size < 1:
            problems.append(f"--update-weight-buffer-size {self.update_weight_buffer_size}: must be at least 1 byte.")
        transport = self.transport_row
        writes_folder = transport is not None and transport.loads_from == SHARED_FOLDER
        by_http = self.update_weight_transport == "http"
        keeps_folder = writes_folder or self.sends_deltas or (self.sends_adapters and not by_http)
        if self.update_weight_disk_dir and not keeps_folder:
            problems.append("--update-weight-disk-dir needs --update-weight-transport disk.")
        for name in (
            "update_weight_delta_encoding",
            "update_weight_delta_checksum",
            "update_weight_local_checkpoint_dir",
        ):
            if getattr(self, name) is not None and not self.sends_deltas:
                problems.append(
                    f"--{name.replace('_', '-')} does nothing without --update-weight-mode delta. Fix: add it, or drop"
                    " this."
                )
        if self.sends_deltas and self.update_weight_transport is not None:
            problems.append(
                f"--update-weight-transport {self.update_weight_transport} does not go with --update-weight-mode delta,"
                " which is sent over HTTP to a receiver beside each engine. Fix: leave it out."
            )
        if self.sends_adapters and self.update_weight_transport not in (None, "disk", "http"):
            problems.append(
                f"--update-weight-transport {self.update_weight_transport} does not go with --update-weight-mode"
                " adapter. Fix: disk or http."
            )
        if not self.sends_adapters and self.update_weight_transport == "http":
            problems.append(
                "--update-weight-transport http is for adapters alone: --lora-rank with --update-weight-mode adapter."
                " Fix: add them, or another one."
            )
        if self.update_weight_disk_keep_files and not writes_folder:
            problems.append("--update-weight-disk-keep-files needs --update-weight-transport disk.")
        if self.update_weight_interface and transport is not None and not transport.takes_interface:
            problems.append(
                f"--update-weight-interface does nothing with --update-weight-transport {self.update_weight_transport}."
                " Fix: drop it."
            )
        if self.verify_weight_sync_interval < 0:
            problems.append(f"--verify-weight-sync-interval {self.verify_weight_sync_interval}: must not be negative.")
        if self.verify_weight_sync_tolerance is not None and self.verify_weight_sync_tolerance <= 0:
            problems.append(f"--verify-weight-sync-tolerance {self.verify_weight_sync_tolerance}: must be above 0.")
        return problems

    @property
    def transport_row(self) -> Transport | None:
        """What --update-weight-transport names; None: it is left to the placement."""
        return None if self.update_weight_transport is None else transport_of(self.update_weight_transport)

    @property
    def mode_row(self) -> Transport | None:
        """The transport that --update-weight-mode stands for; None with full, which any transport sends."""
        if self.update_weight_mode == "full":
            return None
        row = self.transport_row if self.update_weight_transport == "http" else None
        return row or transport_of(self.update_weight_mode)

    @property
    def sends_deltas(self) -> bool:
        """Whether only what changed is sent, to a receiver beside each engine."""
        return self.mode_row is not None and self.mode_row.loads_from == RECEIVER

    @property
    def sends_adapters(self) -> bool:
        """Whether engines serve the base and are sent adapters, which requests then name."""
        return self.mode_row is not None and self.mode_row.of_adapters

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
        if self.mode_row is not None and not (self.mode_row.digests or self.mode_row.compared_by_engines):
            return self.verify_weight_sync != "off"  # nothing else proves adapters in a folder
        if self.verify_weight_sync == "digest":
            return self.verify_weight_sync_interval > 0 and num_syncs % self.verify_weight_sync_interval == 0
        return self.verify_weight_sync != "off"
