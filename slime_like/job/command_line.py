"""Command line -> RunConfig: assembles the parser from the config groups, lists every problem at once.

Needs neither torch nor Ray nor SGLang, so that `--help` and `--plan` answer at once.
"""

from __future__ import annotations

import dataclasses
import os

from slime_like.config.async_rules import corrected
from slime_like.config.base import ProblemParser, add_flags, from_namespace, make_parser, parse
from slime_like.config.checkpoint_rules import with_own_checkpoints
from slime_like.config.custom import read_custom_config
from slime_like.config.eval_sets import read_eval_sets
from slime_like.config.file import config_paths, read_config_files
from slime_like.config.hf_model import disagreements, hf_notes, model_from_hf, read_hf_config
from slime_like.config.run import GROUPS, RunConfig
from slime_like.config.slime_flags.notices import notices
from slime_like.config.slime_flags.refused import take_refused
from slime_like.config.slime_flags.taken import take_idle, take_slimes
from slime_like.errors import ConfigError
from slime_like.sglang_backend.server_args import check_flags, merge_flags, present_names

DESCRIPTION = "Post-train a language model with RL: Megatron trains, SGLang generates, Ray places."


@dataclasses.dataclass(frozen=True)
class Command:
    """What was asked for: the run, and whether only its plan."""

    config: RunConfig
    plan: str | None  # None, "text" or "json"
    notes: tuple[str, ...]  # for the user: what was derived, what could not be checked


def build_parser() -> ProblemParser:
    """Every flag of every group."""
    parser = make_parser(DESCRIPTION)
    for group in GROUPS.values():
        add_flags(parser, group)
    parser.add_argument(
        "--config",
        nargs="+",
        action="extend",
        metavar="FILE",
        help=(
            "TOML file of flags (num-rollout = 3, flat or in tables named as in config.json), or the config.json of a"
            " run. Of several a later one wins, and flags win over all. Paths in it are relative to the current"
            " directory."
        ),
    )
    parser.add_argument(
        "--plan",
        nargs="?",
        const="text",
        choices=("text", "json"),
        help="Print what would run where, and exit. Starts nothing, needs no checkpoint.",
    )
    return parser


def wants_json(argv: list[str]) -> bool:
    """Whether a command line asks for its plan as JSON, also where it cannot be parsed: its problems are JSON then."""
    return "--plan=json" in argv or ("--plan", "json") in zip(argv, argv[1:], strict=False)


def parse_args(argv: list[str], *, has_data: bool = True) -> Command:
    """Parse and check a command line and its config files. Raises ConfigError with every problem found.

    has_data: whether it is a run's, which reads --prompt-data.
    """
    parser = build_parser()
    files, typed = read_config_files(config_paths(argv)), argv
    parser.set_defaults(**files.values)
    known = {option for action in parser._actions for option in action.option_strings}
    argv, idle_notes = take_idle(argv)
    argv, refused = take_refused(argv)
    slimes = take_slimes(argv)
    argv, refused = slimes.argv, refused + slimes.problems + files.slimes.problems
    argv, sglang_flags = _take_sglang_flags(argv, known)
    try:
        namespace = parse(parser, argv)
    except ConfigError as error:
        raise ConfigError(files.problems + refused + error.problems) from None
    if files.problems:
        raise ConfigError(files.problems + refused)
    groups = {name: from_namespace(group, namespace) for name, group in GROUPS.items()}
    sglang_flags, renamed = present_names(merge_flags(files.sglang, sglang_flags))
    eval_problems: list[str] = []
    if (path := groups["eval"].eval_config) and (namespace.plan is None or os.path.isfile(path)):
        eval_sets, eval_problems = read_eval_sets(path)
        groups["eval"] = dataclasses.replace(groups["eval"], eval_sets=eval_sets)
    groups["engine"] = dataclasses.replace(groups["engine"], sglang=sglang_flags)
    config, problems, notes = _with_architecture(corrected(with_own_checkpoints(RunConfig(**groups))))
    if (path := config.rollout.custom_config_path) and (namespace.plan is None or os.path.isfile(path)):
        custom, custom_problems = read_custom_config(path)
        config, problems = dataclasses.replace(config, custom=custom), problems + custom_problems
    sglang_problems, sglang_notes = check_flags(sglang_flags)
    problems += refused + slimes.problems_with(config) + files.slimes.problems_with(config)
    problems += eval_problems + config.problems() + sglang_problems
    if namespace.plan is None:
        problems += config.missing_files(data=has_data)
    if problems:
        raise ConfigError(files.with_origins(list(dict.fromkeys(problems)), typed))
    return Command(
        config,
        namespace.plan,
        (
            *files.notes_for(typed),
            *files.slimes.notes,
            *slimes.notes,
            *idle_notes,
            *notes,
            *renamed,
            *sglang_notes,
            *notices(config),
        ),
    )


def _take_sglang_flags(argv: list[str], known: set[str]) -> tuple[list[str], dict]:
    """Split off --sglang-<name> flags that are the engine's own: name -> value, list of values, or True."""
    rest: list[str] = []
    flags: dict = {}
    values: list[str] | None = None
    for text in argv:
        if text.startswith("--"):
            name, equals, value = text.partition("=")
            if name.startswith("--sglang-") and name not in known:
                values = [value] if equals else []
                flags[name.removeprefix("--sglang-").replace("-", "_")] = values
                continue
            values = None
        (rest if values is None else values).append(text)
    return rest, {name: True if not v else v[0] if len(v) == 1 else v for name, v in flags.items()}


def _with_architecture(config: RunConfig) -> tuple[RunConfig, list[str], list[str]]:
    """The config with a complete architecture, from flags or from --hf-checkpoint; both must agree."""
    folder, flags = config.checkpoint.hf_checkpoint, config.model
    if not folder or not os.path.isfile(os.path.join(folder, "config.json")):
        if not flags.is_known:
            return (
                config,
                [
                    (
                        "the architecture is unknown: give --hf-checkpoint (a folder with config.json), or Megatron's"
                        " model flags (source scripts/models/<name>.sh)."
                    )
                ],
                [],
            )
        return config, [], []
    try:
        hf = read_hf_config(folder)
        from_checkpoint = model_from_hf(hf, flags)
    except ConfigError as error:
        return config, error.problems, []
    if not flags.is_known:
        return (
            dataclasses.replace(config, model=from_checkpoint),
            [],
            ["architecture taken from --hf-checkpoint", *hf_notes(hf)],
        )
    return config, disagreements(flags, from_checkpoint) if not flags.problems() else [], hf_notes(hf)
