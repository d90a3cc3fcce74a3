"""What --env may say."""

from __future__ import annotations

import pytest

from slime_like.errors import PluginError
from slime_like.rollout.agents.registry import load_environment, split_arguments
from tests.unit.rollout.agents.environments import Echo

HERE = "tests.unit.rollout.agents.environments"


def test_arguments_are_json_where_they_can_be():
    assert split_arguments("a:b?x=1&y=two&z=[1,2]&on=true&empty=") == (
        "a:b",
        {"x": 1, "y": "two", "z": [1, 2], "on": True, "empty": ""},
    )
    assert split_arguments("openenv:http://host:8000") == ("openenv:http://host:8000", {})


def test_a_class_by_its_path():
    environment = load_environment(f"{HERE}:Echo?turns=7")()
    assert isinstance(environment, Echo) and environment.left == 7


def test_an_adapter_by_its_name():
    environment = load_environment("openenv:http://host:8000/?field=text")()
    assert (environment._url, environment._field) == ("http://host:8000", "text")


@pytest.mark.parametrize(
    "spec, message",
    [
        ("textarea", "Did you mean textarena?"),
        (f"{HERE}:Ecco", "It has: Echo"),
        (f"{HERE}:NoStep", r"NoStep has no step\(\)"),
        (f"{HERE}:Echo?turn=3", "unexpected keyword argument 'turn'; its signature is"),
        ("nowhere.at.all:Env", "no module 'nowhere'"),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(spec, message):
    with pytest.raises(PluginError, match=message):
        load_environment(spec)
