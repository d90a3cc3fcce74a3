"""The experts that an engine's routers chose, out of its answers (--use-rollout-routing-replay)."""

from __future__ import annotations

import base64
import binascii
import dataclasses

import numpy as np

from slime_like.config.model import ModelConfig
from slime_like.errors import EngineError
from slime_like.records import routing_fault

#: The engine does not say; the trainer's router chooses itself.
NOT_SAID = -1


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoutingShape:
    """What an engine tells about one token: for each of all layers, the numbers of the experts that processed it."""

    num_layers: int
    topk: int
    num_experts: int
    expert_layers: tuple[int, ...]  # which layers have experts

    @classmethod
    def of(cls, model: ModelConfig) -> RoutingShape:
        """Of a model with experts."""
        assert model.num_layers and model.num_experts, "a model without experts routes nothing"
        return cls(
            num_layers=model.num_layers,
            topk=model.moe_router_topk,
            num_experts=model.num_experts,
            expert_layers=tuple(layer for layer, has_experts in enumerate(model.expert_layers) if has_experts),
        )

    @property
    def dtype(self) -> type:
        """The smallest that holds every expert and NOT_SAID."""
        return np.int8 if self.num_experts <= 128 else np.int16

    def read(self, text: object, *, num_tokens: int) -> np.ndarray:
        """SGLang's `meta_info["routed_experts"]` -> [num_tokens, layers, topk] as records.Sample holds it, NOT_SAID for
        the last token.

        text: base64 of int32 [num_tokens - 1, layers, topk] (0.5.23, state_capturer/base.py: rows 0 to length - 2; the
        last token was sampled, never processed). num_tokens: prompt and response together. Raises EngineError where it
        is missing or something else.
        """
        if text is None:
            raise EngineError(
                "the engine reported no routed experts, which --use-rollout-routing-replay asked for. Fix: start it"
                " with --enable-return-routed-experts, or drop the flag."
            )
        row = self.num_layers * self.topk
        try:
            numbers = np.frombuffer(base64.b64decode(str(text), validate=True), dtype=np.int32)
        except (binascii.Error, ValueError) as error:
            raise EngineError(f"the engine's routed experts are no base64 of 32-bit numbers: {error}") from error
        if len(numbers) != (num_tokens - 1) * row:
            raise EngineError(
                f"the engine reported {len(numbers)} routed experts for {num_tokens} tokens, but {num_tokens - 1} x"
                f" {self.num_layers} layers x {self.topk} (--moe-router-topk) belong to all but the last. Fix: an"
                " engine that serves this model."
            )
        if len(numbers) and not 0 <= numbers.min() <= numbers.max() < self.num_experts:
            raise EngineError(
                f"the engine reported experts {numbers.min()} to {numbers.max()}, but the model has 0 to"
                f" {self.num_experts - 1}."
            )
        experts = self.unsaid(num_tokens)
        experts[:-1] = numbers.reshape(num_tokens - 1, self.num_layers, self.topk)
        fault = routing_fault(experts, self.expert_layers, self.num_experts)
        if fault:
            raise EngineError(
                f"the engine's routed experts are none: {fault}. Fix: an engine that records them"
                " (docs/routing-replay.md), or drop the flag."
            )
        return experts

    def unsaid(self, num_tokens: int) -> np.ndarray:
        """[num_tokens, layers, topk]: the trainer's routers choose everywhere."""
        return np.full((num_tokens, self.num_layers, self.topk), NOT_SAID, dtype=self.dtype)
