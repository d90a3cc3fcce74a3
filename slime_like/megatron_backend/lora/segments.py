"""Adapters of many tenants on one model: which of them count for which tokens."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import torch
from megatron.core import parallel_state

from slime_like.config.lora import LoraConfig
from slime_like.config.model import ModelConfig
from slime_like.megatron_backend.lora.adapter import AdapterSwitch, LoraAdapter
from slime_like.megatron_backend.lora.build import make_adapters
from slime_like.megatron_backend.lora.experts import ExpertAdapters, adapters_of
from slime_like.megatron_backend.lora.gains import added_by_segments, with_gain
from slime_like.megatron_backend.lora.layers import called, tell_norm


@dataclasses.dataclass(frozen=True)
class Segment:
    """Tokens [first, end) of this rank's row, all of one tenant's rows or of padding."""

    tenant: str
    first: int
    end: int


class Attached:
    """One tenant's adapters for this rank's chunks."""

    def __init__(self, switch: AdapterSwitch):
        self.switch = switch
        self.of_layers: dict[torch.nn.Module, LoraAdapter | ExpertAdapters] = {}
        #: holds the adapters as a model does, for all that walks over a model's
        self.shell = torch.nn.ModuleList()

    @property
    def goes_by_token(self) -> bool:
        """Whether each may see some of the tokens only: experts get theirs sorted."""
        return not any(one.shape.is_expert for some in self.of_layers.values() for one in adapters_of(some))


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
            attached.of_layers.update(make_adapters(chunk, self._model, attached.switch))
        attached.shell.extend(attached.of_layers.values())
        attached.shell.to(device).requires_grad_(False)
        self._of[name] = attached
        for layer in attached.of_layers:
            if layer not in self._hooked:
                tell_norm(layer)
                self._hooked[layer] = layer.register_forward_hook(self._apply, with_kwargs=True)
        return attached

    def remove(self, name: str) -> None:
        """Forget a tenant's."""
        gone = self._of.pop(name)
        for layer in gone.of_layers:
            if not any(layer in other.of_layers for other in self._of.values()):
                self._hooked.pop(layer).remove()
                tell_norm(layer, wanted=False)

    def can_share(self, names: Sequence[str]) -> bool:
        """Whether these tenants' rows may lie in one pack."""
        return all(self._of[name].goes_by_token for name in names)

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

    def _apply(self, layer: torch.nn.Module, args: tuple, kwargs: dict, output: tuple) -> tuple:
        inputs, output = called(args, kwargs, output)
        adapters_here = [self._of[segment.tenant].of_layers.get(layer) for segment in self._shown]
        if len(adapters_here) < 2:
            return with_gain(adapters_here[0] if adapters_here else None, inputs, output)
        hidden, whole = inputs[0], output[0]
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


def _asking_for_gradients(_, __, output: torch.Tensor) -> None:
    output.requires_grad_(torch.is_grad_enabled())
