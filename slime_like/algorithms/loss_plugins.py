"""The user's own advantages, losses, corrections and means: found, and checked to be callable, before anything starts.

Imports no torch itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from slime_like.config.loss import LossConfig
from slime_like.utils.user_functions import load_function


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossPlugins:
    """None where the flag is not given."""

    #: (args, samples of a group) -> [G] advantages; runs on the rollout side, gets records.Sample
    advantage: Callable | None = None
    loss: Callable | None = None  # (args, batch, reduce) -> (loss, {name: scalar}); algorithms.policy_losses.LossBatch
    policy_loss: Callable | None = None  # (args, batch) -> (loss [K], {name: [K]}); the same LossBatch
    #: (args, pg_loss, train_log_probs, rollout_log_probs, sample_of_token) -> (pg_loss, {name: [K]})
    tis: Callable | None = None
    #: (args, samples of a train step) -> [N] weights of a trained token of each; gets records.TrainSample
    pg_reducer: Callable | None = None


def load_loss_plugins(loss: LossConfig) -> LossPlugins:
    """Import all of them. Raises PluginError naming the flag, the path and what was found."""
    return LossPlugins(
        advantage=_load(loss.custom_advantage_function_path, 2, "--custom-advantage-function-path"),
        loss=_load(loss.custom_loss_function_path, 3, "--custom-loss-function-path"),
        policy_loss=_load(loss.custom_policy_loss_function_path, 2, "--custom-policy-loss-function-path"),
        tis=_load(loss.custom_tis_function_path, 5, "--custom-tis-function-path"),
        pg_reducer=_load(loss.custom_pg_loss_reducer_function_path, 2, "--custom-pg-loss-reducer-function-path"),
    )


def _load(path: str | None, num_positional: int, flag: str) -> Callable | None:
    return load_function(path, num_positional=num_positional, flag=flag) if path else None
