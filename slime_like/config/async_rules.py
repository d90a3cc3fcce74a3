"""What does not go with generating while training, and what follows from it for the loss."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

from slime_like.config.tree import ConfigTree

_Tree = TypeVar("_Tree", bound=ConfigTree)


def corrected(config: _Tree) -> _Tree:
    """The config with --use-tis where samples may be older than the weights that train on them, and nothing else was
    said about it.
    """
    loss = config.loss
    silent = loss.use_tis is None and not loss.use_rollout_logprobs and loss.loss_type == "policy_loss"
    if not (silent and config.asynchrony.is_stale):
        return config
    return dataclasses.replace(config, loss=dataclasses.replace(loss, use_tis=True))


def async_problems(config: ConfigTree) -> list[str]:
    """Combinations of --async-mode, --partial-rollout and --update-weights-interval with others that are wrong."""
    asynchrony = config.asynchrony
    return [
        *_mode_problems(config),
        *_share_problems(config),
        *(_mixing_problems(config) if asynchrony.is_full or asynchrony.partial_rollout else []),
        *_pause_problems(config),
        *_rolling_problems(config),
        *_over_sampling_problems(config),
    ]


def _mode_problems(config: ConfigTree) -> list[str]:
    """Asynchrony where there are not two sides that could work at the same time."""
    asynchrony, placement = config.asynchrony, config.placement
    wanted = {
        f"--async-mode {asynchrony.async_mode}": asynchrony.is_async,
        "--partial-rollout": asynchrony.partial_rollout,
        "--eval-async": asynchrony.eval_async,
        f"--update-weights-interval {asynchrony.update_weights_interval}": asynchrony.update_weights_interval > 1,
    }
    problems = []
    for flag_name, is_wanted in wanted.items():
        if not is_wanted:
            continue
        if not config.uses_engines:
            problems.append(f"{flag_name}: this run samples nothing. Fix: leave it out.")
        elif placement.debug_rollout_only:
            problems.append(f"{flag_name}: --debug-rollout-only trains nothing. Fix: leave it out.")
        elif placement.colocate and flag_name != "--partial-rollout":
            why = (
                "engines and trainer take turns on the same GPUs. Fix: drop --colocate and give engines GPUs of their"
                " own; --partial-rollout goes with it."
                if asynchrony.is_async or asynchrony.eval_async
                else "engines give their memory back for each train step, and need weights again. Fix: drop one of"
                " them."
            )
            problems.append(f"{flag_name} does not go with --colocate: {why}")
    if asynchrony.eval_async and not config.eval.eval_interval:
        problems.append("--eval-async does nothing without --eval-interval. Fix: add it, or drop this.")
    return problems


def _share_problems(config: ConfigTree) -> list[str]:
    """--eval-num-engines where engines that were set aside would be asked for what they do not hold."""
    asynchrony, interval = config.asynchrony, config.eval.eval_interval
    flag_name, problems = f"--eval-num-engines {asynchrony.eval_num_engines}", []
    if not (asynchrony.eval_async and asynchrony.eval_num_engines):
        return []
    if interval and interval % asynchrony.update_weights_interval:
        problems.append(
            f"{flag_name} needs a sync before each evaluation, which gives the engines of the last one the present"
            f" weights: --eval-interval {interval} is no multiple of --update-weights-interval"
            f" {asynchrony.update_weights_interval}. Fix: make it one, or leave --eval-num-engines out."
        )
    if config.serving.serve_rollout:
        problems.append(
            f"{flag_name} does not go with --serve-rollout: agents of training and evaluation ask the same endpoint,"
            " which has one set of engines. Fix: drop one of them."
        )
    return problems


def _mixing_problems(config: ConfigTree) -> list[str]:
    """What does not go with answers that several weights have a part in."""
    flag_name = "--async-mode full" if config.asynchrony.is_full else "--partial-rollout"
    problems = []
    if config.loss.use_rollout_routing_replay:
        problems.append(
            f"--use-rollout-routing-replay does not go with {flag_name}: an answer goes on with other weights, whose"
            " routers choose other experts for what was there before. Fix: drop one of them."
        )
    if config.rollout.rollout_function_path:
        problems.append(
            f"--rollout-function-path makes whole rollouts, and {flag_name} has groups that outlive one. Fix: drop one"
            " of them; --async-mode one-step goes with it."
        )
    if config.serving.serve_rollout and config.asynchrony.partial_rollout:
        problems.append(
            "--serve-rollout does not go with --partial-rollout: agents would wait for their answers through a whole"
            " train step. Fix: drop one of them; --async-mode full goes with it."
        )
    return problems


def _pause_problems(config: ConfigTree) -> list[str]:
    """--update-weight-pause-mode in_place under running answers, without anything that bears its error."""
    loss = config.loss
    bears = loss.use_tis or loss.use_rollout_logprobs or loss.loss_type != "policy_loss"
    if config.asynchrony.is_full and config.pause_mode == "in_place" and not bears:
        return [
            (
                "--update-weight-pause-mode in_place goes on with a cache of the old weights, so that log-probs of"
                " engine and trainer differ; --no-use-tis leaves that uncorrected. Fix: retract, --use-tis or"
                " --use-rollout-logprobs."
            )
        ]
    return []


def _rolling_problems(config: ConfigTree) -> list[str]:
    """--update-weight-rolling where an engine cannot take weights up by itself, or none is in the others' way."""
    sync, flag_name = config.sync, "--update-weight-rolling"
    if not sync.update_weight_rolling:
        return []
    if not config.asynchrony.is_full:
        why = "nothing is generated during a sync, which it only makes longer"
        return [f"{flag_name} needs --async-mode full: without it {why}. Fix: add that, or drop this."]
    if sync.sends_adapters:
        return [f"{flag_name} does nothing with --update-weight-mode adapter: no engine pauses. Fix: drop it."]
    row = sync.mode_row or sync.transport_row
    if row is not None and row.loads_from is not None:
        return []
    name = "broadcast, the default" if row is None else row.name
    why = f"{flag_name} does not go with --update-weight-transport {name}: all engines take in what is sent at once."
    return [f"{why} Fix: --update-weight-transport disk, --update-weight-mode delta, or drop it."]


def _over_sampling_problems(config: ConfigTree) -> list[str]:
    """--over-sampling-batch-size and --buffer-filter-path, where there are never more groups than are wanted."""
    rollout, asynchrony = config.rollout, config.asynchrony
    size, problems = rollout.over_sampling_batch_size, []
    if asynchrony.is_full and size:
        problems.append(
            f"--over-sampling-batch-size {size} does nothing with --async-mode full, which works on as many prompts as"
            " --max-staleness allows. Fix: drop it."
        )
    elif size and not (
        rollout.dynamic_sampling_filter_path or rollout.buffer_filter_path or asynchrony.partial_rollout
    ):
        problems.append(
            "--over-sampling-batch-size does nothing without --dynamic-sampling-filter-path, --buffer-filter-path or"
            " --partial-rollout."
        )
    if rollout.buffer_filter_path and not size and not asynchrony.is_full:
        problems.append(
            "--buffer-filter-path has nothing to choose from without --over-sampling-batch-size above"
            " --rollout-batch-size. Fix: add it."
        )
    return problems
