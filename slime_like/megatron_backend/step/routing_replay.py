"""Routers that choose the experts they are told to: what an engine chose (R3), or what the pass before the first step
chose (R2).

A router's choice is not continuous: where two experts are nearly equal, rounding decides, and a token's log-prob jumps.
So engine and trainer disagree although their weights are equal (arXiv:2510.11370), and a policy's ratio moves without a
change of weights. Replay takes the choice as given; the probabilities of the chosen experts, and their gradients, are
still this router's own.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
from collections.abc import Iterator, Sequence

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter

from slime_like.config.run import RunConfig
from slime_like.errors import DataError
from slime_like.megatron_backend.step.packing import PackedBatch
from slime_like.records import TrainSample, routing_fault

#: In an array of experts: nobody said, the router chooses itself. Always so for padding, and for a sample's last token
#: (no engine processes it).
OWN_CHOICE = -1


class Routing(enum.Enum):
    """Who chooses the experts in one pass over the micro-batches."""

    OWN = "own"  # the router
    RECORD = "record"  # the router, and its choice is kept
    REPLAY = "replay"  # PackedBatch.routed_experts, where it is there and says


@dataclasses.dataclass
class _Place:
    """One router: the choice it is to make, the one it made, and those of micro-batches whose backward pass is still to
    come.
    """

    target: torch.Tensor | None = None  # [tokens of this rank, topk] int64
    choice: torch.Tensor | None = None
    pending: collections.deque[torch.Tensor] = dataclasses.field(default_factory=collections.deque)


class RoutingReplay:
    """Takes hold of every router below `model`; outside of `forward` they choose as always.

    Activation recomputation runs routers again in the backward pass, when other micro-batches have gone forward in
    between (1F1B). Backward passes of one layer come in the order of its forward passes, so each router's choices wait
    in a queue.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        num_layers: int,
        topk: int,
        num_experts: int,
        sequence_parallel: bool,
        from_samples: bool,
    ):
        self._num_layers, self._topk, self._num_experts = num_layers, topk, num_experts
        self._sequence_parallel = sequence_parallel
        self._from_samples = from_samples
        self._inside = False
        self._keeps = False
        # layer of the whole model, from 0 -> its router, for the layers of this stage
        self._places: dict[int, _Place] = {}
        for module in model.modules():
            if isinstance(module, TopKRouter):
                layer = module.layer_number - 1
                self._places[layer] = _Place()
                # The face of megatron's own RouterReplay (0.16.1), which cannot leave some tokens to the router and
                # registers globally.
                module.router_replay = _ReplayedRouter(self, self._places[layer])

    @classmethod
    def for_policy(cls, config: RunConfig, model: torch.nn.Module) -> RoutingReplay | None:
        """For the policy's own processes, if --use-routing-replay or --use-rollout-routing-replay is given.

        A critic and a reference choose themselves.
        """
        if config.role != "actor" or not (config.loss.use_routing_replay or config.loss.use_rollout_routing_replay):
            return None
        assert config.model.is_known and config.model.num_experts, (
            "the architecture is resolved before workers are built"
        )
        return cls(
            model,
            num_layers=config.model.num_layers,
            topk=config.model.moe_router_topk,
            num_experts=config.model.num_experts,
            sequence_parallel=config.parallel.sequence_parallel,
            from_samples=config.loss.use_rollout_routing_replay,
        )

    @property
    def records(self) -> bool:
        """Whether the pass before the first step decides (R2), not the engine (R3)."""
        return not self._from_samples

    @contextlib.contextmanager
    def forward(
        self, batch: PackedBatch, routing: Routing, *, backward_follows: bool
    ) -> Iterator[dict[int, torch.Tensor]]:
        """Around one micro-batch's forward pass.

        Yields {layer: choice}, filled when the pass is over and `routing` is RECORD.
        """
        recorded: dict[int, torch.Tensor] = {}
        replayed = (
            self._on_this_rank(batch.routed_experts)
            if routing is Routing.REPLAY and batch.routed_experts is not None
            else None
        )
        for layer, place in self._places.items():
            place.target = None if replayed is None else replayed[:, layer].to(torch.int64)
            place.choice = None
        self._inside, self._keeps = True, backward_follows
        try:
            yield recorded
            if routing is Routing.RECORD:
                recorded.update(
                    (layer, place.choice) for layer, place in self._places.items() if place.choice is not None
                )
        finally:
            self._inside = self._keeps = False
            for place in self._places.values():
                place.target = place.choice = None

    def check(self, samples: Sequence[TrainSample]) -> None:
        """Raise DataError if samples should bring the engine's choice, and one brings none, that of another model, or
        what no router chooses.
        """
        if not self._from_samples:
            return
        for sample in samples:
            where = f"prompt {sample.prompt_index}, sample {sample.sample_index}"
            if sample.routed_experts is None:
                raise DataError(
                    f"{where}: has no routed experts, which --use-rollout-routing-replay trains with. Fix: samples"
                    " generated with the flag (--load-debug-rollout-data), or drop it."
                )
            shape, expected = sample.routed_experts.shape, (len(sample.tokens), self._num_layers, self._topk)
            if shape != expected:
                raise DataError(
                    f"{where}: has routed experts {shape}, but tokens, layers and experts per token are {expected}."
                )
            fault = routing_fault(sample.routed_experts, sorted(self._places), self._num_experts)
            if fault:
                raise DataError(
                    f"{where}: its routed experts were not chosen by a router of this model: {fault}. Fix: generate the"
                    " samples again."
                )

    def clear(self) -> None:
        """Forget what waits for a backward pass: all of them are over."""
        for place in self._places.values():
            place.pending.clear()

    def as_routed_experts(self, batch: PackedBatch, recorded: dict[int, torch.Tensor]) -> torch.Tensor | None:
        """Recorded choices as PackedBatch.routed_experts: OWN_CHOICE in layers and tokens that other ranks hold.

        None without a router here.
        """
        if not recorded:
            return None
        topk = next(iter(recorded.values())).size(1)
        rows, columns = batch.tokens.shape
        whole = torch.full(
            (rows, columns, self._num_layers, topk), OWN_CHOICE, dtype=torch.int16, device=batch.tokens.device
        )
        mine = self._rows(columns)
        for layer, choice in recorded.items():
            whole[:, mine, layer] = choice.to(torch.int16).view(-1, rows, topk).transpose(0, 1)
        return whole

    def _on_this_rank(self, routed_experts: torch.Tensor) -> torch.Tensor:
        """[B, S, layers, topk] -> [tokens of this rank, layers, topk] in the order in which routers see them: position
        by position.
        """
        return routed_experts[:, self._rows(routed_experts.size(1))].transpose(0, 1).flatten(0, 1)

    def _rows(self, length: int) -> slice:
        """This rank's part of the positions: routers see what sequence parallelism leaves them."""
        if not self._sequence_parallel:
            return slice(0, length)
        part = length // parallel_state.get_tensor_model_parallel_world_size()
        start = part * parallel_state.get_tensor_model_parallel_rank()
        return slice(start, start + part)

    def choose(self, place: _Place, own: torch.Tensor) -> torch.Tensor:
        """The experts [tokens, topk] that a router is to take, given those that it would."""
        if not self._inside:
            return place.pending.popleft() if place.pending else own
        chosen = own if place.target is None else torch.where(place.target[:, :1] == OWN_CHOICE, own, place.target)
        place.choice = chosen
        if self._keeps:
            place.pending.append(chosen)
        return chosen


class _ReplayedRouter:
    """What megatron's top-k routing asks instead of torch.topk."""

    def __init__(self, replay: RoutingReplay, place: _Place):
        self._replay, self._place = replay, place

    def get_replay_topk(
        self, scores: torch.Tensor, topk: int, num_groups: int | None, group_topk: int | None, default_compute_topk
    ):
        """(scores [tokens, topk] of the chosen experts, the experts)."""
        values, own = default_compute_topk(scores, topk, num_groups, group_topk)
        chosen = self._replay.choose(self._place, own)
        return (values, own) if chosen is own else (scores.gather(1, chosen), chosen)
