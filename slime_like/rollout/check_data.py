"""The data of a run, read and checked before anything starts: the training prompts and the evaluation sets."""

from __future__ import annotations

import logging

from slime_like.config.data import split_slice
from slime_like.config.reward import needs_label, reward_type_problem
from slime_like.config.run import RunConfig
from slime_like.errors import DataError
from slime_like.rollout.agents.registry import load_environment
from slime_like.rollout.data_source import (
    ENGINE_RESERVED_TOKENS,
    DataSource,
    context_tokens,
    load_data,
    load_eval_data,
)
from slime_like.rollout.rollout_plugins import load_rollout_plugins
from slime_like.rollout.tokenizer import load_tokenizer
from slime_like.rollout.user_data import UserDataSource

logger = logging.getLogger(__name__)


def check_data(config: RunConfig, *, tokenizer=None) -> DataSource:
    """The training prompts. Starts nothing, and raises what the user got wrong: DataError in tokenizer, training or
    evaluation data, PluginError in a function's path.
    """
    load_rollout_plugins(config)
    if config.agents.env:
        load_environment(config.agents.env)
    tokenizer = tokenizer or load_tokenizer(config.checkpoint.hf_checkpoint or "")
    sources = load_eval_data(config, tokenizer)
    context = context_tokens(config)
    limit = min(
        config.data.rollout_max_prompt_len or context, context - (1 if config.is_sft else ENGINE_RESERVED_TOKENS)
    )
    if config.data.data_source_path:
        return _user_data(config, tokenizer, limit, context)
    source = load_data(
        config.data.prompt_data or "",
        config.data,
        tokenizer,
        max_prompt_tokens=limit,
        max_tokens=context,
        with_response=config.is_sft,
    )
    if config.is_sft:
        _ = source.end_id  # raises now rather than at the first step
    for one in (source, *sources.values()):
        if one.num_filtered:
            logger.warning(
                "%s: %d of %d prompts are left out: too long for the limit of tokens",
                one.path,
                one.num_filtered,
                one.num_filtered + len(one.rows),
            )
        if config.uses_engines and config.reward.rm_type:
            _check_rewards(one, config)
    return source


def _user_data(config: RunConfig, tokenizer, limit: int, context: int) -> UserDataSource:
    source = UserDataSource.load(
        config.data,
        config.plugin_args(),
        tokenizer,
        max_prompt_tokens=limit,
        max_tokens=context,
        with_response=config.is_sft,
    )
    if config.data.num_epoch is not None and source.num_rows is None:
        raise DataError(f"{source.path}: --num-epoch needs its num_rows. Fix: --num-rollout, or the attribute.")
    source.prompt_at(0)  # raises now rather than in the first rollout
    if config.is_sft:
        _ = source.end_id
    return source


def _check_rewards(source: DataSource, config: RunConfig) -> None:
    """Every row has a reward that there is, and the label that it compares with. Raises DataError naming the line."""
    for row in source.rows:
        where, kind = f"{split_slice(source.path)[0]} line {row.line}", row.metadata.get("rm_type")
        if kind is not None and (problem := reward_type_problem(kind)):
            raise DataError(f"{where}: its rm_type: {problem}")
        kind = str(kind or config.reward.rm_type)
        if not needs_label(kind):
            if not config.reward.rm_url:
                raise DataError(f"{where}: its rm_type {kind} needs --rm-url, where the samples are sent to.")
        elif row.label is None:
            fix = "the row, or --label-key" if source.data.label_key else "--label-key"
            raise DataError(f"{where}: has no label, and --rm-type {kind} compares with one. Fix: {fix}.")
