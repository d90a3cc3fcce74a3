"""Forward and backward over one train step's micro-batches, and what is reported about them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from slime_like.algorithms.flops import forward_flops
from slime_like.algorithms.micro_batches import plan_micro_batches
from slime_like.algorithms.plugins import load_loss_plugins
from slime_like.algorithms.policy_losses import LossBatch
from slime_like.algorithms.reduce import checked_weights, token_weights
from slime_like.config.base import PluginArgs
from slime_like.config.batch import BatchConfig
from slime_like.config.loss import LossConfig
from slime_like.config.model import ModelConfig
from slime_like.config.parallel import ParallelConfig
from slime_like.errors import DataError, RunError
from slime_like.megatron_backend.model.provider import unwrap
from slime_like.megatron_backend.step.balancing import has_balancing_loss, take_balancing_loss
from slime_like.megatron_backend.step.context_parallel import ContextShare, whole
from slime_like.megatron_backend.step.forward import Scoring, device_of, log_probs_and_entropy, run_model
from slime_like.megatron_backend.step.loss_spec import LossSpec
from slime_like.megatron_backend.step.objective import TOKEN_MEANS, LossParts, Objective
from slime_like.megatron_backend.step.packing import PackedBatch, PackLayout, laid_out_as, num_trained_tokens, pack
from slime_like.megatron_backend.step.routing_replay import Routing, RoutingReplay
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
    #: [K] a pack: what tokens weigh in the policy loss; None: the packs' own weights
    policy_weights: tuple[torch.Tensor, ...] | None = None
    picked: tuple[torch.Tensor, ...] | None = None  # [K] a pack: LossBatch.picked
    #: the same samples in larger packs, for passes without gradients; None: packs
    scoring_packs: tuple[PackedBatch, ...] | None = None
    #: What a loss compares with, a number a token, [T] a pack in predicting layout. old: log-probs before the rollout's
    #: first step (without them the present ones, detached); reference, teacher: theirs, for the KL loss and to measure
    #: the distillation; values, returns: a critic's.
    columns: Mapping[str, Sequence[torch.Tensor]] = dataclasses.field(default_factory=dict)

    def with_columns(self, **columns: Scores) -> StepBatch:
        """The batch with more columns; one that is None, as on stages without logits, is left out."""
        return dataclasses.replace(
            self, columns={**self.columns, **{name: rows for name, rows in columns.items() if rows is not None}}
        )

    def column(self, name: str, index: int) -> torch.Tensor | None:
        """A column's numbers at the trained tokens of one micro-batch, [K]."""
        rows = self.columns.get(name)
        return None if rows is None else rows[index][self.packs[index].trained]


class StepRunner:
    """Runs one model over packed micro-batches: scores only, or loss and gradients.

    Means are over the global batch: the same on every layout and however micro-batches are cut.
    """

    #: What a pass says of each token.
    scores: tuple[str, ...] = ("log_probs", "entropy")

    def __init__(
        self,
        model: Sequence[torch.nn.Module],
        *,
        model_config: ModelConfig,
        parallel: ParallelConfig,
        batch: BatchConfig,
        loss: LossConfig,
        temperature: float,
        plugin_args: PluginArgs | None = None,
    ):
        self.model = list(model)
        self.loss = loss
        self._plugins, self._plugin_args = load_loss_plugins(loss), plugin_args
        self._objective = Objective(loss, self._plugins, plugin_args)
        # set by who owns a policy that trains with the experts of another pass
        self.replay: RoutingReplay | None = None
        self._batch = batch
        self._flops = forward_flops(model_config) if batch.balance_by_flops else None
        self._device = device_of(unwrap(model))
        chunk = batch.log_probs_chunk_tokens(on_gpu=self._device.type == "cuda")
        self._scoring = Scoring(vocab_size=model_config.vocab_size, temperature=temperature, chunk_tokens=chunk)
        padded = parallel.sequence_parallel or batch.data_pad_size_multiplier > 1
        multiple = parallel.tensor_model_parallel_size * batch.data_pad_size_multiplier if padded else 1
        self._layout = PackLayout(padded=batch.qkv_format == "bshd", multiple=multiple)
        self._balanced_model = model_config if has_balancing_loss(model_config) else None

    @contextlib.contextmanager
    def at_temperature(self, temperature: float | None) -> Iterator[None]:
        """Score at another temperature than the rollouts' inside the block; None: the same."""
        before = self._scoring
        self._scoring = before if temperature is None else dataclasses.replace(before, temperature=temperature)
        try:
            yield
        finally:
            self._scoring = before

    def prepare(self, samples: Sequence[TrainSample]) -> StepBatch:
        """Cut one train step's samples (the same list on every rank) and keep this rank's part.

        Raises DataError for a sample of one token or none.
        """
        lengths = [len(s.tokens) for s in samples]
        if not lengths or min(lengths) < 2:
            short = [f"{s.prompt_index}/{s.sample_index}" for s in samples if len(s.tokens) < 2]
            raise DataError(
                f"a train step needs samples of at least 2 tokens; too short are {short or 'all (there are none)'}."
            )
        if self.replay is not None:
            self.replay.check(samples)
        trained = [num_trained_tokens(s) for s in samples]
        rollouts = [(s.prompt_index, s.sample_index) for s in samples]
        weights = token_weights(
            trained, reduction=self.loss.reduction, rollouts=rollouts, divisor=self.loss.loss_divisor
        )
        share = ContextShare.of_this_rank()

        def packed(tokens_per_gpu: int | None) -> tuple[PackedBatch, ...]:
            mine = self._plan(lengths, share, tokens_per_gpu)
            layout = self._layout
            if len(self.model) > 1:
                # The interleaved schedule knows one shape for all micro-batches (model/provider.py says why).
                layout = layout.holding([[lengths[i] for i in indices] for indices in mine], share)
            return tuple(
                pack(samples, indices, weights, layout=layout, device=self._device, context=share) for indices in mine
            )

        limit, scoring_limit = self._batch.max_tokens_per_gpu, self._batch.log_probs_max_tokens_per_gpu
        packs = packed(limit)
        return StepBatch(
            packs=packs,
            policy_weights=self._policy_weights(samples, packs),
            num_samples=len(samples),
            num_tokens=sum(lengths),
            num_trained_tokens=sum(trained),
            scoring_packs=packed(scoring_limit) if scoring_limit not in (None, limit) else None,
        )

    def _policy_weights(
        self, samples: Sequence[TrainSample], packs: Sequence[PackedBatch]
    ) -> tuple[torch.Tensor, ...] | None:
        """What trained tokens weigh in the policy loss, [K] a pack, as the user's reducer says of the whole train step.

        None without one.
        """
        if self._plugins.pg_reducer is None:
            return None
        given = self._plugins.pg_reducer(self._plugin_args, list(samples))
        weights = checked_weights(given, len(samples), str(self.loss.custom_pg_loss_reducer_function_path))
        each = [
            torch.as_tensor(weights[list(p.samples)], dtype=torch.float32, device=self._device)[p.sample_of_token]
            for p in packs
        ]
        return tuple(row * p.own_weights for row, p in zip(each, packs, strict=True))

    def _plan(
        self, lengths: Sequence[int], share: ContextShare, tokens_per_gpu: int | None
    ) -> Sequence[tuple[int, ...]]:
        """This data parallel rank's micro-batches: positions of samples.

        Which samples it gets does not depend on tokens_per_gpu.
        """
        # Context parallel ranks share each pack, padding included: together they hold as many times the tokens of one
        # GPU.
        batch = dataclasses.replace(self._batch, max_tokens_per_gpu=tokens_per_gpu and tokens_per_gpu * share.size)
        plan = plan_micro_batches(
            [share.padded(length) for length in lengths],
            data_parallel_size=parallel_state.get_data_parallel_world_size(),
            batch=batch,
            # Megatron's condition for the interleaved schedule.
            count_multiple=parallel_state.get_pipeline_model_parallel_world_size() if len(self.model) > 1 else 1,
            costs=[self._flops.of(length) for length in lengths] if self._flops else None,
        )
        return plan[parallel_state.get_data_parallel_rank()]

    @torch.no_grad()
    def forward(self, batch: StepBatch, *, routing: Routing = Routing.OWN) -> dict[str, Scores]:
        """`scores` under the present weights; no gradients.

        routing: REPLAY for the policy itself, OWN for other weights swapped in.
        """
        return self._forward(batch, routing, None)

    @torch.no_grad()
    def forward_recording(self, batch: StepBatch) -> tuple[dict[str, Scores], StepBatch]:
        """As forward, for the policy; the batch comes back with the experts that its routers chose, where train steps
        are to replay these.
        """
        if self.replay is None or not self.replay.records:
            return self._forward(batch, Routing.REPLAY, None), batch
        recorded: list[dict[int, torch.Tensor]] = [{} for _ in batch.packs]
        # in the packs that are trained on
        scores = self._forward(dataclasses.replace(batch, scoring_packs=None), Routing.RECORD, recorded)
        packs = [
            dataclasses.replace(p, routed_experts=self.replay.as_routed_experts(p, r))
            for p, r in zip(batch.packs, recorded, strict=True)
        ]
        return scores, dataclasses.replace(batch, packs=tuple(packs))

    def _forward(self, batch: StepBatch, routing: Routing, recorded: list[dict] | None) -> dict[str, Scores]:
        wide = batch if batch.scoring_packs is None else dataclasses.replace(batch, packs=batch.scoring_packs)

        def collect(outputs, pack_: PackedBatch, non_loss_data: bool = True):
            return self._score(outputs, pack_)

        found = self._run(wide, collect, forward_only=True, routing=routing, recorded=recorded)
        columns = self._columns(found)
        if wide is batch:
            return columns
        return {
            name: None if rows is None else laid_out_as(batch.packs, rows, wide.packs) for name, rows in columns.items()
        }

    def _columns(self, scores: Sequence[dict[str, torch.Tensor]]) -> dict[str, Scores]:
        is_last = parallel_state.is_pipeline_last_stage()
        return {name: [part[name] for part in scores] if is_last else None for name in self.scores}

    def forward_backward(self, batch: StepBatch, loss: LossSpec) -> tuple[dict[str, float], dict[str, Scores]]:
        """Add one loss's gradients to the buffers (not yet summed over ranks).

        Returns metrics, equal on every rank, and `scores`.
        """
        scale = parallel_state.get_data_parallel_world_size() * len(batch.packs)
        position = {id(p): i for i, p in enumerate(batch.packs)}

        def loss_function(outputs, pack_: PackedBatch):
            scores = self._score(outputs, pack_)
            parts = self._loss_parts(scores, batch, position[id(pack_)], loss)
            # The schedule divides by the number of micro-batches (in place), data parallel averaging by the number of
            # ranks. That these include the context parallel ones, whose gradients are to be summed, the schedule makes
            # good.
            return parts.loss * scale, (parts.sums, parts.maxima, {name: row.detach() for name, row in scores.items()})

        outputs = self._run(batch, loss_function, forward_only=False, routing=Routing.REPLAY)
        return self._metrics(self._reduce(outputs, batch), batch), self._columns([scores for *_, scores in outputs])

    def _metrics(self, sums: dict[str, float], batch: StepBatch) -> dict[str, float]:
        if self._balanced_model is None:
            return sums
        return sums | {"train/moe_aux_loss": take_balancing_loss(self._balanced_model, len(batch.packs), self._device)}

    def _loss_parts(self, scores: dict[str, torch.Tensor], batch: StepBatch, index: int, loss: LossSpec) -> LossParts:
        """One micro-batch's share: of the configured mean, or of a sum."""
        pack_ = batch.packs[index]
        log_probs, entropy = (scores[name][pack_.trained] for name in ("log_probs", "entropy"))
        if not loss.is_configured:
            return loss(self._loss_batch(log_probs, entropy, batch, index, pack_.own_weights, pack_.own_weights))
        policy_weights = pack_.weights if batch.policy_weights is None else batch.policy_weights[index]
        return self._objective(self._loss_batch(log_probs, entropy, batch, index, pack_.weights, policy_weights))

    def _loss_batch(self, log_probs, entropy, batch: StepBatch, index: int, weights, policy_weights) -> LossBatch:
        pack_, old, teacher = batch.packs[index], batch.column("old", index), batch.column("teacher", index)
        trainer = log_probs.detach() if old is None else old
        return LossBatch(
            log_probs=log_probs,
            entropy=entropy,
            old_log_probs=pack_.engine_logprobs if self.loss.use_rollout_logprobs else trainer,
            trainer_log_probs=trainer,
            engine_log_probs=pack_.engine_logprobs,
            advantages=pack_.advantages,
            sample_of_token=pack_.sample_of_token,
            weights=weights,
            policy_weights=policy_weights,
            reference_log_probs=batch.column("reference", index),
            distillation=None if teacher is None else trainer - teacher,
            picked=None if batch.picked is None else batch.picked[index],
            metadata=pack_.metadata,
        )

    def _run(
        self,
        batch: StepBatch,
        loss_function,
        *,
        forward_only: bool,
        routing: Routing = Routing.OWN,
        recorded: list[dict] | None = None,
    ) -> list:
        replay, position = self.replay, {id(p): i for i, p in enumerate(batch.packs)}

        def routed(model, pack_: PackedBatch):
            if replay is None:
                return run_model(model, pack_)
            with replay.forward(pack_, routing, backward_follows=not forward_only) as choices:
                output = run_model(model, pack_)
            if recorded is not None:
                recorded[position[id(pack_)]].update(choices)  # one chunk of the stage after the other
            return output

        def forward_step(packs, model):
            pack_ = next(packs)
            return routed(model, pack_), lambda logits, **kwargs: loss_function(logits, pack_, **kwargs)

        outputs = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(batch.packs) for _ in self.model],
            model=self.model,
            num_microbatches=len(batch.packs),
            # Looked at by the interleaved schedule only; elsewhere the stages tell each other the shapes.
            seq_length=batch.packs[0].tokens.size(1) * parallel_state.get_context_parallel_world_size(),
            micro_batch_size=batch.packs[0].tokens.size(0),
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
        if replay is not None:
            replay.clear()
        return outputs

    def _score(self, outputs: torch.Tensor, pack_: PackedBatch) -> dict[str, torch.Tensor]:
        """`scores` of one micro-batch from the model's output, [T] each in predicting layout."""
        log_probs, entropy = log_probs_and_entropy(outputs, pack_.targets, self._scoring)
        return {"log_probs": whole(log_probs, pack_.restoring), "entropy": whole(entropy, pack_.restoring)}

    def _reduce(self, outputs: list, batch: StepBatch) -> dict[str, float]:
        """Add up micro-batches and data parallel ranks on the last stage, then tell every stage.

        outputs: (sums, maxima, …) of each micro-batch.
        """
        metrics: dict[str, float] = {}
        if parallel_state.is_pipeline_last_stage():
            for place, operation in enumerate((torch.distributed.ReduceOp.SUM, torch.distributed.ReduceOp.MAX)):
                metrics |= self._over_data_ranks([output[place] for output in outputs], operation)
            for name in outputs[0][0]:
                if name.startswith(TOKEN_MEANS):
                    metrics[name] /= max(batch.num_trained_tokens, 1)
        told = [metrics]  # the names, too: a user's function may add some
        if parallel_state.get_pipeline_model_parallel_world_size() > 1:
            last, group = (
                parallel_state.get_pipeline_model_parallel_last_rank(),
                parallel_state.get_pipeline_model_parallel_group(),
            )
            torch.distributed.broadcast_object_list(told, last, group=group)
        return told[0]

    def _over_data_ranks(self, parts: Sequence[dict[str, torch.Tensor]], operation) -> dict[str, float]:
        """Sums or maxima of scalars by name, over all micro-batches of all data parallel ranks.

        Raises RunError if micro-batches differ in their names.
        """
        names = list(parts[0])
        if any(set(part) != set(names) for part in parts):
            raise RunError(
                f"metrics differ from micro-batch to micro-batch: {sorted({name for part in parts for name in part})}."
                " Fix: your loss function."
            )
        if not names:
            return {}
        rows = torch.stack(
            [torch.stack([part[name] for name in names]).to(self._device, torch.float64) for part in parts]
        )
        total = rows[0]
        for row in rows[1:]:
            total = total + row if operation == torch.distributed.ReduceOp.SUM else torch.maximum(total, row)
        total = total.contiguous()
        torch.distributed.all_reduce(total, op=operation, group=parallel_state.get_data_parallel_group())
        return dict(zip(names, total.tolist(), strict=True))
