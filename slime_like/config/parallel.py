"""How the trainer is split over GPUs. Flag names are Megatron's."""

from __future__ import annotations

import dataclasses
from typing import Protocol

from slime_like.config.base import flag
from slime_like.config.bounds import LONGEST_WAIT_S


class Architecture(Protocol):
    """What the split needs to know of a model; a ModelConfig does."""

    @property
    def is_known(self) -> bool:
        """Whether it is known at all."""

    @property
    def num_layers(self) -> int:
        """Transformer layers."""

    @property
    def num_attention_heads(self) -> int:
        """Query heads."""

    @property
    def num_experts(self) -> int:
        """Experts of a layer; 0 if it has none."""

    @property
    def moe_ffn_hidden_size(self) -> int | None:
        """Channels inside an expert."""

    @property
    def moe_shared_expert_intermediate_size(self) -> int | None:
        """Channels inside the shared experts."""

    @property
    def multi_latent_attention(self) -> bool:
        """Whether keys and values are compressed."""

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads, whether grouped or not."""

    @property
    def mlp_size(self) -> int:
        """Channels inside the MLP."""


#: Sizes and counts that must be at least 1 where given.
_COUNTS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "recompute_num_layers",
    "num_virtual_stages_per_pipeline_rank",
    "num_layers_per_virtual_pipeline_stage",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the trainer is split over GPUs (Megatron's names)"""

    tensor_model_parallel_size: int = flag(1, help="GPUs that share each layer's matrices.", least=1, most=1_000_000)
    pipeline_model_parallel_size: int = flag(1, help="GPUs that share the layers.", least=1, most=1_000_000)
    decoder_first_pipeline_num_layers: int | None = flag(
        None,
        help="Layers of the first pipeline stage. Default: as many as the others have.",
        least=1,
        most=10_000,
    )
    decoder_last_pipeline_num_layers: int | None = flag(
        None,
        help="Layers of the last pipeline stage. Default: as many as the others have.",
        least=1,
        most=10_000,
    )
    num_virtual_stages_per_pipeline_rank: int | None = flag(
        None,
        help=(
            "Interleaved pipeline: cut each stage's layers into this many chunks, which are dealt out in turn; shorter"
            " bubbles, more messages."
        ),
        least=1,
        most=10_000,
    )
    num_layers_per_virtual_pipeline_stage: int | None = flag(
        None,
        help="Interleaved pipeline: layers of a chunk, instead of the number of chunks.",
        least=1,
        most=10_000,
    )
    context_parallel_size: int = flag(1, help="GPUs that share one sequence.", least=1, most=1_000_000)
    expert_model_parallel_size: int = flag(1, help="GPUs that share the experts.", least=1, most=1_000_000)
    expert_tensor_parallel_size: int | None = flag(
        None,
        help="Tensor parallel size inside the experts. Default: --tensor-model-parallel-size.",
        least=1,
        most=1_000_000,
    )
    sequence_parallel: bool = flag(False, help="Split activations over the tensor parallel GPUs between the matrices.")
    use_distributed_optimizer: bool = flag(True, help="Split optimizer state over data parallel ranks.")
    overlap_grad_reduce: bool = flag(False, help="Reduce gradients while the backward pass still runs.")
    overlap_param_gather: bool = flag(
        False, help="Gather weights while the forward pass already runs; with --overlap-grad-reduce."
    )
    recompute_granularity: str | None = flag(
        None,
        choices=("full", "selective"),
        help="Compute activations again in the backward pass: of whole layers, or of attention only.",
    )
    recompute_method: str | None = flag(
        None, choices=("uniform", "block"), help="With full: all layers in chunks, or only the first of each stage."
    )
    recompute_num_layers: int | None = flag(
        None,
        help="With full: layers of a chunk (uniform), or layers recomputed per stage (block).",
        least=1,
        most=10_000,
    )
    distributed_timeout_minutes: int = flag(10, help="Deadline of a collective.", least=1, most=525_600)
    train_timeout_s: float = flag(
        3600.0,
        help="Deadline for the trainer to answer: training on one rollout, or saving, in seconds.",
        above=0,
        most=LONGEST_WAIT_S,
    )

    trainer_hang_timeout_s: float = flag(
        300.0,
        help=(
            "A training rank whose process gives no sign of life for so long, in seconds, is lost: it is stopped, or"
            " its machine hangs. Longer than any call that lets no other thread of its process run. 0: nobody looks."
        ),
        least=0,
        most=LONGEST_WAIT_S,
    )

    @property
    def model_parallel_size(self) -> int:
        """GPUs that hold one copy of the model."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    @property
    def expert_tp_size(self) -> int:
        """Tensor parallel size inside the experts."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    @property
    def expert_parallel_block(self) -> int:
        """GPUs that hold one copy of the experts of every stage: expert tensor x expert x pipeline parallel size."""
        return self.expert_tp_size * self.expert_model_parallel_size * self.pipeline_model_parallel_size

    def layers_per_stage(self, num_layers: int) -> list[int]:
        """Layers of each pipeline stage; the sum is num_layers. Raises ValueError if they cannot be dealt out.

        Megatron's rule (transformer_block.get_num_layers_to_build): what the first and last stage do not take by their
        flags is dealt out evenly to the other stages.
        Example: 61 layers, 4 stages, 13 in the last -> [16, 16, 16, 13].
        """
        stages = self.pipeline_model_parallel_size
        first, last = self.decoder_first_pipeline_num_layers, self.decoder_last_pipeline_num_layers
        if stages == 1:
            if any(count not in (None, num_layers) for count in (first, last)):
                raise ValueError(
                    f"one pipeline stage has all {num_layers} layers: drop --decoder-first-pipeline-num-layers and "
                    "--decoder-last-pipeline-num-layers, or raise --pipeline-model-parallel-size"
                )
            return [num_layers]
        left, middle = num_layers - (first or 0) - (last or 0), stages - (first is not None) - (last is not None)
        flags = (
            f"--pipeline-model-parallel-size {stages}"
            + (f", --decoder-first-pipeline-num-layers {first}" if first is not None else "")
            + (f", --decoder-last-pipeline-num-layers {last}" if last is not None else "")
        )
        if left < middle or left % max(middle, 1) or (not middle and left):
            if first is None and last is None:
                raise ValueError(
                    f"{num_layers} layers do not divide by {flags}. Fix: another size, or give the last stage fewer or"
                    " more layers with --decoder-last-pipeline-num-layers"
                )
            raise ValueError(
                f"{num_layers} layers leave {left} for {middle} stages between the given ones, which is not an equal"
                f" number each: {flags}"
            )
        even = left // middle if middle else 0
        counts = [even] * stages
        if first is not None:
            counts[0] = first
        if last is not None:
            counts[-1] = last
        return counts

    def virtual_pipeline_size(self, num_layers: int) -> int | None:
        """Chunks of layers on each pipeline stage; None if the pipeline is not interleaved.

        Raises ValueError if a stage does not divide.
        Megatron's rule (TransformerConfig): every stage's layers divide into the same number of chunks.
        """
        chunks, layers = self.num_virtual_stages_per_pipeline_rank, self.num_layers_per_virtual_pipeline_stage
        if chunks in (None, 1) and layers is None:
            return None
        counts = self.layers_per_stage(num_layers)
        if layers is not None:
            flag_text = f"--num-layers-per-virtual-pipeline-stage {layers}"
            if len(set(counts)) > 1:
                raise ValueError(
                    f"{flag_text} needs as many layers on every stage, not {counts}. Fix:"
                    " --num-virtual-stages-per-pipeline-rank"
                )
            if counts[0] % layers:
                raise ValueError(f"{flag_text} does not divide a stage's {counts[0]} layers")
            return counts[0] // layers if counts[0] > layers else None
        assert chunks is not None, "one of the two flags is given"
        if any(count % chunks for count in counts):
            raise ValueError(
                f"--num-virtual-stages-per-pipeline-rank {chunks} does not divide every stage's layers: {counts}"
            )
        return chunks

    def chunks_of_stage(self, num_layers: int, stage: int) -> list[range]:
        """The whole model's numbers of the layers in each chunk of a pipeline stage.

        Raises ValueError if they cannot be dealt out.
        Chunk c of all stages lies before chunk c + 1 of any (arXiv:2104.04473, sec. 2.2).
        Example: 8 layers, 2 stages, 2 chunks, stage 1 -> [range(2, 4), range(6, 8)].
        """
        number = self.virtual_pipeline_size(num_layers) or 1
        sizes = [count // number for count in self.layers_per_stage(num_layers)]
        starts = [chunk * sum(sizes) + sum(sizes[:stage]) for chunk in range(number)]
        return [range(start, start + sizes[stage]) for start in starts]

    def problems(self, model: Architecture) -> list[str]:
        """What is impossible about the split."""
        problems = []
        tensor = self.tensor_model_parallel_size
        for name in _COUNTS:
            if getattr(self, name) is not None and getattr(self, name) < 1:
                problems.append(f"--{name.replace('_', '-')} {getattr(self, name)}: must be at least 1.")
        problems += self._recompute_problems()
        if self.overlap_param_gather and not (self.overlap_grad_reduce and self.use_distributed_optimizer):
            problems.append("--overlap-param-gather needs --overlap-grad-reduce and --use-distributed-optimizer.")
        problems += self._interleaving_problems()
        if problems or not model.is_known:
            return problems
        for what, count in (
            ("query heads", model.num_attention_heads),
            ("key/value heads", model.num_kv_heads),
            ("MLP channels", model.mlp_size),
        ):
            if count % tensor:
                problems.append(f"{count} {what} do not divide by --tensor-model-parallel-size {tensor}.")
        if model.multi_latent_attention and tensor > 1 and not self.sequence_parallel:
            # Without it Megatron (0.16.1) leaves the gradient of the key channels that all heads share unsummed over
            # the ranks.
            problems.append(
                "--multi-latent-attention with --tensor-model-parallel-size above 1 needs --sequence-parallel."
            )
        try:
            self.chunks_of_stage(model.num_layers, 0)
        except ValueError as error:
            problems.append(f"{error}.")
        return problems + self._expert_problems(model)

    def _interleaving_problems(self) -> list[str]:
        names = ("num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage")
        flags = [
            f"--{name.replace('_', '-')} {getattr(self, name)}" for name in names if getattr(self, name) is not None
        ]
        if len(flags) > 1:
            return [f"{' and '.join(flags)} say the same in two ways. Fix: one of them."]
        if flags and self.pipeline_model_parallel_size == 1:
            return [f"{flags[0]} needs --pipeline-model-parallel-size above 1. Fix: raise it, or drop this."]
        return []

    def _recompute_problems(self) -> list[str]:
        if self.recompute_granularity == "full" and not (self.recompute_method and self.recompute_num_layers):
            return [
                (
                    "--recompute-granularity full needs --recompute-method and --recompute-num-layers. Fix: uniform"
                    " and 1 save the most memory."
                )
            ]
        if self.recompute_granularity != "full" and (self.recompute_method or self.recompute_num_layers):
            return [
                (
                    "--recompute-method and --recompute-num-layers are for --recompute-granularity full. Fix: give"
                    " that, or drop them."
                )
            ]
        return []

    def _expert_problems(self, model: Architecture) -> list[str]:
        experts, size = model.num_experts, self.expert_model_parallel_size
        if not experts:
            sizes = {
                "--expert-model-parallel-size": size,
                "--expert-tensor-parallel-size": self.expert_tensor_parallel_size or 1,
            }
            return [
                f"{name} {value} needs a model with experts (--num-experts). Fix: 1."
                for name, value in sizes.items()
                if value > 1
            ]
        problems = []
        if experts % size:
            problems.append(f"{experts} experts do not divide by --expert-model-parallel-size {size}.")
        for flag_name, channels in (
            ("--moe-ffn-hidden-size", model.moe_ffn_hidden_size or model.mlp_size),
            ("--moe-shared-expert-intermediate-size", model.moe_shared_expert_intermediate_size or 0),
        ):
            tensor = self.tensor_model_parallel_size if "shared" in flag_name else self.expert_tp_size
            if channels % tensor:
                problems.append(
                    f"{flag_name} {channels} does not divide by the tensor parallel size {tensor} of the experts."
                )
        if size == 1 and self.expert_tp_size < self.tensor_model_parallel_size:
            # 0.16.1 then keeps the experts in the dense gradient buffers (ColumnParallelLinear's `allreduce`), which
            # are summed over other ranks.
            problems.append(
                f"--expert-tensor-parallel-size {self.expert_tp_size} below --tensor-model-parallel-size"
                f" {self.tensor_model_parallel_size} needs --expert-model-parallel-size above 1: without it Megatron"
                " does not sum the experts' gradients over the ranks that hold them, and trains wrongly without a"
                " word. Fix: --expert-model-parallel-size 2, or the same size for both."
            )
        if self.expert_tp_size > 1 and self.tensor_model_parallel_size == 1:
            problems.append(
                f"--expert-tensor-parallel-size {self.expert_tp_size} needs --tensor-model-parallel-size above 1."
            )
        if self.tensor_model_parallel_size > 1 and not self.sequence_parallel:
            problems.append(
                "experts with --tensor-model-parallel-size above 1 need --sequence-parallel (Megatron refuses it"
                " otherwise)."
            )
        return problems
