"""Someone else's opinion: HF transformers' log-probs of saved samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from slime_like.records import SampleGroup
from slime_like.rollout.debug_data import load_rollout


def largest_difference(model_dir: Path, samples_path: Path) -> float:
    """max |engine log-prob - HF log-prob| over all generated tokens of a saved rollout."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    largest, count = 0.0, 0
    for group in load_rollout(str(samples_path), 0):
        for sample in group.samples:
            tokens = torch.tensor(sample.tokens, dtype=torch.long)
            with torch.no_grad():
                logprobs = model(tokens[None]).logits[0].log_softmax(-1)
            theirs = logprobs[:-1].gather(1, tokens[1:, None])[:, 0]
            trained = torch.tensor(sample.loss_mask[1:], dtype=torch.bool)
            ours = torch.tensor(sample.engine_logprobs[1:])
            count += int(trained.sum())
            largest = max(largest, float((theirs - ours)[trained].abs().max()))
    assert count > 0, "no generated token to compare"
    return largest


def differences_by_version(models: Mapping[int, Path], groups: Sequence[SampleGroup]) -> Iterator[tuple[float, bool]]:
    """Of every generated token |engine log-prob - HF log-prob| with the weights of the version that is named for it,
    and whether that is a later version than that of its answer's first token.

    models: weight version -> folder. All tokens before it are given, whoever said them.
    """
    loaded: dict[int, torch.nn.Module] = {}
    for group in groups:
        for sample in group.samples:
            versions = sample.weight_versions[1:]
            said = sorted(set(versions[versions >= 0].tolist()))
            for version in said:
                if version not in loaded:
                    loaded[version] = AutoModelForCausalLM.from_pretrained(models[version], dtype=torch.float32).eval()
                tokens = torch.tensor(sample.tokens, dtype=torch.long)
                with torch.no_grad():
                    logprobs = loaded[version](tokens[None]).logits[0].log_softmax(-1)
                theirs = logprobs[:-1].gather(1, tokens[1:, None])[:, 0].numpy()
                for place in (versions == version).nonzero()[0]:
                    yield abs(float(theirs[place] - sample.engine_logprobs[1:][place])), version != said[0]
