"""slime's own flags and functions: taken as ours with a notice where that is honest, refused where it is not."""

from __future__ import annotations

import pytest

from arguments import build_parser, parse_args
from slime_like.config.asynchrony import ASYNC_MODES
from slime_like.config.reward import REWARD_TYPES
from slime_like.config.slime_flags.refused import REFUSED
from slime_like.config.slime_flags.taken import BUILT_IN, IDLE_WITHOUT, SAID_ANYWAY, take_idle, take_slimes
from slime_like.errors import ConfigError
from slime_like.utils.user_functions import load_function
from tests.unit.config.test_compat_flags import BASE

FILTER = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"


def command_line(*words: str, without: tuple[str, ...] = ()) -> list[str]:
    flags = {name: value for name, value in BASE.items() if name not in without}
    return [*(word for name, value in flags.items() for word in (name, *(value or "").split())), *words, "--plan"]


@pytest.mark.parametrize("equals", [False, True])
def test_a_built_in_function_becomes_ours(equals: bool):
    words = [f"--dynamic-sampling-filter-path={FILTER}"] if equals else ["--dynamic-sampling-filter-path", FILTER]
    command = parse_args(command_line(*words))
    ours = "slime_like.rollout.filters.reward_nonzero_std"
    assert command.config.rollout.dynamic_sampling_filter_path == ours
    assert any(FILTER in note and ours in note for note in command.notes)


def test_what_stands_for_a_built_in_function_is_there():
    for ours in BUILT_IN.values():
        if ours[:1] == ("--rm-type",):
            assert ours[1] in REWARD_TYPES
        elif ours[:1] == ("--async-mode",):
            assert ours[1] in ASYNC_MODES
        elif ours:
            load_function(ours[1], num_positional=2, flag=ours[0])


def test_the_supervised_rollout_needs_the_supervised_loss():
    path = "slime.rollout.sft_rollout.generate_rollout"
    with pytest.raises(ConfigError, match=f"--rollout-function-path {path} needs --loss-type sft_loss"):
        parse_args(command_line("--rollout-function-path", path))


@pytest.mark.parametrize(
    ("name", "ours"),
    [("qwen", "all"), ("qwen3", "all"), ("qwen3_5", "all"), ("distill_qwen", "last"), ("last", "last")],
)
def test_masks_of_slimes_are_ours_whatever_the_template(name: str, ours: str):
    without = ("--eval-prompt-data", "--eval-interval", "--use-kl-loss", "--n-samples-per-prompt")
    line = command_line("--loss-type", "sft_loss", "--n-samples-per-prompt", "1", without=without)
    command = parse_args([*line, "--loss-mask-type", name])
    assert command.config.data.loss_mask_type == ours
    noted = [note for note in command.notes if "--loss-mask-type" in note]
    assert noted == [] if name == ours else f"{name} is taken as --loss-mask-type {ours}" in noted[0]


def test_a_mask_is_of_supervised_conversations():
    with pytest.raises(ConfigError, match="--loss-mask-type says what .* without --loss-type sft_loss"):
        parse_args(command_line("--loss-mask-type", "qwen3"))


def test_a_function_of_slimes_that_is_not_built_in_is_refused_with_the_closest():
    path = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero"
    with pytest.raises(ConfigError, match="is slime's own function.*Did you mean slime.*nonzero_std"):
        parse_args(command_line("--dynamic-sampling-filter-path", path))


@pytest.mark.parametrize(
    ("words", "is_taken"),
    [
        (["--distributed-backend", "nccl"], True),
        (["--distributed-backend", "gloo"], False),
        (["--distributed-backend=gloo"], False),
        (["--check-weight-update-equal"], True),
        (["--check-weight-update-equal", "yes"], False),
        (["--rollout-data-transport", "nixl"], False),
        (["--http-proxy", "http://x"], True),
        (["--train-env-vars", '{"A": "1"}'], False),
    ],
)
def test_only_what_is_done_anyway_is_taken(words: list[str], is_taken: bool):
    taken = take_slimes(["--lr", "1", *words, "--seed", "2"])
    assert taken.argv == ["--lr", "1", "--seed", "2"]
    assert (len(taken.notes), len(taken.problems)) == ((1, 0) if is_taken else (0, 1))
    assert all("Fix: " in problem for problem in taken.problems)


def test_what_belongs_to_an_absent_switch_is_a_notice_and_refused_beside_it():
    words = ["--wandb-project", "x", "--rollout-health-check-interval=5"]
    rest, notes = take_idle(["--lr", "1", *words])
    assert rest == ["--lr", "1"] and [note.split()[0] for note in notes] == [
        words[0],
        "--rollout-health-check-interval",
    ]
    assert take_idle(["--use-wandb", *words[:2]]) == (["--use-wandb", *words[:2]], [])
    assert any("--wandb-project changes nothing" in note for note in parse_args(command_line(*words)).notes)
    with pytest.raises(ConfigError) as refused:
        parse_args(command_line("--use-wandb", *words[:2]))
    assert len(refused.value.problems) == 2


def test_no_flag_is_two_things():
    known = {option for action in build_parser()._actions for option in action.option_strings}
    assert SAID_ANYWAY.keys() & (known | REFUSED.keys()) == set()
    assert {flag for flag, _ in BUILT_IN} <= known
    assert IDLE_WITHOUT.keys() | set(IDLE_WITHOUT.values()) <= REFUSED.keys()


def test_a_file_says_it_as_flags_do(tmp_path):
    file = tmp_path / "run.toml"
    anyway = 'distributed-backend = "nccl"\nuse-rollout-entropy = true\n'
    file.write_text(f'{anyway}[rollout]\ndynamic-sampling-filter-path = "{FILTER}"\n')
    command = parse_args(command_line("--config", str(file)))
    assert command.config.rollout.dynamic_sampling_filter_path == "slime_like.rollout.filters.reward_nonzero_std"
    assert sum(
        note.startswith(("--distributed-backend nccl ", "--use-rollout-entropy ", "--dynamic-sampling-filter-path "))
        for note in command.notes
    ) == 3  # fmt: skip
    file.write_text('distributed-backend = "gloo"\n[rollout]\nrollout-function-path = "slime.rollout.x.y"\n')
    with pytest.raises(ConfigError) as raised:
        parse_args(command_line("--config", str(file)))
    assert len(raised.value.problems) == 2
