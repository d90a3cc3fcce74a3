"""One train step's records -> this rank's micro-batches, cut and packed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from megatron.core import parallel_state

from slime_like.algorithms.flops import forward_flops
from slime_like.algorithms.loss_plugins import load_loss_plugins
from slime_like.algorithms.micro_batches import plan_micro_batches
from slime_like.algorithms.reduce import checked_weights, token_weights
from slime_like.algorithms.shared_batches import plan_shared_micro_batches
from slime_like.algorithms.shared_prompts import LEAST_SAVED, PromptGroup, prompt_groups, saved, shared_row
from slime_like.config.batch import BatchConfig
from slime_like.config.run import RunConfig
from slime_like.config.share_prompt import shares_prompts
from slime_like.errors import DataError
from slime_like.megatron_backend.compat.transformer_engine import uses_transformer_engine
from slime_like.megatron_backend.step.context_parallel import ContextShare
from slime_like.megatron_backend.step.packing import PackedBatch, PackLayout, num_trained_tokens, pack
from slime_like.megatron_backend.step.routing_replay import RoutingReplay
from slime_like.megatron_backend.step.shared_packing import pack_shared
from slime_like.records import TrainSample

#: A number a token, for each micro-batch in predicting layout [T]; None on pipeline stages that have no logits.
Scores = list[torch.Tensor] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepBatch:
    """This data parallel rank's micro-batches of one train step, and the whole step's size."""

    packs: tuple[PackedBatch, ...]
    num_samples: int
    num_tokens: int
    num_trained_tokens: int
    num_computed_tokens: int  # fewer than num_tokens where samples share their prompts
    #: [K] a pack: what tokens weigh in the policy loss; None: the packs' own weights
    policy_weights: tuple[torch.Tensor, ...] | None = None
    picked: tuple[torch.Tensor, ...] | None = None  # [K] a pack: LossBatch.picked
    #: the same samples in larger packs, for passes without gradients; None: packs
    scoring_packs: tuple[PackedBatch, ...] | None = None
    #: What a loss compares with, a number a token, [T] a pack in predicting layout. old: log-probs before the rollout's
    #: first step (without them the present ones, detached); reference, teacher: theirs, for the KL loss and to measure
    #: the distillation; values, returns: a critic's.
    columns: Mapping[str, Sequence[torch.Tensor]] = dataclasses.field(default_factory=dict)
    #: The reference is still the policy: its log-probs are those of the training pass itself, detached.
    own_reference: bool = False

    def with_columns(self, **columns: Scores) -> StepBatch:
        """The batch with more columns; one that is None, as on stages without logits, is left out."""
        return dataclasses.replace(
            self, columns={**self.columns, **{name: rows for name, rows in columns.items() if rows is not None}}
        )

    def column(self, name: str, index: int) -> torch.Tensor | None:
        """A column's numbers at the trained tokens of one micro-batch, [K]."""
        rows = self.columns.get(name)
        return None if rows is None else rows[index][self.packs[index].trained]


#: What a verb is given: the records of one train step, the same list on every rank, or what StepCutter made of them.
Batch = Sequence[TrainSample] | StepBatch


class StepCutter:
    """Cuts a train step's records into micro-batches.

    Which samples a data parallel rank gets, and what each token weighs, does not depend on how they are cut.
    """

    def __init__(
        self, config: RunConfig, *, device: torch.device, num_chunks: int = 1, replay: RoutingReplay | None = None
    ):
        """num_chunks: of layers that this rank has, more than one with an interleaved pipeline. replay: checks what
        samples bring for it.
        """
        batch, parallel = config.batch, config.parallel
        self._batch, self._loss, self._device, self._num_chunks = batch, config.loss, device, num_chunks
        self._reducer, self._plugin_args = load_loss_plugins(config.loss).pg_reducer, config.plugin_args()
        self._replay = replay
        self._shares = shares_prompts(config) and _takes_branches(config)
        by_work = batch.use_dynamic_batch_size and batch.balance_by_flops is not False
        self._flops = forward_flops(config.model) if by_work else None
        padded = parallel.sequence_parallel or batch.data_pad_size_multiplier > 1
        multiple = parallel.tensor_model_parallel_size * batch.data_pad_size_multiplier if padded else 1
        self._layout = PackLayout(padded=batch.qkv_format == "bshd", multiple=multiple)

    def __call__(self, samples: Batch) -> StepBatch:
        """Cut one train step's samples (the same list on every rank) and keep this rank's part; what is cut already
        stays as it is.

        Raises DataError for a sample of one token or none.
        """
        if isinstance(samples, StepBatch):
            return samples
        lengths = [len(s.tokens) for s in samples]
        if not lengths or min(lengths) < 2:
            short = [f"{s.prompt_index}/{s.sample_index}" for s in samples if len(s.tokens) < 2]
            raise DataError(
                f"a train step needs samples of at least 2 tokens; too short are {short or 'all (there are none)'}."
            )
        if self._replay is not None:
            self._replay.check(samples)
        trained = [num_trained_tokens(s) for s in samples]
        rollouts = [(s.prompt_index, s.sample_index) for s in samples]
        weights = token_weights(
            trained, reduction=self._loss.reduction, rollouts=rollouts, divisor=self._loss.loss_divisor
        )
        groups = self._groups(samples)

        def packed(batch: BatchConfig) -> tuple[tuple[PackedBatch, ...], int]:
            if groups is None:
                return self._packed(samples, weights, batch), sum(lengths)
            assert batch.max_tokens_per_gpu, "prompts are shared in dynamic batches, which have a cap"
            return self._packed_shared(samples, groups, weights, batch.max_tokens_per_gpu)

        (packs, num_computed), scoring = packed(self._batch), self._batch.scoring
        return StepBatch(
            packs=packs,
            policy_weights=self._policy_weights(samples, packs),
            num_samples=len(samples),
            num_tokens=sum(lengths),
            num_computed_tokens=num_computed,
            num_trained_tokens=sum(trained),
            scoring_packs=packed(scoring)[0] if scoring != self._batch else None,
        )

    def _groups(self, samples: Sequence[TrainSample]) -> list[PromptGroup] | None:
        """The samples by prompt, where what they have in common is to be computed once; None: each by itself."""
        if not self._shares:
            return None
        groups = prompt_groups(samples)
        least = LEAST_SAVED if self._batch.share_prompt == "auto" else 0.0
        return groups if saved(groups) > least else None

    def _packed(
        self, samples: Sequence[TrainSample], weights: np.ndarray, batch: BatchConfig
    ) -> tuple[PackedBatch, ...]:
        share, lengths = ContextShare.of_this_rank(), [len(s.tokens) for s in samples]
        mine = self.plan(lengths, share, batch)
        layout = self.layout_of([[lengths[i] for i in indices] for indices in mine], share)
        return tuple(
            pack(samples, indices, weights, layout=layout, device=self._device, context=share) for indices in mine
        )

    def _packed_shared(
        self, samples: Sequence[TrainSample], groups: Sequence[PromptGroup], weights: np.ndarray, tokens_per_gpu: int
    ) -> tuple[tuple[PackedBatch, ...], int]:
        """(this data parallel rank's micro-batches, tokens that all ranks compute)."""
        flops = self._flops
        plan = plan_shared_micro_batches(
            groups,
            data_parallel_size=parallel_state.get_data_parallel_world_size(),
            most_tokens=tokens_per_gpu,
            cost=lambda group: group.tokens if flops is None else group.flops(flops),
            count_multiple=self._count_multiple(),
        )
        rows = [shared_row(units) for units in plan[parallel_state.get_data_parallel_rank()]]
        layout = self.layout_of([row.lengths for row in rows], ContextShare())
        packs = tuple(pack_shared(samples, row, weights, layout=layout, device=self._device) for row in rows)
        return packs, sum(unit.tokens for of_rank in plan for units in of_rank for unit in units)

    def _policy_weights(
        self, samples: Sequence[TrainSample], packs: Sequence[PackedBatch]
    ) -> tuple[torch.Tensor, ...] | None:
        """What trained tokens weigh in the policy loss, [K] a pack, as the user's reducer says of the whole train step.

        None without one.
        """
        if self._reducer is None:
            return None
        answer = self._reducer(self._plugin_args, list(samples))
        weights = checked_weights(answer, len(samples), str(self._loss.custom_pg_loss_reducer_function_path))
        each = [
            torch.as_tensor(weights[list(p.samples)], dtype=torch.float32, device=self._device)[p.sample_of_token]
            for p in packs
        ]
        return tuple(row * p.own_weights for row, p in zip(each, packs, strict=True))

    def layout_of(self, packs: Sequence[Sequence[int]], share: ContextShare) -> PackLayout:
        """How packs, given as lengths of their samples, lie in tensors."""
        # The interleaved schedule knows one shape for all micro-batches (model/provider.py says why).
        return self._layout.holding(packs, share) if self._num_chunks > 1 else self._layout

    def plan(self, lengths: Sequence[int], share: ContextShare, batch: BatchConfig) -> Sequence[tuple[int, ...]]:
        """This data parallel rank's micro-batches: positions of samples. batch: the config's, or its `scoring`.

        Which samples it gets does not depend on the sizes.
        """
        # Context parallel ranks share each pack, padding included: together they hold as many times the tokens of one
        # GPU.
        tokens = batch.max_tokens_per_gpu
        batch = dataclasses.replace(batch, max_tokens_per_gpu=tokens and tokens * share.size)
        plan = plan_micro_batches(
            [share.padded(length) for length in lengths],
            data_parallel_size=parallel_state.get_data_parallel_world_size(),
            batch=batch,
            count_multiple=self._count_multiple(),
            costs=[self._flops.of(length) for length in lengths] if self._flops else None,
        )
        return plan[parallel_state.get_data_parallel_rank()]

    def _count_multiple(self) -> int:
        """Megatron's condition for the interleaved schedule."""
        return parallel_state.get_pipeline_model_parallel_world_size() if self._num_chunks > 1 else 1


def _takes_branches(config: RunConfig) -> bool:
    """Whether the model's attention is ours, which sees packs as rows: with --share-prompt on it is, always."""
    asked = config.batch.share_prompt == "on"
    return asked or not config.model.is_known or not uses_transformer_engine(config.model.attention_backend)
