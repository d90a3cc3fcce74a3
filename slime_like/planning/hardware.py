"""What a card and the wires between cards can do, where the user says nothing."""

from __future__ import annotations

import dataclasses

from slime_like.config.placement import PlacementConfig

GIB = 2**30

#: CUDA context, NCCL channels and cuBLAS workspaces of one process: an order of magnitude, it cannot be computed. They
#: stay when everything else is given back: groups are kept, since to make them again takes as long as a short step.
PROCESS_BYTES = GIB


@dataclasses.dataclass(frozen=True)
class Card:
    """One GPU model. memory_bytes: what nvidia-smi gives as total, a little less than the name says."""

    name: str
    memory_bytes: int


#: nvidia-smi's memory.total of the SXM cards, in MiB.
CARDS = {"H100": Card("H100 80GB", 81559 * 2**20), "H200": Card("H200 141GB", 143771 * 2**20)}
DEFAULT_CARD = CARDS["H100"]

#: GB/s in one direction -> where the number is from. Peak rates of the wire: a bound, never a forecast.
DEFAULT_BANDWIDTHS: dict[str, tuple[float, str]] = {
    "ipc": (
        1675.0,
        (
            "copy within a card: half of H100 SXM's 3.35 TB/s HBM3, since each byte is read and written (NVIDIA H100"
            " data sheet)"
        ),
    ),
    "nvlink": (450.0, "NVLink 4, half of 900 GB/s in both directions (NVIDIA H100 data sheet)"),
    "network": (50.0, "one 400 Gb/s InfiniBand NDR port, the port of the card that sends (DGX H100: one per GPU)"),
    "pcie": (64.0, "PCIe 5.0 x16"),
    "disk": (4.0, "sequential writing of one data-centre NVMe drive; a parallel file system may be faster or slower"),
}


def card_bytes(placement: PlacementConfig) -> int:
    """Memory of one GPU: --gpu-memory-gib, else an H100's."""
    return int(placement.gpu_memory_gib * GIB) if placement.gpu_memory_gib else DEFAULT_CARD.memory_bytes


def bandwidths(placement: PlacementConfig) -> dict[str, float]:
    """Bytes a second by name: --plan-bandwidth over the defaults."""
    gb_per_s = {name: value for name, (value, _) in DEFAULT_BANDWIDTHS.items()} | placement.bandwidths()
    return {name: value * 1e9 for name, value in gb_per_s.items()}
