"""Adapters of many tenants on one model: which of them count for which tokens."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence

import torch
from megatron.core import parallel_state

from slime_like.config.lora import LoraConfig
from slime_like.config.model import ModelConfig
from slime_like.megatron_backend.lora.adapter import AdapterSwitch, LoraAdapter, added_by_segments
from slime_like.megatron_backend.lora.build import adapters, put_adapters
from slime_like.megatron_backend.model.stage_weights import ADAPTER

#: A forward hook with keywords: (module, args, kwargs, output) -> the output in its place, or None.
Hook = Callable


@dataclasses.dataclass(frozen=True)
class Segment:
    """Tokens [first, end) of this rank's row, all of one tenant's rows or of padding."""

    tenant: str
    first: int
    end: int


class Attached:
    """One tenant's adapters on this rank's chunks."""

    def __init__(self, switch: AdapterSwitch):
        self.switch = switch
        #: layer -> what its output goes through where the tenant is alone
        self.hooks: dict[torch.nn.Module, list[Hook]] = {}
        #: layer -> its adapter, where tokens go through it one by one: it may see some of them only
        self.by_token: dict[torch.nn.Module, LoraAdapter] = {}
        #: holds the adapters as a model does, for all that walks over a model's
        self.shell = torch.nn.ModuleList()


class TenantAdapters:
    """The adapters of all tenants. Only those of the tenants in `showing` count, each for its tokens."""

    def __init__(self, stage: Sequence[torch.nn.Module], model: ModelConfig):
        self._stage, self._model = list(stage), model
        self._of: dict[str, Attached] = {}
        self._hooked: dict[torch.nn.Module, torch.utils.hooks.RemovableHandle] = {}
        self._shown: tuple[Segment, ...] = ()
        config = self._stage[0].config
        for chunk in self._stage:
            chunk.requires_grad_(False)
            needs_input_gradients = (
                config.recompute_granularity == "full" or parallel_state.get_pipeline_model_parallel_world_size() > 1
            )
            if chunk.pre_process and needs_input_gradients:
                # Layers that are computed again, and stages whose tenant has no adapter before their end, get gradients
                # only where their input asks for one, and the frozen embedding does not.
                chunk.embedding.register_forward_hook(_asking_for_gradients)

    def add(self, name: str, lora: LoraConfig, device: torch.device) -> Attached:
        """Zeros in every layer that `lora` targets, which count for nobody yet. Raises ConfigError."""
        attached = Attached(AdapterSwitch(lora))
        for chunk in self._stage:
            _lift(chunk, self._model, attached)
        attached.shell.to(device).requires_grad_(False)
        self._of[name] = attached
        for layer in attached.hooks:
            if layer not in self._hooked:
                self._hooked[layer] = layer.register_forward_hook(self._apply, with_kwargs=True)
        return attached

    def remove(self, name: str) -> None:
        """Forget a tenant's."""
        gone = self._of.pop(name)
        for layer in gone.hooks:
            if not any(layer in other.hooks for other in self._of.values()):
                self._hooked.pop(layer).remove()

    def can_share(self, names: Sequence[str]) -> bool:
        """Whether these tenants' rows may lie in one pack."""
        return all(set(self._of[name].hooks) == set(self._of[name].by_token) for name in names)

    def show(self, segments: Sequence[Segment]) -> None:
        """From now on these tenants' adapters count, for these tokens; none, or of one that has none: the model alone
        does.
        """
        self._shown = tuple(segments) if all(segment.tenant in self._of for segment in segments) else ()

    @contextlib.contextmanager
    def dropping(self, names: Sequence[str]) -> Iterator[None]:
        """Inside, as in train steps, these tenants' --lora-dropout counts."""
        with contextlib.ExitStack() as stack:
            for name in names:
                if name in self._of:
                    stack.enter_context(self._of[name].switch.dropping())
            yield

    def _apply(self, layer: torch.nn.Module, args: tuple, kwargs: dict, output):
        if not self._shown:
            return None
        if len(self._shown) == 1:
            for hook in self._of[self._shown[0].tenant].hooks.get(layer, ()):
                changed = hook(layer, args, kwargs, output)
                output = output if changed is None else changed
            return output
        hidden, whole = args[0] if args else kwargs["input_"], output[0]
        adapters_here = [self._of[segment.tenant].by_token.get(layer) for segment in self._shown]
        rank = parallel_state.get_tensor_model_parallel_rank()
        input_sizes, output_sizes = (sizes_within(self._shown, len(rows), rank) for rows in (hidden, whole))
        gain = added_by_segments(adapters_here, hidden, input_sizes, output_sizes)
        return output if gain is None else (whole + gain, *output[1:])


def sizes_within(segments: Sequence[Segment], num_tokens: int, rank: int) -> list[int]:
    """Tokens of each segment in the whole row, or in the share of so many tokens that the tensor parallel rank `rank`
    has. Example: segments of 3 and 5 tokens, 4 tokens -> [3, 1] on rank 0, [0, 4] on rank 1.
    """
    first, end = 0, segments[-1].end
    if num_tokens < end:
        first = num_tokens * rank
        end = first + num_tokens
    return [max(0, min(segment.end, end) - max(segment.first, first)) for segment in segments]


def _lift(chunk: torch.nn.Module, model: ModelConfig, attached: Attached) -> None:
    """Make the chunk's adapters, and take them off it again: the layers then hold none, and `attached` all of them."""
    # A module's hooks can be asked for by no public way; a handle is not kept by who makes an adapter.
    before = {module: set(module._forward_hooks) for module in chunk.modules()}
    put_adapters(chunk, model, attached.switch)
    for module, known in before.items():
        for key in [key for key in module._forward_hooks if key not in known]:
            hook = module._forward_hooks.pop(key)
            module._forward_hooks_with_kwargs.pop(key, None)
            if module is not getattr(chunk, "embedding", None):
                attached.hooks.setdefault(module, []).append(hook)
    names = {module: name for name, module in chunk.named_modules()}
    for layer, adapter in list(adapters([chunk])):
        del layer._modules[ADAPTER]
        holder = torch.nn.Module()
        holder.add_module(ADAPTER, adapter)
        attached.shell.append(holder)
        if len(attached.hooks.get(layer, ())) == 1 and ".experts." not in names[layer]:  # those see tokens in turn
            attached.by_token[layer] = adapter


def _asking_for_gradients(_, __, output: torch.Tensor) -> None:
    output.requires_grad_(torch.is_grad_enabled())
