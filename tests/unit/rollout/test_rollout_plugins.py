"""The user's functions of the rollout side are found before anything starts, and mistakes name their flag."""

from __future__ import annotations

import pytest

from slime_like.errors import PluginError
from slime_like.rollout.filters import reward_nonzero_std
from slime_like.rollout.rollout_plugins import load_rollout_plugins
from tests.unit.rollout import user_functions

USER = "tests.unit.rollout.user_functions."


def test_nothing_is_loaded_where_no_flag_is_given(make_config):
    plugins = load_rollout_plugins(make_config())
    assert (plugins.reward, plugins.group_filter, plugins.generate) == (None, None, None)


def test_each_flag_loads_its_function(make_config):
    path = "slime_like.rollout.filters.reward_nonzero_std"
    plugins = load_rollout_plugins(
        make_config(rm_type=None, custom_rm_path=USER + "length_reward", dynamic_sampling_filter_path=path)
    )
    assert (plugins.reward, plugins.group_filter) == (user_functions.length_reward, reward_nonzero_std)


@pytest.mark.parametrize(
    ("flag", "path"),
    [
        ("custom_rm_path", "no_such_module.reward"),
        ("custom_rm_path", USER + "no_such_function"),
        ("dynamic_sampling_filter_path", "no_such_module.keep"),
        ("custom_generate_function_path", USER + "length_reward"),  # takes two arguments, not four
    ],
)
def test_a_mistake_names_the_flag_and_the_path(make_config, flag: str, path: str):
    with pytest.raises(PluginError) as raised:
        load_rollout_plugins(make_config(**({"rm_type": None} if flag == "custom_rm_path" else {}), **{flag: path}))
    assert f"--{flag.replace('_', '-')}" in str(raised.value) and path in str(raised.value)
