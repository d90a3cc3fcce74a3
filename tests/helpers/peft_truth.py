"""What PEFT says of adapters on an HF model, one sample at a time: the oracle for the trainer's."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from slime_like.records import TrainSample
from tests.helpers.hf_truth import load_model

#: Of each optimizer step.
STEPS = (
    {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1},
    {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0},
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PeftTruth:
    """By PEFT, in float64."""

    log_probs: list[np.ndarray]  # of each sample's tokens behind the first
    bare: list[np.ndarray]  # the same with adapters switched off
    gradients: dict[str, np.ndarray]  # of the summed cross entropy, by PEFT's names
    stepped: dict[str, np.ndarray]  # the adapters after STEPS
    merged: dict[str, np.ndarray]  # the model after merge_and_unload, before any step


def make_peft_folder(base: str, folder: str, *, seed: int = 3, **options) -> str:
    """A PEFT folder by PEFT itself, with A and B that are not zero; returns it."""
    torch.manual_seed(seed)
    model = get_peft_model(load_model(base), LoraConfig(task_type="CAUSAL_LM", **options))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    return folder


def log_probs_of(model, samples: list[TrainSample]) -> list[torch.Tensor]:
    """log p(tokens[t] | before) for t >= 1 of each sample."""
    rows = []
    for sample in samples:
        ids = torch.as_tensor(sample.tokens.astype(np.int64))
        logs = torch.log_softmax(model(input_ids=ids[None]).logits[0, :-1], -1)
        rows.append(logs.gather(-1, ids[1:, None]).squeeze(-1))
    return rows


def load_peft(base: str, folder: str) -> PeftModel:
    """The HF model with the adapters of a folder, trainable: in float64, but float32 with experts, whose kernel has no
    other.
    """
    model = load_model(base)
    if not any(name.endswith(".experts") for name, _ in model.named_modules()):
        model = model.double()
    return PeftModel.from_pretrained(model, folder, is_trainable=True).to(model.dtype)


def adapters_of(model: PeftModel) -> dict[str, torch.nn.Parameter]:
    """By the names that they have in a folder."""
    return {name.replace(".default", ""): p for name, p in model.named_parameters() if "lora_" in name}


def cross_entropy(rows: list[torch.Tensor], samples: list[TrainSample]) -> torch.Tensor:
    """The sum of -weight log p over trained tokens."""
    total = rows[0].new_zeros(())
    for row, sample in zip(rows, samples, strict=True):
        for t in np.flatnonzero(sample.loss_mask[1:]):
            total = total - float(sample.weights[t + 1]) * row[t]
    return total


def peft_truth(base: str, folder: str, samples: list[TrainSample]) -> PeftTruth:
    """Everything that a row of the test compares with."""
    model = load_peft(base, folder)
    rows = log_probs_of(model, samples)
    with torch.no_grad(), model.disable_adapter():
        bare = [row.numpy() for row in log_probs_of(model, samples)]
    cross_entropy(rows, samples).backward()
    parameters = adapters_of(model)
    gradients = {name: p.grad.numpy().copy() for name, p in parameters.items()}
    adam = torch.optim.AdamW(list(parameters.values()))
    for number, numbers in enumerate(STEPS):
        if number:
            adam.zero_grad()
            cross_entropy(log_probs_of(model, samples), samples).backward()
        adam.param_groups[0].update(numbers)
        adam.step()
    stepped = {name: p.detach().numpy().copy() for name, p in parameters.items()}
    whole = load_peft(base, folder).merge_and_unload()
    merged = {name: p.detach().numpy() for name, p in whole.state_dict().items()}
    return PeftTruth(
        log_probs=[row.detach().numpy() for row in rows], bare=bare, gradients=gradients, stepped=stepped, merged=merged
    )
