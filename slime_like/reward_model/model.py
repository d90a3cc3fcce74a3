"""The reward model itself: loads an HF folder, and scores samples in batches so that a sample's batch does not change
its score.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils import logging as transformers_logging

from slime_like.algorithms.finite import describe_non_finite, is_finite
from slime_like.errors import CheckpointError, RewardError
from slime_like.reward_model.inputs import RewardInput, encode_inputs, same_ids

#: A folder with none of these has no tokenizer; transformers would make up an empty one.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tokenizer_config.json",
)
_FIX = "Fix: --reward-load with a folder that AutoModelForSequenceClassification wrote with num_labels=1."


class RewardModel:
    """One copy of a reward model on this process's device: GPU `device_number` if there is one (bf16, unless told
    otherwise), else the CPU (fp32).

    policy_folder: --hf-checkpoint, whose tokenizer decides whether the samples' tokens can be read as they are
    (`reads_tokens`).
    """

    def __init__(
        self, folder: str, *, policy_folder: str, batch_size: int, bf16: bool | None = None, device_number: int = 0
    ):
        self.folder, self.batch_size = folder, batch_size
        transformers_logging.disable_progress_bar()
        self.device = torch.device("cuda", device_number) if torch.cuda.is_available() else torch.device("cpu")
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        half = self.device.type == "cuda" if bf16 is None else bf16
        self._model = _load(folder, torch.bfloat16 if half else torch.float32).to(self.device).eval()
        self._config = self._model.config.get_text_config()
        self._tokenizer = _load_tokenizer(folder, "--reward-load")
        self.reads_tokens = same_ids(_load_tokenizer(policy_folder, "--hf-checkpoint"), self._tokenizer)

    @property
    def context_tokens(self) -> int | None:
        """Most tokens of a sample; None if the model's config names no bound."""
        return getattr(self._config, "max_position_embeddings", None)

    @property
    def num_parameters(self) -> int:
        """Of this copy."""
        return sum(parameter.numel() for parameter in self._model.parameters())

    def score(self, inputs: Sequence[RewardInput]) -> np.ndarray:
        """[N] float64, in the order of the inputs.

        Raises RewardError naming a sample that is too long or scored NaN.
        """
        tokens = (
            [np.asarray(one.tokens, dtype=np.int64) for one in inputs]
            if self.reads_tokens
            else encode_inputs(inputs, self._tokenizer)
        )
        return self.score_tokens(tokens, [one.name for one in inputs])

    def score_tokens(self, sequences: Sequence[np.ndarray], names: Sequence[str]) -> np.ndarray:
        """[N] float64: the model's output for each sequence of its own token ids, at most batch_size of similar length
        at a time.
        """
        for sequence, name in zip(sequences, names, strict=True):
            self._check(sequence, name)
        order = sorted(range(len(sequences)), key=lambda i: len(sequences[i]))
        scores = np.zeros(len(sequences))
        for start in range(0, len(order), self.batch_size):
            batch = order[start : start + self.batch_size]
            scores[batch] = self._forward([sequences[i] for i in batch])
        for score, name in zip(scores, names, strict=True):
            if not np.isfinite(score):
                raise RewardError(f"the reward model {self.folder} gave {score} for {name}.")
        return scores

    def _check(self, sequence: np.ndarray, name: str) -> None:
        limit, known = self.context_tokens, self._model.get_input_embeddings().num_embeddings
        if limit is not None and len(sequence) > limit:
            raise RewardError(
                f"{name} has {len(sequence)} tokens for the reward model {self.folder}, which takes {limit}"
                " (max_position_embeddings). Fix: --rollout-max-context-len or --rollout-max-response-len."
            )
        if not len(sequence) or not 0 <= sequence.min() <= sequence.max() < known:
            raise RewardError(
                f"{name}: {len(sequence)} tokens with ids up to {max(sequence, default=-1)}; the reward model"
                f" {self.folder} knows {known} ids."
            )

    @torch.inference_mode()
    def _forward(self, sequences: list[np.ndarray]) -> np.ndarray:
        """[B] float64 of one batch, padded on the right: there, a causal model's real tokens see no padding and keep
        their positions.
        """
        pad = self._pad_id(sequences)
        longest = max(map(len, sequences))
        ids = torch.full((len(sequences), longest), pad, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, sequence in enumerate(sequences):
            ids[row, : len(sequence)] = torch.from_numpy(sequence)
            mask[row, : len(sequence)] = 1
        own_pad_id, self._config.pad_token_id = self._config.pad_token_id, pad
        try:
            logits = self._model(input_ids=ids.to(self.device), attention_mask=mask.to(self.device)).logits
        finally:
            self._config.pad_token_id = own_pad_id
        return logits[:, 0].double().cpu().numpy()

    def _pad_id(self, sequences: list[np.ndarray]) -> int:
        """The model's own padding token; for one without, an id that no sequence ends with.

        transformers (5.x) reads a causal classifier's score at the last token that is not the padding token. A model
        that has none is read at the very last token, which must stay so in a batch: eos, the usual stand-in, would move
        it in front of the eos.
        """
        if self._config.pad_token_id is not None:
            return self._config.pad_token_id
        ends = {int(sequence[-1]) for sequence in sequences}
        return next(number for number in range(len(ends) + 1) if number not in ends)


def _load(folder: str, dtype: torch.dtype) -> Any:
    """The classifier, every weight of it read.

    Raises CheckpointError: transformers itself would draw a missing head at random.
    """
    if not os.path.isfile(os.path.join(folder, "config.json")):
        raise CheckpointError(f"--reward-load {folder}: has no config.json. {_FIX}")
    try:
        model, loading_info = AutoModelForSequenceClassification.from_pretrained(
            folder, dtype=dtype, local_files_only=True, output_loading_info=True, trust_remote_code=False
        )
    except Exception as error:  # what broken files end in: transformers and safetensors raise their own
        raise CheckpointError(f"--reward-load {folder}: cannot be loaded as a sequence classifier: {error}") from error
    for name, weight in model.named_parameters():
        if not is_finite(weight):
            raise CheckpointError(f"--reward-load {folder}: of tensor {name!r} {describe_non_finite(weight)}.")
    if model.config.num_labels != 1:
        raise CheckpointError(
            f"--reward-load {folder}: has {model.config.num_labels} outputs, and a reward is one. {_FIX}"
        )
    missing, mismatched = (
        sorted(loading_info["missing_keys"]),
        sorted(str(key) for key in loading_info["mismatched_keys"]),
    )
    if missing or mismatched:
        names = ", ".join([*missing, *mismatched][:4])
        count = len(missing) + len(mismatched)
        raise CheckpointError(
            f"--reward-load {folder}: is no reward model of its config.json: {count} weights are missing: {names}."
            f" {_FIX}"
        )
    return model


def _load_tokenizer(folder: str, flag: str) -> Any:
    if not any(os.path.isfile(os.path.join(folder, name)) for name in _TOKENIZER_FILES):
        raise CheckpointError(
            f"{flag} {folder}: has no tokenizer. Fix: put the files of the model's tokenizer (tokenizer.json …) beside"
            " its weights."
        )
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # what broken files end in: tokenizers raises Exception itself
        raise CheckpointError(f"{flag} {folder}: its tokenizer cannot be loaded: {error}") from error
