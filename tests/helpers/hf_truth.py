"""What HF transformers and autograd say about a batch: the oracle for the trainer.

Plain fp32 code, one sample at a time.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile

import numpy as np
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from slime_like.records import TrainSample
from tests.helpers.train_world import advantage_of

#: Name of a router's bias that no gradient moves.
CHOOSING_BIAS = "e_score_correction_bias"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Truth:
    """Loss, gradient norm and log-probs of one batch under one HF model."""

    loss: float
    grad_norm: float
    entropy: float
    kl: float
    log_probs: list[np.ndarray]  # [T] each, entry 0 is 0
    reference_log_probs: list[np.ndarray]
    balancing: float  # sum over layers; 0 if it was not asked for
    gradients: dict[str, np.ndarray]  # under the names that a saved folder has


def load_model(folder: str):
    """The HF model in fp32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def score(model, tokens: np.ndarray, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """log p(tokens[t] | tokens[<t]) and entropy before t, both [T - 1] for t >= 1."""
    ids = torch.as_tensor(tokens.astype(np.int64))
    log_softmax = torch.log_softmax(model(ids[None]).logits[0, :-1].float() / temperature, -1)
    return log_softmax.gather(-1, ids[1:, None]).squeeze(-1), -(log_softmax.exp() * log_softmax).sum(-1)


def balancing_loss(routers: dict[str, list[torch.Tensor]], topk: int) -> torch.Tensor:
    """Switch Transformer's loss (arXiv:2101.03961, eq. 4 to 6) of each layer over all tokens, summed.

    routers: name -> [T, experts] logits in parts.
    """
    total = torch.zeros(())
    for parts in routers.values():
        probs = torch.cat(parts).softmax(-1)
        chosen = torch.zeros_like(probs).scatter(1, probs.topk(topk, -1).indices, 1.0)
        total = total + probs.size(1) * (chosen.mean(0) / topk * probs.mean(0)).sum()
    return total


def collect_router_logits(model) -> dict[str, list[torch.Tensor]]:
    """Router name -> logits [T, experts] of every later forward pass."""
    logits: dict[str, list[torch.Tensor]] = {}
    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            logits[name] = []
            module.register_forward_hook(lambda _, __, output, name=name: logits[name].append(output[0]))
    return logits


def stored_gradients(model) -> dict[str, np.ndarray]:
    """Gradients under the names and in the shapes in which save_pretrained writes the weights.

    Spoils the model's weights.
    Routers' biases for choosing are no parameters and have none.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        stored = load_file(os.path.join(folder, "model.safetensors"))
    return {name: gradient for name, gradient in stored.items() if not name.endswith(CHOOSING_BIAS)}


def first_step_truth(
    folder: str,
    samples: list[TrainSample],
    *,
    reference: str,
    temperature: float,
    kl_coef: float,
    entropy_coef: float,
    per_token: bool = False,
    balancing_coef: float = 0.0,
) -> Truth:
    """GRPO's loss at ratio 1 with a k2 KL loss and an entropy bonus, written out directly.

    The balancing loss of routers is only in the gradients.
    """
    model, other = load_model(folder), load_model(reference)
    routers = collect_router_logits(model) if balancing_coef else {}
    total_tokens = sum(int(s.loss_mask[1:].sum()) for s in samples)
    loss, entropy_mean, kl_mean = 0.0, 0.0, 0.0
    rows, reference_rows = [], []
    for sample in samples:
        log_probs, entropy = score(model, sample.tokens, temperature)
        with torch.no_grad():
            reference_log_probs, _ = score(other, sample.tokens, temperature)
        mask = torch.as_tensor(sample.loss_mask[1:].astype(bool))
        weight = 1.0 / total_tokens if per_token else 1.0 / (int(mask.sum()) * len(samples))
        ratio = (log_probs - log_probs.detach()).exp()
        kl = 0.5 * (log_probs - reference_log_probs) ** 2
        terms = -ratio * advantage_of(sample) + kl_coef * kl - entropy_coef * entropy
        loss = loss + weight * terms[mask].sum()
        entropy_mean += weight * entropy.detach()[mask].sum().item()
        kl_mean += weight * kl.detach()[mask].sum().item()
        rows.append(np.concatenate([[0.0], log_probs.detach().numpy()]))
        reference_rows.append(np.concatenate([[0.0], reference_log_probs.numpy()]))
    balancing = balancing_loss(routers, model.config.num_experts_per_tok) if balancing_coef else torch.zeros(())
    (loss + balancing_coef * balancing).backward()
    norm = torch.sqrt(sum((p.grad.double() ** 2).sum() for p in model.parameters() if p.grad is not None)).item()
    return Truth(
        loss=loss.item(),
        grad_norm=norm,
        entropy=entropy_mean,
        kl=kl_mean,
        log_probs=rows,
        reference_log_probs=reference_rows,
        balancing=balancing.item(),
        gradients=stored_gradients(model),
    )
