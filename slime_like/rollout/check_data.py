"""The data of a run, read and checked before anything starts: the training prompts and the evaluation sets."""

from __future__ import annotations

import logging

from slime_like.config.data import split_slice
from slime_like.config.reward import BOXED, needs_label, reward_type_problem
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
from slime_like.rollout.rewards import instructions
from slime_like.rollout.rollout_plugins import load_rollout_plugins
from slime_like.rollout.row_files import row_name
from slime_like.rollout.rows import RM_TYPE
from slime_like.rollout.tokenizer import load_tokenizer
from slime_like.rollout.user_data import UserDataSource
from slime_like.utils.chat_templates import try_template

logger = logging.getLogger(__name__)


def check_data(config: RunConfig, *, tokenizer=None) -> DataSource:
    """The training prompts. Starts nothing, and raises what the user got wrong: DataError in tokenizer, training or
    evaluation data, PluginError in a function's path.
    """
    load_rollout_plugins(config)
    if config.agents.env:
        load_environment(config.agents.env)
    tokenizer = tokenizer or load_tokenizer(config.checkpoint.hf_checkpoint or "")
    if config.data.apply_chat_template or config.is_sft or config.plays_episodes:
        try_template(tokenizer, config.data.chat_template_kwargs)
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
        supervised=config.is_sft,
    )
    for one in (source, *sources.values()):
        _tell_of_rows(one)
        _check_tokens(one, config.model.vocab_size)
        if config.uses_engines and config.reward.rm_type:
            _check_rewards(one, config)
    return source


def _tell_of_rows(source: DataSource) -> None:
    """Says aloud which rows are not trained as they stand."""
    count = len(source.rows)
    if source.num_filtered:
        why = "too long for the limit of tokens"
        why += ", or step_loss_mask leaves nothing to train" if source.rows[0].supervised else ""
        total = source.num_filtered + count
        logger.warning("%s: %d of %d prompts are left out: %s", source.path, source.num_filtered, total, why)
    if source.num_cut:
        logger.warning("%s: %d of %d rows are cut at %d tokens", source.path, source.num_cut, count, source.max_tokens)
    num_split = sum(len(row.supervised) > 1 for row in source.rows)
    if num_split:
        logger.warning(
            "%s: %d of %d conversations are several samples (%d in all), because the chat template rewrites what was"
            " said before: docs/supervised.md",
            source.path,
            num_split,
            count,
            sum(len(row.supervised) for row in source.rows),
        )


def _check_tokens(source: DataSource, vocab_size: int) -> None:
    """Raises DataError naming the first row with a token that the model has no embedding for."""
    for row in source.rows:
        tokens = row.supervised[0].tokens if row.supervised else row.tokens
        if len(tokens) and vocab_size and (highest := int(tokens.max())) >= vocab_size:
            raise DataError(
                f"{row_name(split_slice(source.path)[0], row.line)}: the tokenizer of --hf-checkpoint makes token"
                f" {highest} of it, and the model's vocabulary has {vocab_size}. Fix: the model's own tokenizer."
            )


def _user_data(config: RunConfig, tokenizer, limit: int, context: int) -> UserDataSource:
    source = UserDataSource.load(
        config.data,
        config.plugin_args(),
        tokenizer,
        max_prompt_tokens=limit,
        max_tokens=context,
        supervised=config.is_sft,
    )
    if config.data.num_epoch is not None and source.num_rows is None:
        raise DataError(f"{source.path}: --num-epoch needs its num_rows. Fix: --num-rollout, or the attribute.")
    source.prompt_at(0)  # raises now rather than in the first rollout
    return source


def _check_rewards(source: DataSource, config: RunConfig) -> None:
    """Every row has a reward that there is, and what it compares with. Raises DataError naming the line."""
    file = split_slice(source.path)[0]
    with_instructions = []
    for row in source.rows:
        where, kind = row_name(file, row.line), row.metadata.get(RM_TYPE)
        if kind is not None and (problem := reward_type_problem(kind)):
            raise DataError(f"{where}: its rm_type: {problem}")
        kind = str(kind or config.reward.rm_type)
        if kind.removeprefix(BOXED) == instructions.KIND:
            with_instructions.append(row)
        elif not needs_label(kind):
            if not config.reward.rm_url:
                raise DataError(f"{where}: its rm_type {kind} needs --rm-url, where the samples are sent to.")
        elif row.label is None:
            fix = "the row, or --label-key" if source.data.label_key else "--label-key"
            raise DataError(f"{where}: has no label, and --rm-type {kind} compares with one. Fix: {fix}.")
    first = instructions.first_problem([row.metadata for row in with_instructions]) if with_instructions else None
    if first is not None:
        place, problem = first
        raise DataError(
            f"{row_name(file, with_instructions[place].line)}: --rm-type ifbench cannot score it: {problem}. Its"
            f" instructions stand in {source.data.metadata_key!r} (--metadata-key)."
        )
