"""What can go wrong with weights: changes of a stream of tensors, put into a trainer rank or into files.

All functions can be sent to a rank.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from slime_like.records import BASE
from tests.helpers.train_world import recipe_of

Stream = Iterator[tuple[str, torch.Tensor]]


@dataclasses.dataclass(frozen=True)
class Fault:
    """A change of all tensors of a model, by their names."""

    kind: str  # dropped, transposed, exchanged, flipped or stale
    names: tuple[str, ...]

    def apply(self, tensors: dict[str, torch.Tensor], before: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The changed tensors, in the same order. before: those of an older version."""
        changed = dict(tensors)
        if self.kind == "dropped":
            for name in self.names:
                del changed[name]
        elif self.kind == "exchanged":
            one, other = self.names
            changed[one], changed[other] = tensors[other].clone(), tensors[one].clone()
        elif self.kind == "stale":
            changed = {name: before[name].clone() for name in tensors}
        else:
            for name in self.names:
                changed[name] = _CHANGES[self.kind](tensors[name].clone())
        return changed


def _transposed(tensor: torch.Tensor) -> torch.Tensor:
    assert tensor.dim() == 2 and tensor.size(0) == tensor.size(1), (
        "only a square matrix is taken by an engine when transposed"
    )
    return tensor.T.contiguous()


def _flipped(tensor: torch.Tensor) -> torch.Tensor:
    """One bit, the last one of the mantissa, of the last element."""
    tensor.view(torch.int32).reshape(-1)[-1] ^= 1
    return tensor


_CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"transposed": _transposed, "flipped": _flipped}


# ------------------------------------------------------------------ inside a trainer rank


@dataclasses.dataclass
class _Armed:
    """What happens in this process's next syncs; one of these a process."""

    in_flight: Callable[[Stream], Stream] | None = None
    conversion: Callable[[Stream], Stream] | None = None
    on_disk: Callable[[str], None] | None = None  # given the folder that engines are about to load
    keeps_version: bool = False  # engines are not told the new one
    before: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)


_ARMED = _Armed()


def install(worker) -> None:
    """Lead this rank's streams past the armed faults: where HF tensors are made, and between the receipt and the
    transport.
    """
    from slime_like.megatron_backend.hf import names_and_shards as hf_convert
    from slime_like.sglang_backend.client import EngineClient
    from slime_like.weight_sync import sender
    from slime_like.weight_sync.session import EngineSide, version_directory

    make, export, load, name = (
        sender.make_publisher,
        hf_convert.export_hf,
        EngineSide.load,
        EngineClient.update_weight_version,
    )

    def make_publisher(options):
        publisher = make(options)
        send = publisher.send
        publisher.send = lambda tensors, *rest, **more: send(
            _ARMED.in_flight(tensors) if _ARMED.in_flight else tensors, *rest, **more
        )
        return publisher

    def export_hf(stage, model):
        stream = export(stage, model)
        return _ARMED.conversion(stream) if _ARMED.conversion else stream

    def load_changed(engines):
        if _ARMED.on_disk:
            _ARMED.on_disk(version_directory(engines._order.directory, engines._order.weights.version))
        load(engines)

    def update_weight_version(client, version, *rest):
        if not _ARMED.keeps_version:
            name(client, version, *rest)

    sender.make_publisher, hf_convert.export_hf = make_publisher, export_hf
    EngineSide.load, EngineClient.update_weight_version = load_changed, update_weight_version


def arm(worker, where: str, fault: Fault) -> None:
    """Put a fault into the next syncs. where: "conversion" or "in flight"."""

    def change(stream: Stream) -> Stream:
        # copies: a tensor's memory may be used again for the one after it
        yield from fault.apply({name: tensor.clone() for name, tensor in stream}, _ARMED.before).items()

    setattr(_ARMED, where.replace(" ", "_"), change)


def arm_on_disk(worker, fault: Fault | None, older: str) -> None:
    """Put a fault into the folder before engines load it; None: its last byte is cut off.

    older: folder of another version.
    """
    _ARMED.on_disk = truncate if fault is None else (lambda folder: change_files(folder, fault, older))


def arm_version(worker) -> None:
    """Engines are not told the version of the next syncs."""
    _ARMED.keeps_version = True


def arm_kill(worker, pids: list[int], after: int, how: int = signal.SIGKILL) -> None:
    """Send processes ([]: this rank itself) a signal when so many tensors were gathered."""

    def deadly(stream: Stream) -> Stream:
        for number, item in enumerate(stream):
            if number == after:
                for pid in pids or [os.getpid()]:
                    os.kill(pid, how)
                time.sleep(0.2)  # until the kernel has closed their sockets
            yield item

    _ARMED.conversion = deadly


def disarm(worker) -> None:
    """No fault any more."""
    _ARMED.in_flight = _ARMED.conversion = _ARMED.on_disk = None
    _ARMED.keeps_version = False


def remember(worker) -> int:
    """Keep this version's tensors: what is stale later. Collective."""
    _ARMED.before = {name: tensor.detach().clone() for name, tensor in worker.export(BASE)}
    return len(_ARMED.before)


def pid_of(worker) -> int:
    """Of this rank."""
    return os.getpid()


def save_hf(worker, folder: str) -> None:
    """An HF folder of the present weights."""
    recipe_of(worker).save_hf(folder)


def nudge(worker) -> None:
    """Change every weight a little, on all ranks alike, as a train step would."""
    with torch.no_grad():
        for chunk in worker.stage:
            for parameter in chunk.parameters():
                parameter.mul_(1.001).add_(1e-4)


# ------------------------------------------------------------------ files of the disk transport


def change_files(folder: str, fault: Fault, older: str) -> None:
    """Put a fault into a version on disk. older: folder of another version."""
    owners, tensors = _read(folder)
    changed = fault.apply(tensors, _read(older)[1] if fault.kind == "stale" else {})
    for file_name in sorted(set(owners.values())):
        held = {name: tensor for name, tensor in changed.items() if owners[name] == file_name}
        save_file(held, os.path.join(folder, file_name), metadata={"format": "pt"})
    index = Path(folder, "model.safetensors.index.json")
    if fault.kind == "dropped" and index.exists():
        content = json.loads(index.read_text())
        content["weight_map"] = {name: owner for name, owner in content["weight_map"].items() if name in changed}
        index.write_text(json.dumps(content))


def truncate(folder: str) -> str:
    """Cut the last file's last byte off; its name."""
    path = max(Path(folder).glob("*.safetensors"))
    os.truncate(path, path.stat().st_size - 1)
    return path.name


def _read(folder: str) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    owners, tensors = {}, {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            owners[name], tensors[name] = path.name, tensor.clone()
    return owners, tensors
