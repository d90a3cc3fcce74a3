"""What --deterministic refuses, with its reason, and what engines are started with."""

from __future__ import annotations

import pytest

from slime_like.config.deterministic_rules import deterministic_problems, seeded_engine_flags
from slime_like.config.run import RunConfig
from slime_like.errors import ConfigError
from slime_like.job.command_line import parse_args

BASE = [
    "--deterministic", "--plan", "--num-layers", "2", "--hidden-size", "8", "--num-attention-heads", "2",
    "--vocab-size", "16", "--ffn-hidden-size", "16", "--normalization", "RMSNorm", "--disable-bias-linear", "--swiglu",
    "--num-rollout", "2", "--rm-type", "math", "--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1",
]  # fmt: skip


def problems(*flags: str) -> list[str]:
    try:
        parse_args([*BASE, *flags])
    except ConfigError as error:
        return [problem for problem in error.problems if "--deterministic" in problem]
    return []


def test_the_ordinary_run_and_one_step_ahead_are_possible():
    assert problems() == problems("--async-mode", "one-step") == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--async-mode", "full"], "--async-mode full: weights change under running answers"),
        (["--partial-rollout"], "where an answer is ended depends on who was faster"),
        (["--over-sampling-batch-size", "64"], "--over-sampling-batch-size 64"),
        (["--no-save-optim", "--resume", "auto", "--run-dir", "r"], "the optimizer would begin anew"),
        (["--serve-rollout"], "foreign agents"),
        (["--rollout-external", "--rollout-external-engine-addrs", "127.0.0.1:30000"], "engines of somebody else's"),
        (
            ["--update-weights-interval", "2", "--save", "s", "--save-interval", "3"],
            "--save-interval 3, no multiple of --update-weights-interval 2",
        ),
        (["--sglang-enable-deterministic-inference", "false"], "needs --sglang-enable-deterministic-inference"),
    ],
)
def test_what_depends_on_who_was_faster_is_refused(flags, message):
    assert any(message in problem for problem in problems(*flags)), problems(*flags)


def test_engines_of_a_host_without_gpus_have_no_prefix_cache():
    config = parse_args(BASE).config
    assert seeded_engine_flags(config, on_gpu=True) == {"enable_deterministic_inference": True}
    assert seeded_engine_flags(config, on_gpu=False)["disable_radix_cache"] is True
    assert seeded_engine_flags(RunConfig(), on_gpu=False) == {} and deterministic_problems(RunConfig()) == []
