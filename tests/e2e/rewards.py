"""Rewards for whole runs with an untrained model: cheap, deterministic, and different within a group."""

import os

import numpy as np


def even_tokens(args, sample) -> float:
    """Share of even token ids in the response: random weights give about one half, and it can be learned."""
    response = sample.tokens[sample.loss_mask.astype(bool)]
    return float((response % 2 == 0).mean()) if len(response) else 0.0


def raises(args, sample) -> float:
    """A reward function with a bug."""
    raise KeyError("no such key in the label")


def leaves(args, sample) -> float:
    """A reward function that ends the process that it runs in, as some libraries do, with the status of a success."""
    os._exit(0)


def eval_versions(step, args, data, metrics) -> dict[str, float]:
    """--custom-eval-rollout-log-function-path: the oldest and the newest weights of what an evaluation got."""
    tokens = np.concatenate([sample.weight_versions for one in data.values() for sample in one["samples"]])
    return {"eval/oldest_version": float(tokens[tokens >= 0].min()), "eval/newest_version": float(tokens.max())}
