"""Forward and backward over one train step's micro-batches, and what is reported about them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from slime_like.algorithms.loss_plugins import load_loss_plugins
from slime_like.algorithms.policy_losses import LossBatch
from slime_like.config.run import RunConfig
from slime_like.errors import RunError
from slime_like.megatron_backend.model.provider import unwrap
from slime_like.megatron_backend.step.balancing import has_balancing_loss, take_balancing_loss
from slime_like.megatron_backend.step.batch import Scores, StepBatch
from slime_like.megatron_backend.step.context_parallel import whole
from slime_like.megatron_backend.step.forward import Scoring, device_of, log_probs_and_entropy, run_model
from slime_like.megatron_backend.step.loss_spec import LossSpec
from slime_like.megatron_backend.step.objective import TOKEN_MEANS, LossParts, Objective
from slime_like.megatron_backend.step.packing import PackedBatch, laid_out_as
from slime_like.megatron_backend.step.routing_replay import Routing, RoutingReplay
from slime_like.megatron_backend.verbs import Outputs


class StepRunner:
    """Runs one model over packed micro-batches: scores only, or loss and gradients.

    Means are over the global batch: the same on every layout and however micro-batches are cut.
    """

    #: What a pass says of each token.
    scores: tuple[str, ...] = ("log_probs", "entropy")

    def __init__(self, config: RunConfig, model: Sequence[torch.nn.Module], *, replay: RoutingReplay | None = None):
        """model: this rank's chunks. replay: of a policy that trains with the experts of another pass."""
        self.model = list(model)
        self.loss = config.loss
        self._objective = Objective(config.loss, load_loss_plugins(config.loss), config.plugin_args())
        self._replay = replay
        self._device = device_of(unwrap(model))
        self._scoring = Scoring(
            vocab_size=config.model.vocab_size,
            # supervised answers were not sampled
            temperature=1.0 if config.is_sft else config.rollout.rollout_temperature,
            chunk_tokens=config.batch.log_probs_chunk_tokens(on_gpu=self._device.type == "cuda"),
        )
        self._balanced_model = config.model if has_balancing_loss(config.model) else None

    @contextlib.contextmanager
    def at_temperature(self, temperature: float | None) -> Iterator[None]:
        """Score at another temperature than the rollouts' inside the block; None: the same."""
        before = self._scoring
        self._scoring = before if temperature is None else dataclasses.replace(before, temperature=temperature)
        try:
            yield
        finally:
            self._scoring = before

    @torch.no_grad()
    def forward(self, batch: StepBatch, *, routing: Routing = Routing.OWN) -> Outputs:
        """`scores` under the present weights; no gradients.

        routing: REPLAY for the policy itself, OWN for other weights swapped in.
        """
        return Outputs(batch=batch, scores=self._forward(batch, routing, None))

    @torch.no_grad()
    def forward_recording(self, batch: StepBatch) -> Outputs:
        """As forward, for the policy; the batch comes back with the experts that its routers chose, where train steps
        are to replay these.
        """
        if self._replay is None or not self._replay.records:
            return self.forward(batch, routing=Routing.REPLAY)
        recorded: list[dict[int, torch.Tensor]] = [{} for _ in batch.packs]
        # in the packs that are trained on
        scores = self._forward(dataclasses.replace(batch, scoring_packs=None), Routing.RECORD, recorded)
        packs = [
            dataclasses.replace(p, routed_experts=self._replay.as_routed_experts(p, r))
            for p, r in zip(batch.packs, recorded, strict=True)
        ]
        return Outputs(batch=dataclasses.replace(batch, packs=tuple(packs)), scores=scores)

    def _forward(self, batch: StepBatch, routing: Routing, recorded: list[dict] | None) -> dict[str, Scores]:
        wide = batch if batch.scoring_packs is None else dataclasses.replace(batch, packs=batch.scoring_packs)

        def collect(outputs, pack_: PackedBatch, non_loss_data: bool = True):
            return self._score(outputs, pack_)

        scores = self._run(wide, collect, forward_only=True, routing=routing, recorded=recorded)
        columns = self._columns(scores)
        if wide is batch:
            return columns
        return {
            name: None if rows is None else laid_out_as(batch.packs, rows, wide.packs) for name, rows in columns.items()
        }

    def _columns(self, scores: Sequence[dict[str, torch.Tensor]]) -> dict[str, Scores]:
        is_last = parallel_state.is_pipeline_last_stage()
        return {name: [part[name] for part in scores] if is_last else None for name in self.scores}

    def forward_backward(self, batch: StepBatch, loss: LossSpec) -> Outputs:
        """Add one loss's gradients to the buffers (not yet summed over ranks); gives metrics and `scores`."""
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
        scores = self._columns([scores for *_, scores in outputs])
        return Outputs(batch=batch, scores=scores, metrics=self._metrics(self._reduce(outputs, batch), batch))

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
            reference_log_probs=log_probs.detach() if batch.own_reference else batch.column("reference", index),
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
        replay, position = self._replay, {id(p): i for i, p in enumerate(batch.packs)}

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
        log_probs, entropy = log_probs_and_entropy(outputs, pack_.targets, self._scoring, pack_.predictions)
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
        shared = [metrics]  # the names, too: a user's function may add some
        if parallel_state.get_pipeline_model_parallel_world_size() > 1:
            last, group = (
                parallel_state.get_pipeline_model_parallel_last_rank(),
                parallel_state.get_pipeline_model_parallel_group(),
            )
            torch.distributed.broadcast_object_list(shared, last, group=group)
        return shared[0]

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
