"""The user's own advantages, losses and means are found before anything starts, and mistakes name their flag."""

from __future__ import annotations

import dataclasses

import pytest

from slime_like.algorithms.loss_plugins import LossPlugins, load_loss_plugins
from slime_like.config.loss import LossConfig
from slime_like.errors import PluginError

#: Flag -> (field, arguments that it is called with).
FLAGS = {
    "custom_advantage_function_path": ("advantage", 2),
    "custom_loss_function_path": ("loss", 3),
    "custom_tis_function_path": ("tis", 5),
    "custom_pg_loss_reducer_function_path": ("pg_reducer", 2),
}


def test_nothing_is_loaded_where_no_flag_is_given():
    assert load_loss_plugins(LossConfig()) == LossPlugins()


@pytest.mark.parametrize(("flag", "field"), [(flag, field) for flag, (field, _) in FLAGS.items()])
def test_a_path_that_leads_nowhere_names_its_flag(flag: str, field: str):
    with pytest.raises(PluginError, match=f"--{flag.replace('_', '-')}.*no_such_module"):
        load_loss_plugins(dataclasses.replace(LossConfig(), **{flag: "no_such_module.function"}))
    assert getattr(LossPlugins(), field) is None


@pytest.mark.parametrize("flag", [flag for flag, (_, number) in FLAGS.items() if number > 2])
def test_a_function_that_takes_too_few_arguments_is_refused(flag: str):
    with pytest.raises(PluginError, match=f"--{flag.replace('_', '-')}"):
        load_loss_plugins(
            dataclasses.replace(LossConfig(), **{flag: "tests.unit.rollout.user_functions.length_reward"})
        )


def test_the_function_itself_is_given_back():
    from tests.unit.rollout.user_functions import length_reward

    plugins = load_loss_plugins(
        LossConfig(custom_advantage_function_path="tests.unit.rollout.user_functions.length_reward")
    )
    assert plugins.advantage is length_reward
