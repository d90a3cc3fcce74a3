"""A critic's last layer: one number a token in the place of the vocabulary."""

from __future__ import annotations

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig

#: The last layer's name among a stage's parameters, a critic's and a policy's.
OUTPUT_WEIGHT = "output_layer.weight"


class ValueHead(torch.nn.Module):
    """hidden -> 1, without bias, starting at 0, so that a fresh critic expects nothing.

    Whole on every tensor parallel rank.
    """

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        self._gathers = config.sequence_parallel
        # Megatron adds such gradients up over the tensor parallel group: each rank saw only its part of the sequence.
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(
        self, hidden: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None
    ):
        """(values [T, 1, 1], None), called by GPTModel as its output layer.

        hidden: [T, 1, H], with sequence parallelism this rank's part of T.
        """
        values = torch.nn.functional.linear(hidden, self.weight)
        if self._gathers:
            # All ranks compute the same loss from the gathered values, so each keeps the gradient of its own part.
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


def put_value_head(stage: GPTModel) -> None:
    """Give the stage a value head where it has an output layer (on the last pipeline stage)."""
    if stage.post_process:
        stage.output_layer = ValueHead(stage.config)


def has_value_head(stage: GPTModel) -> bool:
    """Whether this is a critic's last stage."""
    return isinstance(getattr(stage, "output_layer", None), ValueHead)
