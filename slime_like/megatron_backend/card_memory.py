"""What a trainer's rank holds on its card, and how it makes room for the engines there.

Tensors stay the same objects: the memory behind them is given up and taken again, so that every view of Megatron's
buffers (a bucket, a parameter, the optimizer's slice of one) is as valid afterwards as before.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from slime_like.megatron_backend.host_memory import host_memory, wait_for_copies

logger = logging.getLogger(__name__)

#: What a rank holds between steps, in the order in which memory that two of them share is counted.
TRAIN_STATE = ("weights", "gradients", "optimizer")

#: Memory that was given up: itself, its bytes, and the copy on the host; None: it was all zeros.
_Away = tuple[torch.UntypedStorage, int, torch.Tensor | None]


def give_back_cached(device: torch.device) -> None:
    """Hand memory that nothing uses any more from torch's cache to the driver, where other processes find it."""
    if device.type == "cuda":
        gc.collect()  # what only a cycle of Python still holds
        _clear_workspaces()
        torch.cuda.ipc_collect()  # what an engine was shown by a handle, and has let go of
        torch.cuda.empty_cache()
        held, alive = torch.cuda.memory_reserved(device) / 2**30, torch.cuda.memory_allocated(device) / 2**30
        logger.debug("torch keeps %.3f GiB of the card, %.3f of it in tensors", held, alive)


def _clear_workspaces() -> None:
    """cuBLAS takes its workspaces (32 MiB each on Hopper) from torch's cache, amid what leaves the card: a segment that
    holds one could not be handed back.
    """
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)  # torch 2.11 and 2.13; not in CPU builds
    if clear is not None:
        clear()


class CardMemory:
    """One rank's train state. `release` copies parts of it to the host and gives their memory up, `need` brings them
    back, to the last bit.

    Memory that is all zeros, as gradient buffers between steps, is not copied. Copies on the host keep their memory:
    to lock its pages takes longer than to fill them.
    """

    def __init__(
        self,
        stage: torch.nn.Module,
        model: Sequence[torch.nn.Module] = (),
        *,
        offloads: bool,
        give_back: Callable[[torch.device], None] = give_back_cached,
    ):
        """stage: the model's parts themselves; model: the same in Megatron's wrappers, where this role trains.

        offloads: else only cached memory is given back. give_back: how.
        """
        self._stage, self._model = stage, list(model)
        self._optimizer: object | None = None
        self._offloads, self._give_back = offloads, give_back
        self._device = next(stage.parameters()).device
        self._copies: dict[int, torch.Tensor] = {}  # host memory, by the memory that was copied there last
        self._away: dict[str, list[_Away]] = {}

    def add_optimizer(self, optimizer: object) -> None:
        """Megatron's, with all that it steps on."""
        self._optimizer = optimizer

    def held_bytes(self) -> dict[str, int]:
        """Bytes of memory behind each part of the train state."""
        return {part: sum(storage.nbytes() for storage in storages) for part, storages in self._storages().items()}

    def release(self, keep: Iterable[str] = ()) -> None:
        """Give up the memory of what is not in `keep`, of TRAIN_STATE, and all cached memory."""
        started, keeping = time.monotonic(), set(keep)
        assert keeping <= set(TRAIN_STATE), f"{sorted(keeping)} of {TRAIN_STATE}"
        if self._offloads:
            storages = self._storages()
            present = {storage._cdata for of_part in storages.values() for storage in of_part}
            self._copies = {key: copy for key, copy in self._copies.items() if key in present}
            moving = [part for part in TRAIN_STATE if part not in keeping and part not in self._away]
            for part in moving:
                self._away[part] = self._take_away(storages[part])
            num_bytes = sum(size for part in moving for _, size, _ in self._away[part])
            logger.debug("%.3f GiB given up in %.2f s", num_bytes / 2**30, time.monotonic() - started)
        self._give_back(self._device)

    def need(self, *parts: str) -> None:
        """Have these parts where they were before they were released; does nothing where they are."""
        devices = set()
        for part in [part for part in parts if part in self._away]:
            for storage, size, copy in self._away.pop(part):
                storage.resize_(size)
                if copy is None:
                    _as_bytes(storage).zero_()
                else:
                    _as_bytes(storage).copy_(copy, non_blocking=True)
                devices.add(storage.device)
        for device in devices:
            wait_for_copies(device)

    def _take_away(self, storages: Sequence[torch.UntypedStorage]) -> list[_Away]:
        # On a CPU host torch keeps memory in place that numpy has been shown: an array might still look at it.
        staying = sum(storage.nbytes() for storage in storages if not storage.resizable())
        if staying:
            logger.warning("%d bytes of the train state are shared with numpy and stay where they are", staying)
        rows = [(storage, storage.nbytes(), self._copy_of(storage)) for storage in storages if storage.resizable()]
        for device in {storage.device for storage, _, _ in rows}:
            wait_for_copies(device)
        for storage, _, _ in rows:
            storage.resize_(0)
        return rows

    def _copy_of(self, storage: torch.UntypedStorage) -> torch.Tensor | None:
        """A copy on the host that has been begun; None where zeros do."""
        if not bool(_as_bytes(storage).any()):
            return None
        copy = self._copies.get(storage._cdata)
        if copy is None or copy.numel() != storage.nbytes():
            copy = self._copies[storage._cdata] = host_memory(storage.nbytes(), storage.device)
        copy.copy_(_as_bytes(storage), non_blocking=True)
        return copy

    def _storages(self) -> dict[str, list[torch.UntypedStorage]]:
        """The memory behind each part; what two of them share counts for the first."""
        seen: set[int] = set()
        storages: dict[str, list[torch.UntypedStorage]] = {part: [] for part in TRAIN_STATE}
        for part, tensor in self._tensors():
            storage = tensor.untyped_storage()
            if tensor.device == self._device and storage._cdata not in seen:
                seen.add(storage._cdata)
                storages[part].append(storage)
        return storages

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(part, tensor) of everything, several views of the same memory among them."""
        buffers = [
            buffer for chunk in self._model for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
        ]  # of Megatron's data parallel wrapper, in which `buffers` is no method
        for tensor in (*self._stage.parameters(), *self._stage.buffers(), *(b.param_data for b in buffers)):
            if tensor is not None:  # without the distributed optimizer parameters have memory of their own
                yield "weights", tensor
        for buffer in buffers:
            yield "gradients", buffer.grad_data
        for owner in getattr(self._optimizer, "chained_optimizers", ()):
            inner = owner.optimizer
            for group in inner.param_groups if inner is not None else ():  # None: no parameter is of its kind
                for parameter in group["params"]:
                    yield "optimizer", parameter
                    for tensor in inner.state.get(parameter, {}).values():
                        if isinstance(tensor, torch.Tensor):
                            yield "optimizer", tensor


def _as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """The memory as [bytes] uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
