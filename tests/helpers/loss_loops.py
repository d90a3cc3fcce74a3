"""The loss of one train step in loops over tokens, on top of Hugging Face's log-probs: the oracle for estimators,
losses, masks and means.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from tests.helpers.train_world import advantage_of


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
    advantages = {}
    for i, sample in enumerate(truth.samples):
        steps = trained(sample)
        kl = [truth.actor[i][t].item() - truth.reference[i][t] for t in steps]
        for place, t in enumerate(steps):
            if options.get("advantage_estimator") == "reinforce_plus_plus":
                value = sum(
                    options["gamma"] ** k * -options["kl_coef"] * kl[place + k] for k in range(len(steps) - place)
                )
                value += options["gamma"] ** (len(steps) - 1 - place) * sample.reward
            else:
                value = advantage_of(sample) - options.get("kl_coef", 0.0) * kl[place]
            if options.get("use_opd"):
                value -= options["opd_kl_coef"] * (truth.actor[i][t].item() - truth.teacher[i][t])
            advantages[i, t] = value
    if options.get("normalize_advantages"):
        mean = sum(advantages.values()) / len(advantages)
        variance = sum((value - mean) ** 2 for value in advantages.values()) / (len(advantages) - 1)
        advantages = {place: (value - mean) / math.sqrt(variance + 1e-8) for place, value in advantages.items()}
    return advantages


def mean_weights(truth, reduction, divisor=None):
    """{(sample, token): weight}, from each mean's definition."""
    samples, places = truth.samples, truth.places()
    rollouts = [(s.prompt_index, s.sample_index) for s in samples]
    weights = {}
    for i, t in places:
        if reduction == "token":
            weights[i, t] = 1 / len(places)
        elif reduction == "constant":
            weights[i, t] = 1 / (len(samples) * divisor)
        elif reduction == "rollout":
            weights[i, t] = 1 / (sum(rollouts[j] == rollouts[i] for j, _ in places) * len(set(rollouts)))
        else:
            weights[i, t] = 1 / (len(trained(samples[i])) * len(samples))
    return weights


def per_sample(truth, i, function, *, mean):
    values = [function(i, t) for t in trained(truth.samples[i])]
    return sum(values) / len(values) if mean else sum(values)


def factor_of(truth, i, t, options):
    """(importance weight, whether a bound was active) of one token."""

    def log_ratio(j, u):
        return truth.actor[j][u].item() - float(truth.samples[j].engine_logprobs[u])

    level = options.get("tis_level", "token")
    ratio = math.exp(
        log_ratio(i, t) if level == "token" else per_sample(truth, i, log_ratio, mean=level == "geometric")
    )
    low, high = options["tis_clip_low"], options["tis_clip"]
    if low <= ratio <= high:
        return ratio, 0.0
    return (0.0 if options.get("tis_mode") == "mask" else low if ratio < low else high), 1.0


def loss_name(options):
    return options.get("policy_loss") or {"gspo": "gspo", "cispo": "cispo"}.get(
        options.get("advantage_estimator"), "clip"
    )


def policy_term(truth, i, t, advantage, options, picked=()):
    """One token's policy loss, with gradient."""
    name, log_prob = loss_name(options), truth.actor[i][t]
    if "custom_policy_loss_function_path" in options:
        return -advantage * torch.tanh(log_prob)
    if name == "reinforce":
        return -advantage * log_prob
    to_engine = options.get("use_rollout_logprobs")

    def log_ratio(j, u):
        return truth.actor[j][u] - (
            float(truth.samples[j].engine_logprobs[u]) if to_engine else truth.actor[j][u].detach()
        )

    low, high = options.get("eps_clip", 0.2), options.get("eps_clip_high", options.get("eps_clip", 0.2))
    if name == "gmpo":
        bounded = per_sample(
            truth,
            i,
            lambda j, u: log_ratio(j, u).clamp(max=high) if advantage > 0 else log_ratio(j, u).clamp(min=-low),
            mean=True,
        )
        return -advantage * bounded.exp()
    ratio = log_ratio(i, t).exp()
    if name == "sapo":
        temperature = 1.0 if advantage > 0 else 1.05
        return -advantage * 4 / temperature / (1 + (-temperature * (ratio - 1)).exp())
    if name == "kl_cov":
        return -ratio * advantage + (log_ratio(i, t).abs() if (i, t) in picked else 0.0)
    if name == "gspo":
        ratio = per_sample(truth, i, log_ratio, mean=True).exp()
        if options.get("use_opd"):  # GSPO-token
            ratio = ratio.detach() * (log_prob - log_prob.detach()).exp()
    if name == "cispo":
        return -min(max(ratio.item(), 1 - low), 1 + high) * advantage * log_prob
    loss = torch.max(-ratio * advantage, -ratio.clamp(1 - low, 1 + high) * advantage)
    return loss * ((i, t) not in picked)


def picked_tokens(truth, advantages, options):
    """(sample, token) pairs that clip_cov (all within its band) or kl_cov treats apart."""
    places = truth.places()
    logs = {place: truth.actor[place[0]][place[1]].item() for place in places}
    mean_log, mean_advantage = sum(logs.values()) / len(places), sum(advantages.values()) / len(places)
    covariance = {place: (logs[place] - mean_log) * (advantages[place] - mean_advantage) for place in places}
    if loss_name(options) == "clip_cov":
        assert options["clip_cov_ratio"] == 1.0
        return {place for place in places if options["clip_cov_lb"] < covariance[place] < options["clip_cov_ub"]}
    if loss_name(options) == "kl_cov":
        return set(
            sorted(places, key=covariance.get, reverse=True)[: max(int(options["kl_cov_ratio"] * len(places)), 1)]
        )
    return set()


def expected_of(truth, options):
    """Metrics by name, and the loss with gradient."""
    if options.get("loss_type") == "custom_loss":
        weights = mean_weights(truth, "sample")
        terms = [
            w
            * (
                advantage_of(truth.samples[i]) * truth.actor[i][t] ** 2
                + 0.2 * (truth.actor[i][t] - truth.reference[i][t])
            )
            for (i, t), w in weights.items()
        ]
        return {"train/square": sum(w * truth.actor[i][t].item() ** 2 for (i, t), w in weights.items())}, sum(terms)
    advantages = token_advantages(truth, options)
    weights = mean_weights(truth, options.get("loss_reduction", "sample"), options.get("loss_divisor"))
    policy_weights = weights
    if "custom_pg_loss_reducer_function_path" in options:
        policy_weights = dict.fromkeys(weights, 1 / (len(truth.samples) * 1024))
    picked, names = (
        picked_tokens(truth, advantages, options),
        ["tis", "tis_clip_ratio", "tis_rejected_ratio", "opsm_masked_ratio", "opd_kl", "halved", "entropy"],
    )
    loss, metrics = 0.0, dict.fromkeys([f"train/{name}" for name in [*names, "picked_ratio", "tanh"]], 0.0)
    for (i, t), weight in weights.items():
        term = policy_term(truth, i, t, advantages[i, t], options, picked)
        metrics["train/picked_ratio"] += weight * ((i, t) in picked)
        metrics["train/tanh"] += weight * math.tanh(truth.actor[i][t].item())
        engine, log_prob = float(truth.samples[i].engine_logprobs[t]), truth.actor[i][t]
        if "custom_tis_function_path" in options:
            surer = float(engine > log_prob.item())
            term, metrics["train/halved"] = term * (1 - 0.5 * surer), metrics["train/halved"] + weight * surer
        elif options.get("use_tis"):
            factor, bounded = factor_of(truth, i, t, options)
            term = term * factor
            metrics["train/tis"] += weight * factor
            metrics["train/tis_clip_ratio"] += weight * bounded
        if "tis_reject_level" in options:
            gap = per_sample(
                truth,
                i,
                lambda j, u: truth.actor[j][u].item() - float(truth.samples[j].engine_logprobs[u]),
                mean=options["tis_reject_level"] == "geometric",
            )
            rejected = float(not options["tis_reject_low"] <= math.exp(gap) <= options["tis_reject_high"])
            term, metrics["train/tis_rejected_ratio"] = (
                term * (1 - rejected),
                metrics["train/tis_rejected_ratio"] + weight * rejected,
            )
        if options.get("use_opsm"):
            moved = per_sample(
                truth, i, lambda j, u: float(truth.samples[j].engine_logprobs[u]) - truth.actor[j][u].item(), mean=True
            )
            masked = float(advantages[i, t] < 0 and moved > options["opsm_delta"])
            term, metrics["train/opsm_masked_ratio"] = (
                term * (1 - masked),
                metrics["train/opsm_masked_ratio"] + weight * masked,
            )
        loss = loss + policy_weights[i, t] * term - weight * options.get("entropy_coef", 0.0) * truth.entropy[i][t]
        metrics["train/entropy"] += weight * truth.entropy[i][t].item()
        metrics["train/opd_kl"] += weight * (log_prob.item() - truth.teacher[i][t])
        if options.get("use_kl_loss"):
            gap = truth.reference[i][t] - log_prob
            new_to_old = (log_prob - engine).exp() if options.get("use_unbiased_kl") else 1.0
            loss = loss + weight * options["kl_loss_coef"] * new_to_old * (gap.exp() - 1 - gap)
    return metrics, loss


def float_losses(name, new, frozen, old, advantages, owner, picked=(), **options):
    """--policy-loss `name` of tokens in Python's floats, written from the papers.

    What the papers detach is taken at `frozen` instead of `new`.
    """
    low, high = options.get("eps_clip", 0.2), options.get("eps_clip_high", options.get("eps_clip", 0.2))
    losses = []
    for t, advantage in enumerate(advantages):
        mine = [u for u in range(len(owner)) if owner[u] == owner[t]]
        ratio = math.exp(new[t] - old[t])
        if name == "gspo":
            ratio = math.exp(sum(new[u] - old[u] for u in mine) / len(mine))
        if name == "gspo_token":
            ratio = math.exp(sum(frozen[u] - old[u] for u in mine) / len(mine)) * math.exp(new[t] - frozen[t])
        surrogate = min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
        if name == "cispo":
            losses.append(-min(max(math.exp(frozen[t] - old[t]), 1 - low), 1 + high) * advantage * new[t])
        elif name == "reinforce":
            losses.append(-advantage * new[t])
        elif name == "gmpo":
            # The paper's objective before the root: a product of |min(ratio A, clipped ratio A)|, with the sign of A.
            product = 1.0
            for u in mine:
                each = math.exp(new[u] - old[u])
                product *= abs(min(each * advantage, min(max(each, math.exp(-low)), math.exp(high)) * advantage))
            losses.append(-math.copysign(product ** (1 / len(mine)), advantage))
        elif name == "sapo":
            temperature = options["sapo_temperature_pos"] if advantage > 0 else options["sapo_temperature_neg"]
            losses.append(-advantage * 4 / temperature / (1 + math.exp(-temperature * (ratio - 1))))
        elif name == "clip_cov":
            losses.append(0.0 if t in picked else -surrogate)
        elif name == "kl_cov":
            losses.append(-ratio * advantage + (options["ppo_kl_coef"] * abs(new[t] - old[t]) if t in picked else 0.0))
        else:
            losses.append(-surrogate)
    return losses
