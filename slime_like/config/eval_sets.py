"""--eval-config: evaluation sets with settings of their own, in slime's YAML."""

from __future__ import annotations

import dataclasses
import difflib
import math
import typing
from typing import Any

import yaml

from slime_like.config.evaluation import EvalSet
from slime_like.config.reward import reward_type_problem

#: Settings that a set may have of its own, and `defaults` for all of them.
_SETTINGS = tuple(field.name for field in dataclasses.fields(EvalSet) if field.name not in ("name", "path"))
_LEAST: dict[str, float] = {
    "n_samples_per_eval_prompt": 1,
    "temperature": 0,
    "max_response_len": 1,
    "max_prompt_len": 1,
    "max_context_len": 1,
    "min_new_tokens": 0,
    "top_p": 0,
    "top_k": -1,
}


def read_eval_sets(path: str) -> tuple[tuple[EvalSet, ...], list[str]]:
    """(the sets, what is wrong with the file). A set's own settings go before `defaults`.

    eval:
      defaults: {n_samples_per_eval_prompt: 4}
      datasets:
        - {name: aime, path: aime.jsonl, temperature: 0.6, rm_type: math}
    """
    where = f"--eval-config {path}"
    try:
        with open(path, "rb") as file:
            content = yaml.safe_load(file)
    except OSError as error:
        return (), [f"{where}: {(error.strerror or 'cannot be read').lower()}."]
    except RecursionError:
        return (), [f"{where}: is nested too deeply to be read."]
    except (ValueError, yaml.YAMLError) as error:
        return (), [f"{where}: {' '.join(str(error).split())}."]
    table = content.get("eval", content) if isinstance(content, dict) else None
    if not isinstance(table, dict) or not isinstance(table.get("datasets"), list) or not table["datasets"]:
        return (), [f"{where}: needs eval: with datasets:, a list of sets with name and path."]
    problems = [f"{where}: unknown key {key!r}. Known: defaults, datasets." for key in table if key not in _TOP]
    defaults = table.get("defaults") or {}
    problems += _setting_problems(f"{where}: defaults", defaults, _SETTINGS)
    sets: dict[str, EvalSet] = {}
    for number, one in enumerate(table["datasets"], 1):
        place = f"{where}: data set {number}"
        wrong = _setting_problems(place, one, ("name", "path", *_SETTINGS))
        if not wrong and not (isinstance(one.get("name"), str) and isinstance(one.get("path"), str)):
            wrong = [f"{place}: needs a name and a path."]
        if not wrong and one["name"] in sets:
            wrong = [f"{place}: the name {one['name']} is given twice."]
        problems += wrong
        if not problems:
            sets[one["name"]] = EvalSet(**(defaults | one))
    return (() if problems else tuple(sets.values())), problems


_TOP = ("defaults", "datasets")
_HINTS = typing.get_type_hints(EvalSet)


def _setting_problems(where: str, settings: Any, known: tuple[str, ...]) -> list[str]:
    if not isinstance(settings, dict):
        return [f"{where}: is no table of settings."]
    problems = []
    for key, value in settings.items():
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            problems.append(f"{where}: unknown key {key!r}." + (f" Did you mean {close[0]}?" if close else ""))
        elif not _fits(key, value):
            problems.append(f"{where}: {key} is {value!r}, which does not fit.")
        elif key == "rm_type" and (problem := reward_type_problem(value)):
            problems.append(f"{where}: {problem}")
    return problems


def _fits(key: str, value: Any) -> bool:
    hint = _HINTS[key]
    if hint is dict:
        return isinstance(value, dict)
    kind = next(one for one in (typing.get_args(hint) or (hint,)) if one is not type(None))
    if typing.get_origin(kind) is list:
        return isinstance(value, list) and all(isinstance(item, typing.get_args(kind)[0]) for item in value)
    if isinstance(value, bool):
        return False
    if kind is str:
        return isinstance(value, str)
    is_number = isinstance(value, (int, float) if kind is float else int) and math.isfinite(value)
    return is_number and value >= _LEAST[key] and not (key == "top_p" and not 0 < value <= 1)
