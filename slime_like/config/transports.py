"""How weights can travel: one row for each transport, read by config, plan, trainer and engines' side alike. No torch.

A new transport is a row here and its publisher (weight_sync/buckets.py says what that is); nothing else names one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from slime_like.errors import ConfigError

#: Share of the weights that a sync finds changed, for the bound of deltas: an assumption, not a measurement.
DELTA_SHARE = 0.05
#: A changed value is sent with its 4-byte position.
_POSITION_BYTES = 4

#: Transport.loads_from: a folder that trainer and engines both see, or the one of the receiver beside each engine.
SHARED_FOLDER, RECEIVER = "shared folder", "receiver"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyncShape:
    """What bounds a sync. rates: bytes a second by name (planning/hardware.py). engine_gpus: of one engine, which
    split what they load.

    same_node: trainer and engines are all on one machine. width: bytes of a weight. num_sources: pipeline stages of
    the trainer, each of which sends its share from a card of its own. model_gpus: trainer GPUs that share the model, or
    0 unless every engine GPU is also a trainer's, which then gathers the whole model for it.
    """

    num_bytes: int
    rates: Mapping[str, float]
    same_node: bool
    engine_gpus: int
    width: int = 2
    num_sources: int = 1
    model_gpus: int = 0
    adapter_bytes: int = 0  # of --lora-rank


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyncBound:
    """One way of syncing, and the least time that it can take.

    available: whether this version can do it on these GPUs.
    """

    transport: str
    bytes: int
    bound_s: float
    how: str
    available: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transport:
    """One way from the trainer to the engines: what it needs, whom it reaches, and the least time that it takes."""

    name: str
    publisher: str  # module:class below slime_like.weight_sync; imported where weights are sent
    #: Least time of a sync, for the plan; of several ways the last one that is available is taken.
    bounds: Callable[[SyncShape], tuple[SyncBound, ...]]
    is_mode: bool = False  # asked for by --update-weight-mode <name> instead of --update-weight-transport <name>
    of_adapters: bool = False  # sends the adapters alone, which engines load beside the base under a name of their own
    needs_pause: bool = True  # whether generation stops while weights change
    #: what the engine is told to load when all was sent; None: it takes tensors in as they are sent
    loads_from: str | None = None
    #: all ranks that gather a stage's weights send a share of them, not only the first
    every_gatherer_writes: bool = False
    #: several sources must know of each other (weight_sync/transports/sources.py)
    sources_meet: bool = False
    #: where trainer and engines share every card, each trainer rank serves the engine ranks on its own one
    by_card: bool = False
    #: keeps what it sent last, and no connection: goes on with other engines as it is (redirect() of its publisher)
    redirects: bool = False
    files_outlive_a_kill: bool = False  # of shared memory, say: given back before the process is killed
    takes_interface: bool = False  # --update-weight-interface
    colocated: bool | None = None  # True: only with --colocate; False: never with it
    why_not_colocated: str = ""
    one_machine: bool = False  # all engines are on the machine of the trainer's first rank
    reaches_stages: bool = True  # engines of several pipeline stages
    reaches_spread: bool = True  # engines on several machines
    digests: bool = True  # whether engines can be asked for digests of what they got
    #: engines compare what they load with digests that are sent beside it, and fail where one differs
    compared_by_engines: bool = False
    best_rate: str | None = None  # what weight_sync/bounds.py measures for a receipt's share: memory, loopback or file

    def goes_with(self, *, colocate: bool) -> bool:
        """Whether it can be used with, or without, --colocate."""
        return self.colocated in (None, colocate)


def _ipc_bounds(shape: SyncShape) -> tuple[SyncBound, ...]:
    size, sources, gpus = shape.num_bytes, shape.num_sources, shape.engine_gpus
    # Engines load one bucket while the next is copied to the host, and pcie goes both ways at once.
    host = max(size / sources, size / gpus) / shape.rates["pcie"]
    how = (
        f"over pcie to the host, each source its {1 / sources:.0%}, and back at the same time, each engine GPU its"
        f" {1 / gpus:.0%}"
    )
    far = "" if shape.same_node else "; engines on other machines than their source cannot be reached this way"
    every_card = shape.same_node and shape.model_gpus > 0
    # Of what a card has not got it hears from the others; it packs everything, and its engine takes its share.
    gathered = size * (1 - 1 / max(1, shape.model_gpus)) / shape.rates["nvlink"]
    copied = (size + size / gpus) / shape.rates["ipc"]
    within = (
        "CUDA IPC: each trainer rank gathers the model over nvlink and packs it within its card, from which the engine"
        " rank there copies its share (where every engine GPU is also a trainer's)"
    )
    return (
        SyncBound(transport="ipc", bytes=size, bound_s=host, how=how + far, available=shape.same_node),
        SyncBound(
            transport="ipc-handles",
            bytes=size,
            bound_s=max(gathered, copied),
            how=within,
            available=every_card,
        ),
    )


def _broadcast_bounds(shape: SyncShape) -> tuple[SyncBound, ...]:
    wire = "nvlink" if shape.same_node else "network"
    bound_s = shape.num_bytes / shape.rates[wire]
    return (
        SyncBound(
            transport="broadcast", bytes=shape.num_bytes, bound_s=bound_s, how=f"one source at a time over {wire}"
        ),
    )


def _disk_bounds(shape: SyncShape) -> tuple[SyncBound, ...]:
    bound_s = shape.num_bytes / shape.rates["disk"] * (1 if shape.same_node else 2)
    near, far = (
        "written once; read from the page cache of the same machine",
        "written once, then read once by all engines together",
    )
    return (SyncBound(transport="disk", bytes=shape.num_bytes, bound_s=bound_s, how=near if shape.same_node else far),)


def _delta_bounds(shape: SyncShape) -> tuple[SyncBound, ...]:
    size = int(shape.num_bytes / shape.width * DELTA_SHARE * (shape.width + _POSITION_BYTES))
    how = f"if {DELTA_SHARE:.0%} of the weights changed, value and position of each over network"
    return (SyncBound(transport="delta", bytes=size, bound_s=size / shape.rates["network"], how=how),)


def _adapter_bounds(shape: SyncShape) -> tuple[SyncBound, ...]:
    size = shape.adapter_bytes
    bound_s = size / shape.rates["disk"] * (1 if shape.same_node else 2)
    how = "adapters alone: written once, then read by all engines"
    return (SyncBound(transport="adapter", bytes=size, bound_s=bound_s, how=how, available=size > 0),)


def _http_bounds(shape: SyncShape) -> tuple[SyncBound, ...]:
    # in base64, whole for each GPU of an engine
    size = shape.adapter_bytes * 4 // 3 * shape.engine_gpus
    how = "adapters alone: in the body of a request, once for each GPU of an engine, over network"
    bound_s = size / shape.rates["network"]
    return (SyncBound(transport="http", bytes=size, bound_s=bound_s, how=how, available=size > 0),)


#: Name -> row. Of those that fit, the first one is the default.
TRANSPORTS: dict[str, Transport] = {
    row.name: row
    for row in (
        Transport(
            name="ipc",
            publisher="transports.ipc:IpcPublisher",
            bounds=_ipc_bounds,
            sources_meet=True,
            by_card=True,
            files_outlive_a_kill=True,
            colocated=True,
            one_machine=True,
            reaches_stages=False,
            best_rate="memory",
        ),
        Transport(
            name="broadcast",
            publisher="transports.broadcast:BroadcastPublisher",
            bounds=_broadcast_bounds,
            sources_meet=True,
            takes_interface=True,
            colocated=False,
            why_not_colocated="NCCL refuses two ranks on one GPU",
            reaches_stages=False,
            best_rate="loopback",
        ),
        Transport(
            name="disk",
            publisher="transports.disk:DiskPublisher",
            bounds=_disk_bounds,
            loads_from=SHARED_FOLDER,
            every_gatherer_writes=True,
            best_rate="file",
        ),
        Transport(
            name="delta",
            publisher="delta.publisher:DeltaPublisher",
            bounds=_delta_bounds,
            is_mode=True,
            loads_from=RECEIVER,
            redirects=True,
            colocated=False,
            why_not_colocated="it is for slow links",
            reaches_spread=False,
        ),
        Transport(
            name="adapter",
            publisher="transports.adapter:AdapterPublisher",
            bounds=_adapter_bounds,
            is_mode=True,
            of_adapters=True,
            needs_pause=False,
            loads_from=SHARED_FOLDER,
            every_gatherer_writes=True,
            digests=False,
            best_rate="file",
        ),
        Transport(
            name="http",
            publisher="transports.adapter_http:HttpPublisher",
            bounds=_http_bounds,
            of_adapters=True,
            needs_pause=False,
            sources_meet=True,
            digests=False,
            compared_by_engines=True,
            best_rate="loopback",
        ),
    )
}


def transport_of(name: str) -> Transport:
    """The row of a transport. Raises ConfigError listing the known ones."""
    if name not in TRANSPORTS:
        raise ConfigError([f"--update-weight-transport {name} is unknown. Known: {', '.join(TRANSPORTS)}."])
    return TRANSPORTS[name]


def choices() -> tuple[str, ...]:
    """What --update-weight-transport takes."""
    return tuple(name for name, row in TRANSPORTS.items() if not row.is_mode)


def modes() -> tuple[str, ...]:
    """What --update-weight-mode takes beside full."""
    return tuple(name for name, row in TRANSPORTS.items() if row.is_mode)


def fitting(*, colocate: bool, several_machines: bool = False) -> tuple[str, ...]:
    """Values of --update-weight-transport for engines on the trainer's GPUs or apart from them; the first one is the
    default.

    several_machines: the engines are not all on the machine of the trainer's first rank.
    """
    rows = (TRANSPORTS[name] for name in choices())
    return tuple(
        row.name
        for row in rows
        if not row.of_adapters and row.goes_with(colocate=colocate) and not (several_machines and row.one_machine)
    )
