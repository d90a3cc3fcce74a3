"""From --env to something that makes environments."""

from __future__ import annotations

import difflib
import functools
import inspect
import json
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qsl

from slime_like.errors import PluginError
from slime_like.utils.user_functions import load_function

_HERE = "slime_like.rollout.agents.adapters"
#: Name -> (the adapter's class, what pip installs). Each class takes the text behind the colon, and what follows "?".
ADAPTERS = {
    "reasoning-gym": (f"{_HERE}.reasoning_gym:ReasoningGym", "reasoning-gym"),
    "textarena": (f"{_HERE}.textarena:TextArena", "textarena"),
    "skyrl-gym": (f"{_HERE}.skyrl_gym:SkyrlGym", "skyrl-gym"),
    "aviary": (f"{_HERE}.aviary:Aviary", "fhaviary"),
    "gymnasium": (f"{_HERE}.gymnasium:Gymnasium", "gymnasium"),
    "openenv": (f"{_HERE}.openenv:OpenEnv", "slime-like"),
}


def split_arguments(spec: str) -> tuple[str, dict[str, Any]]:
    """`a:b?x=1&y=two` -> ("a:b", {"x": 1, "y": "two"}): values are JSON where they can be."""
    head, _, query = spec.partition("?")
    return head, {name: _value(text) for name, text in parse_qsl(query, keep_blank_values=True)}


def load_environment(spec: str) -> Callable[[], Any]:
    """Makes one environment a call. spec: `name:argument?key=value` of ADAPTERS, or `package.module:Class?key=value`.

    Raises PluginError, also for a class without reset and step or arguments that it does not take.
    """
    head, options = split_arguments(spec)
    name, _, rest = head.partition(":")
    arguments: tuple[str, ...] = ()
    path = head
    if name in ADAPTERS:
        path, package = ADAPTERS[name]
        arguments = (rest,)
        try:
            maker = load_function(path, num_positional=None, flag="--env")
        except PluginError as error:
            raise PluginError(f"{error} Fix: pip install {package} (or slime-like[envs]).") from error
    else:
        if "." not in name and not rest:
            close = difflib.get_close_matches(name, ADAPTERS, n=1)
            hint = f" Did you mean {close[0]}?" if close else ""
            raise PluginError(f"--env {spec}: known are {', '.join(ADAPTERS)}, or package.module:Class.{hint}")
        maker = load_function(path, num_positional=None, flag="--env")
    for method in ("reset", "step"):
        if inspect.isclass(maker) and not callable(getattr(maker, method, None)):
            raise PluginError(f"--env {spec}: {maker.__name__} has no {method}(). Fix: docs/agents.md.")
    try:
        inspect.signature(maker).bind(*arguments, **options)
    except TypeError as error:
        raise PluginError(
            f"--env {spec}: {path} does not take these arguments: {error}; its signature is {inspect.signature(maker)}."
        ) from None
    return functools.partial(maker, *arguments, **options)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
