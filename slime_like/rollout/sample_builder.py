"""Makes one flat sample out of what was seen and what was generated, in the order in which it came: one builder for
every kind of generation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from slime_like.records import ABORTED, COMPLETED, FAILED, TRUNCATED, Prompt, Sample
from slime_like.rollout.generate import Generation

#: A sample's status by what its last generation ended with; the worst of all turns counts.
_WORSE = {COMPLETED: 0, TRUNCATED: 1, ABORTED: 2, FAILED: 3}

#: Key in a failed sample's metadata: what failed was the user's own part.
FAULT = "fault"


class SampleBuilder:
    """Begins with the prompt; then `observe` what the environment says and `generated` what the policy says, any number
    of times; then `finish`.

    Example (two turns; a tool's answer between them):
        builder = SampleBuilder(prompt, 0)
        builder.generated(await engine.generate(builder.tokens, sampling_params))
        builder.observe(tokenizer("tool says 42")["input_ids"])
        builder.generated(await engine.generate(builder.tokens, sampling_params))
        return builder.finish()
    """

    def __init__(self, prompt: Prompt, sample_index: int = 0, *, segment_index: int = 0):
        self._prompt, self._sample_index, self._segment_index = prompt, sample_index, segment_index
        self._tokens: list[np.ndarray] = []
        self._mask: list[np.ndarray] = []
        self._logprobs: list[np.ndarray] = []
        self._versions: list[np.ndarray] = []
        self._texts: list[str] = []
        self._status = COMPLETED
        self._experts: np.ndarray | None = None
        self._num_tokens = 0
        self.observe(prompt.tokens)

    @property
    def tokens(self) -> np.ndarray:
        """[T] int32, all so far: what to send to the engine next."""
        return np.concatenate(self._tokens)

    def observe(self, tokens: Sequence[int] | np.ndarray) -> SampleBuilder:
        """Tokens that the policy did not choose: mask 0, no log-prob, version -1."""
        return self._append(tokens, mask=0, logprobs=np.zeros(len(tokens), dtype=np.float32), version=-1)

    def generated(self, generation: Generation) -> SampleBuilder:
        """An engine's answer to `tokens`: mask 1, its log-probs, each token's own weight version.

        Its experts cover all tokens so far.
        """
        if len(generation.tokens) != len(generation.logprobs):
            raise ValueError(f"{len(generation.tokens)} tokens with {len(generation.logprobs)} log-probs")
        versions = generation.weight_version if generation.weight_versions is None else generation.weight_versions
        self._append(generation.token_array, mask=1, logprobs=generation.logprob_array, version=versions)
        self._texts.append(generation.text)
        self._experts = generation.routed_experts
        self._status = max(self._status, generation.status, key=_WORSE.__getitem__)
        return self

    def finish(self, status: str | None = None, *, metadata: dict | None = None, response: str | None = None) -> Sample:
        """The sample.

        status: default what the worst generation ended with; response: default the generated texts one after the other.
        """
        # observed after the last answer: no engine has seen them
        if self._experts is not None and len(self._experts) < self._num_tokens:
            unsaid = np.full(
                (self._num_tokens - len(self._experts), *self._experts.shape[1:]), -1, dtype=self._experts.dtype
            )
            self._experts = np.concatenate([self._experts, unsaid])
        return Sample(
            prompt_index=self._prompt.index,
            sample_index=self._sample_index,
            segment_index=self._segment_index,
            tokens=self.tokens,
            loss_mask=np.concatenate(self._mask),
            engine_logprobs=np.concatenate(self._logprobs),
            weight_versions=np.concatenate(self._versions),
            response="".join(self._texts) if response is None else response,
            status=status or self._status,
            label=self._prompt.label,
            metadata=self._prompt.metadata if metadata is None else metadata,
            routed_experts=self._experts,
        )

    def fail(self, error: str, *, of_user: bool = False) -> Sample:
        """A sample without a response, whatever came before: nothing to train on, reward 0, and the reason.

        of_user: it is a fault of the user's own part: a reward, an environment, an agent or a function.
        """
        empty = SampleBuilder(self._prompt, self._sample_index, segment_index=self._segment_index).finish(FAILED)
        metadata = {**empty.metadata, FAULT: True} if of_user else empty.metadata
        return dataclasses.replace(empty, reward=0.0, error=error, metadata=metadata)

    def _append(
        self, tokens: Sequence[int] | np.ndarray, *, mask: int, logprobs: np.ndarray, version: int | np.ndarray
    ) -> SampleBuilder:
        self._tokens.append(np.asarray(tokens, dtype=np.int32))
        self._mask.append(np.full(len(tokens), mask, dtype=np.int8))
        self._logprobs.append(logprobs)
        self._versions.append(np.broadcast_to(np.asarray(version, dtype=np.int32), len(tokens)))
        self._num_tokens += len(tokens)
        return self
