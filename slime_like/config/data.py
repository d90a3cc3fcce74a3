"""Data: which prompts, in which order, and for how long."""

from __future__ import annotations

import dataclasses
import json
import os
import re

from slime_like.config.base import flag

_SLICE = re.compile(r"^(?P<path>.*)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]$")


#: Beginnings of --prompt-data that name no file: rollout/agents/sources.py.
GENERATED = ("seeds:", "rg:")


def names_file(path: str) -> bool:
    """Whether prompts stand in a file, and are not made as they are needed."""
    return not path.startswith(GENERATED)


def split_slice(path: str) -> tuple[str, slice]:
    """`data.jsonl@[10:20]` -> ("data.jsonl", slice(10, 20)); without a slice, all rows."""
    match = _SLICE.match(path)
    if not match:
        return path, slice(None)
    return match["path"], slice(*(int(match[k]) if match[k] else None for k in ("start", "stop")))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Prompts and how long to run"""

    prompt_data: str | None = flag(
        None,
        help=(
            "JSONL, or Parquet, of prompts; 'file.jsonl@[10:20]' takes rows 10 to 19. Without a file: 'seeds:1000' for"
            " environments that ask questions of their own, 'rg:chain_sum?min_terms=2' for tasks of reasoning-gym."
        ),
    )
    data_source_path: str | None = flag(
        None, help="module.Class(args, tokenizer) with row_at(position), instead of --prompt-data: docs/hooks.md."
    )
    input_key: str = flag("input", help="Key of the prompt: a string, or a list of chat messages.")
    label_key: str | None = flag(None, help="Key of the reference answer handed to the reward.")
    metadata_key: str = flag("metadata", help="Key of a dict handed to the reward; may be absent.")
    tool_key: str = flag(
        "tools", help="Key of a list of tools (or that list as JSON text) handed to the chat template; may be absent."
    )
    response_key: str = flag(
        "response",
        help=(
            "Key of the answer to imitate, with --loss-type sft_loss; rows without it are conversations of many turns."
        ),
    )
    loss_mask_type: str | None = flag(
        None,
        choices=("all", "last"),
        help=(
            "--loss-type sft_loss: every row's --input-key is a conversation, of which all of the assistant's turns are"
            " trained, or only the last. Default: all, in rows without --response-key. docs/supervised.md."
        ),
    )
    apply_chat_template: bool = flag(False, help="Render the prompt with the tokenizer's chat template.")
    apply_chat_template_kwargs: str = flag("{}", help="JSON object of extra arguments for the chat template.")
    rollout_shuffle: bool = flag(False, help="Shuffle the rows of each epoch by --rollout-seed and the epoch.")
    rollout_seed: int = flag(42, help="Seed of shuffling and sampling.", least=0)
    rollout_max_prompt_len: int | None = flag(
        None, help="Leave out prompts of more tokens; the count is printed.", least=1
    )
    num_rollout: int | None = flag(None, help="Rollout steps to do.", least=0)
    num_epoch: int | None = flag(None, help="Passes over the data, instead of --num-rollout.", least=1)

    @property
    def chat_template_kwargs(self) -> dict:
        """--apply-chat-template-kwargs as a dict."""
        return json.loads(self.apply_chat_template_kwargs)

    def problems(self) -> list[str]:
        """What is impossible about the data flags."""
        problems = []
        if (self.num_rollout is None) == (self.num_epoch is None):
            problems.append("give exactly one of --num-rollout and --num-epoch.")
        for name in ("num_rollout", "num_epoch"):
            if getattr(self, name) is not None and getattr(self, name) < 0:
                problems.append(f"--{name.replace('_', '-')} {getattr(self, name)}: must not be negative.")
        if self.data_source_path and self.rollout_shuffle:
            problems.append(
                "--rollout-shuffle does nothing with --data-source-path, which has its own order. Fix: drop it."
            )
        if self.data_source_path and self.prompt_data:
            problems.append("--data-source-path and --prompt-data exclude each other.")
        try:
            if not isinstance(self.chat_template_kwargs, dict):
                raise ValueError("not an object")
        except (ValueError, RecursionError) as error:
            problems.append(f"--apply-chat-template-kwargs is no JSON object: {error}.")
        return problems

    def missing_files(self) -> list[str]:
        """Paths that do not exist."""
        if self.data_source_path:
            return []
        if not self.prompt_data:
            return ["--prompt-data is missing: a JSONL or Parquet file of prompts."]
        path, _ = split_slice(self.prompt_data)
        return [] if os.path.isfile(path) or not names_file(path) else [f"--prompt-data {path}: no such file."]
