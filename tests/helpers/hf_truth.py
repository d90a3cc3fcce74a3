"""What HF transformers and autograd say about a batch: the oracle for the trainer. Plain fp32 code, one sample at a time."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from slime_like.records import TrainSample


@dataclasses.dataclass(frozen=True, kw_only=True)
class Truth:
    """Loss, gradient norm and log-probs of one batch under one HF model."""

    loss: float
    grad_norm: float
    entropy: float
    kl: float
    log_probs: list[np.ndarray]  # [T] each, entry 0 is 0
    reference_log_probs: list[np.ndarray]


def load_model(folder: str):
    """The HF model in fp32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def score(model, tokens: np.ndarray, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """log p(tokens[t] | tokens[<t]) and entropy before t, both [T - 1] for t >= 1."""
    ids = torch.as_tensor(tokens.astype(np.int64))
    log_softmax = torch.log_softmax(model(ids[None]).logits[0, :-1].float() / temperature, -1)
    return log_softmax.gather(-1, ids[1:, None]).squeeze(-1), -(log_softmax.exp() * log_softmax).sum(-1)


def first_step_truth(
    folder: str, samples: list[TrainSample], *, reference: str, temperature: float, kl_coef: float, entropy_coef: float, per_token: bool = False
) -> Truth:
    """GRPO's loss at ratio 1 with a k2 KL loss and an entropy bonus, written out directly."""
    model, other = load_model(folder), load_model(reference)
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
        terms = -ratio * sample.advantage + kl_coef * kl - entropy_coef * entropy
        loss = loss + weight * terms[mask].sum()
        entropy_mean += weight * entropy.detach()[mask].sum().item()
        kl_mean += weight * kl.detach()[mask].sum().item()
        rows.append(np.concatenate([[0.0], log_probs.detach().numpy()]))
        reference_rows.append(np.concatenate([[0.0], reference_log_probs.numpy()]))
    loss.backward()
    norm = torch.sqrt(sum((p.grad.double() ** 2).sum() for p in model.parameters() if p.grad is not None)).item()
    return Truth(loss=loss.item(), grad_norm=norm, entropy=entropy_mean, kl=kl_mean, log_probs=rows, reference_log_probs=reference_rows)
