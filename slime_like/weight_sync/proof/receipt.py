"""Proof that an engine holds exactly the weights that were sent: its own digests of them, in its own layout, against
ours.

How one source uses it:
    receipt = Receipt(model, [client, ...])
    publisher.send(receipt.watching(tensors), version, receipt)
    receipt.verify(timeout_s)        # once the engines have loaded everything, inside the update session

A transport that streams (in_engine/intake.py) lets the engines digest each bucket when they have loaded it: if these
agree, verify() asks nothing.

What a source was to send but did not is not seen here: the names of all sources are compared with the model's by
whoever gathers them.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
import json
import logging
import pickle
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch

from slime_like.config.model import ModelConfig
from slime_like.config.quantisation import QuantScheme, is_served, served_config
from slime_like.errors import EngineError, WeightSyncError
from slime_like.sglang_backend.client import EngineClient
from slime_like.sglang_backend.shared_memory import WEIGHT_LOADER
from slime_like.weight_sync.buckets import NamedTensor, Reader, raw_bytes
from slime_like.weight_sync.in_engine.intake import new_hash
from slime_like.weight_sync.in_engine.receipt import BUFFER, RECEIPT_NAME, digest, read_digests, weighted_sum
from slime_like.weight_sync.proof.engine_layout import Cut, Piece, pieces
from slime_like.weight_sync.together import run_together

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class EngineLayout:
    """What decides how an engine cuts its weights, and where it computes digests."""

    tp_size: int
    on_cpu: bool
    may_fuse_shared: bool = False  # a shared expert may lie among the others
    block: int = 0  # of what is in eight bits, see Cut

    def cut(self, model: ModelConfig, rank: int) -> Cut:
        """One rank's share."""
        return Cut.of(
            model,
            rank,
            self.tp_size,
            on_cpu=self.on_cpu,
            may_fuse_shared=self.may_fuse_shared,
            block=self.block,
        )


@dataclasses.dataclass(frozen=True)
class Held:
    """What one rank of an engine must hold, and the number of its digest among those of the sync."""

    piece: Piece
    dtype: str
    digest: int

    def entry(self) -> list:
        """As in_engine.receipt.take reads it."""
        return [
            self.piece.parameter,
            self.piece.expert,
            self.piece.dim,
            self.piece.first,
            self.piece.stop - self.piece.start,
            self.dtype,
        ]


class _Digests:
    """8 bytes for each piece that was sent. Those that a device computes stay on it until one is asked for; then all
    of them are read together.
    """

    def __init__(self) -> None:
        self._parts: list[bytes | torch.Tensor] = []
        self._num_read = 0

    def add(self, part: bytes | torch.Tensor) -> int:
        """Its number."""
        self._parts.append(part)
        return len(self._parts) - 1

    def joined(self, numbers: Iterable[int]) -> bytes:
        """The bytes of these, one behind the other."""
        if self._num_read < len(self._parts):
            self._parts[self._num_read :] = read_digests(self._parts[self._num_read :])
            self._num_read = len(self._parts)
        return b"".join(self._parts[number] for number in numbers)


class Receipt:
    """Digests of one source's tensors as they are sent, for every layout among the engines, and the comparison with the
    engines' own.
    """

    def __init__(
        self,
        model: ModelConfig,
        clients: Sequence[EngineClient],
        who: str,
        readers: Collection[Reader] | None = None,
        *,
        scheme: QuantScheme | None = None,
    ):
        """readers: the ranks of engines that this source sends to; None: all. scheme: in which eight bits.

        Raises WeightSyncError where an engine does not keep weights in that scheme, or cannot be compared: it was
        started with made-up weights.
        """
        self._who = who
        self._layouts: dict[EngineClient, EngineLayout] = {}
        self.not_compared: dict[int, str] = {}  # engine -> why its digests cannot be compared
        self._readers = readers
        clients = [client for client in clients if self._ranks_of(client)]
        for client in clients:
            layout = layout_of(client, scheme)
            if isinstance(layout, str) and scheme is not None:
                raise WeightSyncError(
                    f"engine {client.endpoint.index} at {client.url} cannot be shown to hold weights in {scheme.name}:"
                    f" {layout}. It was sent nothing, and serves nothing."
                )
            if isinstance(layout, str):
                logger.warning(
                    "engine %d at %s: weight digests are not compared: %s", client.endpoint.index, client.url, layout
                )
                self.not_compared[client.endpoint.index] = layout
            else:
                self._layouts[client] = layout
        self._cuts = {
            layout: [layout.cut(model, rank) for rank in range(layout.tp_size)]
            for layout in set(self._layouts.values())
        }
        #: Of each layout, the ranks that any of our readers is: of the others nothing is computed.
        self._ranks = {
            layout: sorted({r for c, other in self._layouts.items() if other == layout for r in self._ranks_of(c)})
            for layout in self._cuts
        }
        self._digests = _Digests()
        self._held: dict[EngineLayout, list[list[Held]]] = {}
        self._of_name: dict[str, list[list[list[Held]]]] = {}  # what `entries` gives for a tensor
        #: of a rank, the digests that it was asked for, in order
        self._requests: dict[EngineLayout, list[list[int]]] = {}
        self._proven: set[Reader] = set()  # whose digests of the stream agreed
        self._has_warned = False  # whether the log knows of `unknown`
        self.unknown: list[str] = []  # tensors of which it is not known where an engine keeps them
        self.names: list[str] = []
        #: buckets.content_digest of the tensor yielded last, if it was computed anyway
        self.content: bytes | torch.Tensor | None = None

    def _ranks_of(self, client: EngineClient) -> list[int]:
        """Ranks of an engine that this source sends to."""
        engine, size = client.endpoint.index, client.endpoint.tp_size
        return [rank for rank in range(size) if self._readers is None or (engine, rank) in self._readers]

    def watching(self, tensors: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
        """The same tensors; each is taken in before it is passed on. Forgets what was watched before."""
        self.names, self.unknown = [], []
        self._held = {layout: [[] for _ in cuts] for layout, cuts in self._cuts.items()}
        self._requests = {layout: [[] for _ in cuts] for layout, cuts in self._cuts.items()}
        self._of_name, self._proven, self._digests = {}, set(), _Digests()
        for name, tensor in tensors:
            self._take(name, tensor)
            yield name, tensor
        self.content = None

    def layout_number(self, engine: int) -> int | None:
        """Which of the lists that `entries` gives is for this engine; None: its layout is not known."""
        layout = next((layout for client, layout in self._layouts.items() if client.endpoint.index == engine), None)
        return None if layout is None else list(self._cuts).index(layout)

    def entries(self, names: Iterable[str]) -> list[list[list[list]]]:
        """Of each layout, of each of its ranks: what to digest once these tensors are loaded.

        What is asked here must be asked of the engines.
        """
        lists: list[list[list[list]]] = [[[] for _ in cuts] for cuts in self._cuts.values()]
        for name in names:
            for layout, requests, of_layout in zip(
                self._of_name.get(name, ()), self._requests.values(), lists, strict=False
            ):
                for held, one, entries in zip(layout, requests, of_layout, strict=True):
                    entries += [piece.entry() for piece in held]
                    one += [piece.digest for piece in held]
        return lists

    def heard(self, engine: int, rank: int, digest: str) -> None:
        """An engine's rank has told the digest (16 hex digits) of all that `entries` asked it for."""
        layout = next((layout for client, layout in self._layouts.items() if client.endpoint.index == engine), None)
        if layout is None or len(self._requests[layout][rank]) != len(self._held[layout][rank]):
            return
        expected = new_hash()
        expected.update(self._digests.joined(self._requests[layout][rank]))
        if expected.hexdigest() == digest:
            self._proven.add((engine, rank))

    def verify(self, timeout_s: float) -> int:
        """The number of engines whose digests agree. Raises WeightSyncError with every difference; as differences()."""
        raise_different(self.differences(timeout_s))
        return len(self._layouts)

    def differences(self, timeout_s: float, engines: Collection[int] | None = None) -> list[str]:
        """Ask all engines at once, or those of these numbers; of each that differs its name, its rank and its first
        tensor that does.

        Raises EngineError or WaitTimeout.
        """
        if self.unknown and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%d tensors are not compared: it is not known where an engine keeps them, as %s",
                len(self.unknown),
                self.unknown[0],
            )
        tasks = {
            f"engine {client.endpoint.index} at {client.url}": functools.partial(self._difference, client, timeout_s)
            for client in self._layouts
            if engines is None or client.endpoint.index in engines
        }
        differences = run_together(tasks, timeout_s=timeout_s, who=self._who, phase="verify weights")
        return [differences[engine] for engine in tasks if differences[engine]]

    def readers(self) -> set[Reader]:
        """The ranks of engines that verify() compares."""
        return {(client.endpoint.index, rank) for client in self._layouts for rank in self._ranks_of(client)}

    def parameters(self) -> dict[EngineLayout, set[str]]:
        """Layout -> the engine's parameters of which this source sent a part."""
        return {
            layout: {held.piece.parameter for rank in ranks for held in rank} for layout, ranks in self._held.items()
        }

    def engines(self) -> Iterator[tuple[EngineClient, EngineLayout]]:
        """The engines that are compared."""
        yield from self._layouts.items()

    def _take(self, name: str, tensor: torch.Tensor) -> None:
        self.names.append(name)
        dtype = str(tensor.dtype).removeprefix("torch.")
        whole: dict[bool, int] = {}
        self.content = None
        known = True
        of_name = self._of_name[name] = [[[] for _ in ranks] for ranks in self._held.values()]
        for (layout, ranks), of_layout in zip(self._held.items(), of_name, strict=True):
            # of the first rank: others may hold nothing of a padded tensor
            known = known and bool(tensor.numel() == 0 or pieces(name, tensor.shape, self._cuts[layout][0]))
            for rank in self._ranks[layout]:
                for piece in pieces(name, tensor.shape, self._cuts[layout][rank]):
                    if piece.stop - piece.start == tensor.size(piece.dim):
                        if layout.on_cpu not in whole:
                            part = _digest(tensor, layout.on_cpu)
                            whole[layout.on_cpu] = self._digests.add(part)
                            if layout.on_cpu is not tensor.is_cuda:
                                self.content = part
                        value = whole[layout.on_cpu]
                    else:
                        share = tensor.narrow(piece.dim, piece.start, piece.stop - piece.start)
                        value = self._digests.add(_digest(share, layout.on_cpu))
                    of_layout[rank].append(Held(piece, dtype, value))
                ranks[rank] += of_layout[rank]
        if not known:
            self.unknown.append(name)

    def _difference(self, client: EngineClient, timeout_s: float) -> str | None:
        """What is wrong with those ranks of one engine that this source sends to."""
        mine = self._ranks_of(client)
        every = self._held[self._layouts[client]]
        ranks = [held if rank in mine else [] for rank, held in enumerate(every)]
        if all((client.endpoint.index, rank) in self._proven for rank in mine):
            return None
        wrong = self._wrong_ranks(client, ranks, timeout_s)
        if not wrong:
            return None
        rank = wrong[0]
        low, high = 0, len(ranks[rank])  # the first difference lies in [low, high)
        while high - low > 1:
            middle = (low + high) // 2
            half = [held[low:middle] if number == rank else [] for number, held in enumerate(ranks)]
            low, high = (low, middle) if rank in self._wrong_ranks(client, half, timeout_s) else (middle, high)
        piece = ranks[rank][low].piece
        return (
            f"engine {client.endpoint.index} at {client.url}, rank {rank}: {piece.name} is not what was sent (in the"
            f" engine {piece.parameter}{'' if piece.expert is None else f', expert {piece.expert}'},"
            f" {'columns' if piece.dim else 'rows'} {piece.first} to {piece.first + piece.stop - piece.start});"
            f" {len(wrong)} of {len(mine)} ranks differ"
        )

    def _wrong_ranks(self, client: EngineClient, ranks: Sequence[Sequence[Held]], timeout_s: float) -> list[int]:
        """Ranks of which the digests of these entries are not what they must be.

        An empty list of entries is not asked about.
        """
        requests = [json.dumps([held.entry() for held in entries]).encode() for entries in ranks]
        client.update_weights_from_tensor(
            loader_request(RECEIPT_NAME, requests), load_format=WEIGHT_LOADER, timeout_s=timeout_s
        )
        checksums = client.buffer_checksums(BUFFER, timeout_s)
        if sorted(checksums) != list(range(len(ranks))):
            raise EngineError(
                f"engine {client.endpoint.index} at {client.url}: digests of ranks {sorted(checksums)} instead of 0 to"
                f" {len(ranks) - 1}"
            )
        return [
            rank
            for rank, entries in enumerate(ranks)
            if entries and checksums[rank] != _checksum(self._digests.joined(held.digest for held in entries))
        ]


def raise_different(differences: Sequence[str]) -> None:
    """Raise WeightSyncError with these, unless there are none."""
    if differences:
        raise WeightSyncError("; ".join(differences) + ". Nothing was generated with these weights.")


def layout_of(client: EngineClient, scheme: QuantScheme | None = None) -> EngineLayout | str:
    """How an engine cuts its weights; or why that is not known here. scheme: in which eight bits they are sent."""
    info = client.server_info()
    loaders = info.get("custom_weight_loader") or []
    if WEIGHT_LOADER not in loaders:
        return f"it was started without --custom-weight-loader {WEIGHT_LOADER}"
    served = served_config(info)
    if scheme is not None and not is_served(scheme, served):
        return f"it was started with quantization_config {served}, not with {dict(scheme.engine_config)}"
    if scheme is None and (served or info.get("quantization")):
        return f"it keeps quantised weights ({info.get('quantization') or (served or {}).get('quant_method')})"
    for name, only in (("ep_size", 1), ("pp_size", 1), ("enable_dp_attention", False), ("moe_dense_tp_size", None)):
        if info.get(name) not in (only, None):
            return f"its layout with {name} {info[name]} is not known here"
    on_cpu = str(info.get("device") or "").startswith("cpu")
    return EngineLayout(
        tp_size=client.endpoint.tp_size,
        on_cpu=on_cpu,
        may_fuse_shared=not (on_cpu or info.get("disable_shared_experts_fusion")),
        block=0 if scheme is None else scheme.rows,
    )


def never_sent(
    receipt: Receipt, sent: Mapping[EngineLayout, set[str]], timeout_s: float, engines: Collection[int]
) -> None:
    """Raise WeightSyncError if an engine of these numbers has a parameter of which no source sent anything.

    Makes the engine hash all it holds: for whoever sends to its first rank.
    """
    for client, layout in receipt.engines():
        if client.endpoint.index not in engines or (client.endpoint.index, 0) not in receipt.readers():
            continue
        left = sorted(set(client.parameter_names(timeout_s)) - sent[layout] - {BUFFER})
        if left:
            raise WeightSyncError(
                f"engine {client.endpoint.index} at {client.url} has {left[0]}, which was never sent ({len(left)} in"
                " all)"
            )


def loader_request(name: str, by_rank: Sequence[bytes]) -> list[str]:
    """Bytes for our loader inside each rank, in the form of SGLang's update_weights_from_tensor: a pickled list of
    named tensors, base64.
    """
    # bytearray: torch warns about memory that it must not write to.
    return [
        base64.b64encode(pickle.dumps([(name, torch.frombuffer(bytearray(data), dtype=torch.uint8).clone())])).decode()
        for data in by_rank
    ]


def _digest(tensor: torch.Tensor, on_cpu: bool) -> bytes | torch.Tensor:
    if on_cpu:
        return digest(tensor.detach().cpu())
    return weighted_sum(raw_bytes(tensor))


def _checksum(answer: bytes) -> str:
    """As SGLang's checker hashes a tensor on the host (0.5.23, managers/mm_utils.tensor_hash)."""
    return hashlib.sha256(answer).digest()[:8].hex()
