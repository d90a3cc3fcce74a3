"""A tenant on disk: weights as PEFT's or HF's folder, and beside them, to go on from, the optimizer's state.

tenant.json says what was trained and how far, and is written last.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence

import torch
from megatron.core.models.gpt import GPTModel
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from slime_like.config.lora import LoraConfig
from slime_like.config.run import RunConfig
from slime_like.errors import CheckpointError, SaveError
from slime_like.megatron_backend.checkpoint.folder import swap_in
from slime_like.megatron_backend.hf.names_and_shards import export_hf, is_export_source, load_hf
from slime_like.megatron_backend.hf.save import save_hf_folder
from slime_like.megatron_backend.lora.build import parts, put_whole
from slime_like.megatron_backend.lora.peft_files import adapter_names, adapter_tensors, load_adapters, write_folder
from slime_like.megatron_backend.lora.state import adapter_record
from slime_like.megatron_backend.lora.tenant_memory import TenantMemory

STATE, MOMENTS_FILE, OPTIMIZER = "tenant.json", "optimizer.safetensors", "optimizer"
_MOMENTS = ("exp_avg", "exp_avg_sq")


class AdapterFiles:
    """The adapters of a tenant as PEFT's folder, in fp32 where it is to be gone on from."""

    def __init__(self, config: RunConfig, lora: LoraConfig, shell: Sequence[torch.nn.Module], memory: TenantMemory):
        self._model, self._base, self._lora = config.model, config.checkpoint.hf_checkpoint, lora
        self._shell, self._memory = shell, memory

    def save(self, folder: str, *, optimizer: bool) -> None:
        """Collective; the folder is whole when it has its name. Raises SaveError."""
        memory = self._memory
        with memory.showing(memory.master):
            weights = _on_first_rank(adapter_tensors(self._shell))
        moments = {}
        for name, numbers in zip(_MOMENTS, memory.moments or (), strict=False) if optimizer else ():
            with memory.showing(numbers):
                moments[name] = _on_first_rank(adapter_tensors(self._shell))
        with _draft(folder) as draft:
            if draft is not None:
                write_folder(weights, draft, lora=self._lora, model=self._model, base=self._base)
                if moments:
                    flat = {f"{name}.{key}": x for name, tensors in moments.items() for key, x in tensors.items()}
                    save_file(flat, os.path.join(draft, MOMENTS_FILE))
                record = {"lora": adapter_record(self._lora, self._model)}
                _write_state(draft, record | {"optimizer": optimizer, "num_steps": memory.num_steps})

    def export(self, folder: str) -> None:
        """As engines load them: the weights alone, in the model's type. Collective."""
        weights = _on_first_rank(adapter_tensors(self._shell))
        with _draft(folder) as draft:
            if draft is not None:
                write_folder(weights, draft, lora=self._lora, model=self._model, base=self._base)

    def load(self, folder: str, *, optimizer: bool) -> None:
        """What save() wrote, by whatever layout, or for weights alone PEFT. Raises CheckpointError."""
        memory, state = self._memory, _read_state(folder) if optimizer else {}
        path = os.path.join(folder, MOMENTS_FILE)
        moments: dict[str, torch.Tensor] = {}
        if state.get("num_steps"):
            try:
                moments = load_file(path)
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{path} cannot be read: {error}") from None
            expected = {f"{kind}.{name}" for kind in _MOMENTS for name in adapter_names(self._lora, self._model)}
            if odd := expected ^ set(moments):
                raise CheckpointError(
                    f"{path} and these adapters differ in {min(odd)} ({len(odd)} of {len(expected)})."
                )
        with memory.showing(memory.master):
            load_adapters(self._shell, folder, self._lora, self._model)
        memory.weights_changed()
        if optimizer:
            memory.num_steps, memory.moments = int(state["num_steps"]), None
        if moments:
            memory.moments = torch.zeros_like(memory.master), torch.zeros_like(memory.master)
            for name, numbers in zip(_MOMENTS, memory.moments, strict=True):
                with memory.showing(numbers):
                    self._put(moments, name)

    def _put(self, tensors: dict[str, torch.Tensor], kind: str) -> None:
        for adapter, part in parts(self._shell):
            name = f"{kind}.base_model.model.{part.module}"
            put_whole(adapter, part, tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"])


class ModelFiles:
    """A full-parameter tenant as HF's folder; moments and, beside bf16, main weights are HF folders within it."""

    def __init__(self, config: RunConfig, stage: Sequence[GPTModel], memory: TenantMemory):
        assert config.checkpoint.hf_checkpoint, "--hf-checkpoint is checked before workers are built"
        self._model, self._template, self._stage = config.model, config.checkpoint.hf_checkpoint, stage
        self._memory = memory

    def save(self, folder: str, *, optimizer: bool) -> None:
        """Collective; the folder is whole when it has its name."""
        memory, draft = self._memory, f"{folder.rstrip('/')}.draft"
        numbers: dict[str, torch.Tensor] = {}
        if optimizer and memory.weights is not memory.master:
            numbers["master"] = memory.master
        if optimizer and memory.moments is not None:
            numbers |= dict(zip(_MOMENTS, memory.moments, strict=True))
        self._write(memory.weights, draft)
        if torch.distributed.get_rank() == 0 and numbers:
            os.makedirs(os.path.join(draft, OPTIMIZER))
        torch.distributed.barrier()
        for name, flat in numbers.items():
            self._write(flat, os.path.join(draft, OPTIMIZER, name))
        with _draft(folder, begun=draft) as place:
            if place is not None:
                _write_state(place, {"lora": None, "optimizer": optimizer, "num_steps": memory.num_steps})

    def export(self, folder: str) -> None:
        """As engines load it. Collective."""
        draft = f"{folder.rstrip('/')}.draft"
        self._write(self._memory.weights, draft)
        with _draft(folder, begun=draft):
            pass

    def load(self, folder: str, *, optimizer: bool) -> None:
        """What save() wrote, by whatever layout, or for weights alone any HF folder. Raises CheckpointError."""
        memory, state = self._memory, _read_state(folder) if optimizer else {}
        master = os.path.join(folder, OPTIMIZER, "master")
        self._read(memory.master, master if optimizer and os.path.isdir(master) else folder)
        memory.weights_changed()
        if not optimizer:
            return
        memory.num_steps, memory.moments = int(state["num_steps"]), None
        if memory.num_steps:
            memory.moments = torch.zeros_like(memory.master), torch.zeros_like(memory.master)
            for name, flat in zip(_MOMENTS, memory.moments, strict=True):
                self._read(flat, os.path.join(folder, OPTIMIZER, name))

    def _write(self, flat: torch.Tensor, folder: str) -> None:
        with self._memory.showing(flat):
            save_hf_folder(
                lambda: export_hf(self._stage, self._model), folder, template=self._template, dtype=flat.dtype
            )

    def _read(self, flat: torch.Tensor, folder: str) -> None:
        with self._memory.showing(flat):
            load_hf(self._stage, self._model, folder)


def _on_first_rank(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All stages' tensors on rank 0, nothing elsewhere. Collective."""
    is_first = torch.distributed.get_rank() == 0
    every: list = [None] * torch.distributed.get_world_size()
    copies = {name: x.clone() for name, x in tensors.items()} if is_export_source() else {}
    torch.distributed.gather_object(copies, every if is_first else None, dst=0)
    return {name: tensor for part in every for name, tensor in part.items()} if is_first else {}


@contextlib.contextmanager
def _draft(folder: str, *, begun: str | None = None) -> Iterator[str | None]:
    """On rank 0 a folder that takes the name `folder` once the block has ended and all of it is on disk; elsewhere
    None. Collective: all know then whether it is there. Raises SaveError on every rank.

    begun: a draft that holds something already.
    """
    problem: list[str | None] = [None]
    if torch.distributed.get_rank() == 0:
        draft = begun or f"{folder.rstrip('/')}.draft"
        try:
            if begun is None:
                shutil.rmtree(draft, ignore_errors=True)
                os.makedirs(draft)
            yield draft
            _sync(draft)
            swap_in(draft, folder.rstrip("/"))
            _sync_one(os.path.dirname(os.path.abspath(folder)))
        except OSError as error:
            problem = [f"{folder} could not be written: {error}"]
    else:
        yield None
    torch.distributed.broadcast_object_list(problem, src=0)
    if problem[0]:
        raise SaveError(problem[0])


def _sync(folder: str) -> None:
    """Until everything below the folder is on disk."""
    for place, _, names in os.walk(folder):
        for path in [*(os.path.join(place, name) for name in names), place]:
            _sync_one(path)


def _sync_one(path: str) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_state(folder: str, record: dict) -> None:
    with open(os.path.join(folder, STATE), "w", encoding="utf-8") as file:
        json.dump(record, file, indent=1)


def _read_state(folder: str) -> dict:
    """tenant.json. Raises CheckpointError if there is none, or if no optimizer's state was saved with it."""
    path = os.path.join(folder, STATE)
    try:
        with open(path, encoding="utf-8") as file:
            state = json.load(file)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error!r}. Without it only weights can be loaded.") from None
    if not state.get("optimizer"):
        raise CheckpointError(f"{folder} was saved without the optimizer's state: only its weights can be loaded.")
    return state
