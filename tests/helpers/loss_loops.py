"""The loss of one train step in loops over tokens, on top of Hugging Face's log-probs: the oracle for estimators, losses, masks and means."""

from __future__ import annotations

import dataclasses
import math

import torch


def trained(sample):
    return [t for t in range(1, len(sample.tokens)) if sample.loss_mask[t]]


@dataclasses.dataclass
class Truth:
    """HF's scores of every sample, [T] with entry 0 unused; the actor's with gradient."""

    model: torch.nn.Module
    samples: list
    actor: list
    entropy: list
    reference: list
    teacher: list

    def places(self):
        return [(i, t) for i, sample in enumerate(self.samples) for t in trained(sample)]


def token_advantages(truth, options):
    """{(sample, token): advantage} in Python's floats."""
    found = {}
    for i, sample in enumerate(truth.samples):
        steps = trained(sample)
        kl = [truth.actor[i][t].item() - truth.reference[i][t] for t in steps]
        for place, t in enumerate(steps):
            if options.get("advantage_estimator") == "reinforce_plus_plus":
                value = sum(options["gamma"] ** k * -options["kl_coef"] * kl[place + k] for k in range(len(steps) - place))
                value += options["gamma"] ** (len(steps) - 1 - place) * sample.reward
            else:
                value = sample.advantage - options.get("kl_coef", 0.0) * kl[place]
            if options.get("use_opd"):
                value -= options["opd_kl_coef"] * (truth.actor[i][t].item() - truth.teacher[i][t])
            found[i, t] = value
    if options.get("normalize_advantages"):
        mean = sum(found.values()) / len(found)
        variance = sum((value - mean) ** 2 for value in found.values()) / (len(found) - 1)
        found = {place: (value - mean) / math.sqrt(variance + 1e-8) for place, value in found.items()}
    return found


def mean_weights(truth, reduction, divisor=None):
    """{(sample, token): weight}, from each mean's definition."""
    samples, places = truth.samples, truth.places()
    rollouts = [(s.prompt_index, s.sample_index) for s in samples]
    found = {}
    for i, t in places:
        if reduction == "token":
            found[i, t] = 1 / len(places)
        elif reduction == "constant":
            found[i, t] = 1 / (len(samples) * divisor)
        elif reduction == "rollout":
            found[i, t] = 1 / (sum(rollouts[j] == rollouts[i] for j, _ in places) * len(set(rollouts)))
        else:
            found[i, t] = 1 / (len(trained(samples[i])) * len(samples))
    return found


def per_sample(truth, i, function, *, mean):
    values = [function(i, t) for t in trained(truth.samples[i])]
    return sum(values) / len(values) if mean else sum(values)


def factor_of(truth, i, t, options):
    """(importance weight, whether a bound was active) of one token."""

    def log_ratio(j, u):
        return truth.actor[j][u].item() - float(truth.samples[j].engine_logprobs[u])

    level = options.get("tis_level", "token")
    ratio = math.exp(log_ratio(i, t) if level == "token" else per_sample(truth, i, log_ratio, mean=level == "geometric"))
    low, high = options["tis_clip_low"], options["tis_clip"]
    if low <= ratio <= high:
        return ratio, 0.0
    return (0.0 if options.get("tis_mode") == "mask" else low if ratio < low else high), 1.0


def policy_term(truth, i, t, advantage, options):
    """One token's policy loss, with gradient."""
    log_prob = truth.actor[i][t]
    if options.get("policy_loss_type") == "reinforce":
        return -advantage * log_prob
    to_engine = options.get("use_rollout_logprobs")

    def log_ratio(j, u):
        return truth.actor[j][u] - (float(truth.samples[j].engine_logprobs[u]) if to_engine else truth.actor[j][u].detach())

    estimator = options.get("advantage_estimator")
    ratio = (per_sample(truth, i, log_ratio, mean=True) if estimator == "gspo" else log_ratio(i, t)).exp()
    low, high = 1 - options.get("eps_clip", 0.2), 1 + options.get("eps_clip_high", options.get("eps_clip", 0.2))
    if estimator == "cispo":
        return -min(max(ratio.item(), low), high) * advantage * log_prob
    return torch.max(-ratio * advantage, -ratio.clamp(low, high) * advantage)


def expected_of(truth, options):
    """Metrics by name, and the loss with gradient."""
    if options.get("loss_type") == "custom_loss":
        weights = mean_weights(truth, "sample")
        terms = [w * (truth.samples[i].advantage * truth.actor[i][t] ** 2 + 0.2 * (truth.actor[i][t] - truth.reference[i][t])) for (i, t), w in weights.items()]
        return {"train/square": sum(w * truth.actor[i][t].item() ** 2 for (i, t), w in weights.items())}, sum(terms)
    advantages = token_advantages(truth, options)
    weights = mean_weights(truth, options.get("loss_reduction", "sample"), options.get("loss_divisor"))
    policy_weights = weights
    if "custom_pg_loss_reducer_function_path" in options:
        policy_weights = dict.fromkeys(weights, 1 / (len(truth.samples) * 1024))
    loss, metrics = 0.0, dict.fromkeys(["train/tis", "train/tis_clip_ratio", "train/opsm_masked_ratio", "train/opd_kl", "train/halved", "train/entropy"], 0.0)
    for (i, t), weight in weights.items():
        term = policy_term(truth, i, t, advantages[i, t], options)
        engine, log_prob = float(truth.samples[i].engine_logprobs[t]), truth.actor[i][t]
        if "custom_tis_function_path" in options:
            surer = float(engine > log_prob.item())
            term, metrics["train/halved"] = term * (1 - 0.5 * surer), metrics["train/halved"] + weight * surer
        elif options.get("use_tis"):
            factor, bounded = factor_of(truth, i, t, options)
            term = term * factor
            metrics["train/tis"] += weight * factor
            metrics["train/tis_clip_ratio"] += weight * bounded
        if options.get("use_opsm"):
            moved = per_sample(truth, i, lambda j, u: float(truth.samples[j].engine_logprobs[u]) - truth.actor[j][u].item(), mean=True)
            masked = float(advantages[i, t] < 0 and moved > options["opsm_delta"])
            term, metrics["train/opsm_masked_ratio"] = term * (1 - masked), metrics["train/opsm_masked_ratio"] + weight * masked
        loss = loss + policy_weights[i, t] * term - weight * options.get("entropy_coef", 0.0) * truth.entropy[i][t]
        metrics["train/entropy"] += weight * truth.entropy[i][t].item()
        metrics["train/opd_kl"] += weight * (log_prob.item() - truth.teacher[i][t])
        if options.get("use_kl_loss"):
            gap = truth.reference[i][t] - log_prob
            loss = loss + weight * options["kl_loss_coef"] * (log_prob - engine).exp() * (gap.exp() - 1 - gap)
    return metrics, loss
