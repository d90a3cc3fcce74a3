"""What PEFT says of adapters on an HF model, one sample at a time: the oracle for the trainer's."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from slime_like.records import TrainSample
from tests.helpers.hf_truth import load_model
from tests.helpers.lora_rows import STEPS


@dataclasses.dataclass(frozen=True, kw_only=True)
class PeftTruth:
    """By PEFT, in float64."""

    log_probs: list[np.ndarray]  # of each sample's tokens behind the first
    bare: list[np.ndarray]  # the same with adapters switched off
    gradients: dict[str, np.ndarray]  # of the summed cross entropy, by PEFT's names
    stepped: dict[str, np.ndarray]  # the adapters after STEPS
    merged: dict[str, np.ndarray]  # the model after merge_and_unload, before any step


def make_peft_folder(base: str, folder: str, *, seed: int = 3, experts: bool = False, **options) -> str:
    """A PEFT folder by PEFT itself, with A and B that are not zero; returns it.

    experts: add adapters on each expert's gate, up and down projection, as PEFT wrote them while HF kept experts as
    modules, and reads them since (peft 0.21, utils/transformers_weight_conversion.py).
    """
    torch.manual_seed(seed)
    model = get_peft_model(load_model(base), LoraConfig(task_type="CAUSAL_LM", **options))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    if experts:
        _add_experts(model, folder, generator, options["r"])
    return folder


_EXPERT_KINDS = ["gate_proj", "up_proj", "down_proj"]


def _add_experts(model: PeftModel, folder: str, generator: torch.Generator, rank: int) -> None:
    tensors = load_file(f"{folder}/adapter_model.safetensors")
    for name, fused in model.named_parameters():
        if name.endswith(".experts.gate_up_proj"):
            num_experts, rows, hidden = fused.shape
            for expert in range(num_experts):
                for kind in _EXPERT_KINDS:
                    sizes = (rows // 2, hidden) if kind == "down_proj" else (hidden, rows // 2)
                    prefix = f"{name.removesuffix('gate_up_proj')}{expert}.{kind}"
                    tensors[f"{prefix}.lora_A.weight"] = 0.2 * torch.randn(rank, sizes[0], generator=generator)
                    tensors[f"{prefix}.lora_B.weight"] = 0.2 * torch.randn(sizes[1], rank, generator=generator)
    save_file(tensors, f"{folder}/adapter_model.safetensors", metadata={"format": "pt"})
    config = LoraConfig.from_pretrained(folder)
    config.target_modules = {*config.target_modules, *_EXPERT_KINDS}
    config.save_pretrained(folder)


def by_expert(name: str, array: np.ndarray, *, num_experts: int) -> Iterator[tuple[str, np.ndarray]]:
    """PEFT's A or B of all experts as the A or B of each, gate and up apart; of another module itself.

    PEFT keeps A as [experts x rank, inputs] and B as [outputs, rank x experts], and of gate and up, which HF joins, one
    of twice the rank whose B has two blocks (peft 0.21, PeftConcatenate and ParamWrapper.get_delta_factors).
    """
    stem, _, rest = name.partition(".experts.")
    if not rest:
        yield name, array
        return
    is_a = "lora_A" in rest
    if is_a:
        stacked = array.reshape(num_experts, -1, array.shape[-1])
    else:
        stacked = array.reshape(array.shape[0], -1, num_experts).transpose(2, 0, 1)
    kind = "lora_A.weight" if is_a else "lora_B.weight"
    for expert in range(num_experts):
        matrix, prefix = stacked[expert], f"{stem}.experts.{expert}"
        if not rest.startswith("base_layer."):
            yield f"{prefix}.down_proj.{kind}", matrix
            continue
        half, rank = matrix.shape[0] // 2, matrix.shape[1] // 2
        blocks = (matrix[:half], matrix[half:]) if is_a else (matrix[:half, :rank], matrix[half:, rank:])
        for module, block in zip(("gate_proj", "up_proj"), blocks, strict=True):
            yield f"{prefix}.{module}.{kind}", block


def keep_blocks(name: str, parameter: torch.nn.Parameter, num_experts: int) -> None:
    """Let only the two blocks of a joined B learn: gate and up have adapters of their own."""
    if name.endswith(".experts.base_layer.lora_B.weight"):
        rows, columns = parameter.shape
        mask = torch.zeros(rows, columns // num_experts, num_experts, dtype=parameter.dtype)
        half, rank = rows // 2, columns // num_experts // 2
        mask[:half, :rank] = mask[half:, rank:] = 1
        parameter.register_hook(lambda gradient: gradient * mask.flatten(1))


def experts_apart(merged: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """HF's joined experts by the names that they have in a folder."""
    result = {}
    for name, array in merged.items():
        stem, _, kind = name.partition(".experts.")
        if not kind:
            result[name] = array
            continue
        for expert, matrix in enumerate(array):
            parts = {"down_proj": matrix}
            if kind == "gate_up_proj":
                parts = dict(zip(("gate_proj", "up_proj"), np.split(matrix, 2), strict=True))
            result |= {f"{stem}.experts.{expert}.{module}.weight": part for module, part in parts.items()}
    return result


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
    parameters, num_experts = adapters_of(model), getattr(model.config, "num_experts", 0)
    for name, parameter in parameters.items():
        keep_blocks(name, parameter, num_experts)
    cross_entropy(rows, samples).backward()
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

    def apart(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {
            one: part for name, array in arrays.items() for one, part in by_expert(name, array, num_experts=num_experts)
        }

    return PeftTruth(
        log_probs=[row.detach().numpy() for row in rows],
        bare=bare,
        gradients=apart(gradients),
        stepped=apart(stepped),
        merged=experts_apart(merged),
    )
