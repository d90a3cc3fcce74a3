"""--custom-config-path: values of the user's own, for the functions of the user's own."""

from __future__ import annotations

import dataclasses
import json
import os
import tomllib

import yaml

from slime_like.config.tree import GROUPS


def read_custom_config(path: str) -> tuple[dict, list[str]]:
    """(the values, what is wrong with them). A key that is one of our fields is refused: two truths about one flag.

    Values must be such as JSON has, since config.json keeps them.
    """
    where = f"--custom-config-path {path}"
    try:
        with open(path, "rb") as file:
            values = tomllib.load(file) if os.path.splitext(path)[1] == ".toml" else yaml.safe_load(file)
    except OSError as error:
        return {}, [f"{where}: {(error.strerror or 'cannot be read').lower()}."]
    except RecursionError:
        return {}, [f"{where}: is nested too deeply to be read."]
    except (ValueError, yaml.YAMLError) as error:
        return {}, [f"{where}: {' '.join(str(error).split())}."]
    if values is None:
        return {}, []
    if not isinstance(values, dict) or not all(isinstance(key, str) and key.isidentifier() for key in values):
        return {}, [f"{where}: must be names with values, each a name that Python takes (args.<name>)."]
    fields = {field.name for group in GROUPS.values() for field in dataclasses.fields(group)}
    problems = [
        f"{where}: {key} is a flag of ours. Fix: --{key.replace('_', '-')}, or a file for --config."
        for key in values
        if key in fields
    ]
    try:
        json.dumps(values)
    except (TypeError, ValueError, RecursionError) as error:
        problems.append(f"{where}: {error}. Fix: texts, numbers, lists and tables only.")
    return ({} if problems else values), problems
