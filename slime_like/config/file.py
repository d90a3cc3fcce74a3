"""Config files: `--config run.toml` says what flags say, key = flag name; a run's config.json can be given back.

Flags win.
    num-rollout = 100                  # flat, or under a table named as the config group
    [loss]
    advantage_estimator = "grpo"       # dashes or underscores
    use-kl-loss = true                 # a switch
    [eval]
    eval-prompt-data = ["aime", "aime.jsonl"]
    [sglang]                           # SGLang's own: --sglang-mem-fraction-static
    mem-fraction-static = 0.7

Paths are relative to the current directory, as those of flags are.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import re
import tomllib
import typing
from collections.abc import Sequence
from typing import Any

from slime_like.config.base import ProblemParser, read_value
from slime_like.config.run import GROUPS
from slime_like.config.slime_flags.refused import REFUSED, REFUSED_VALUES
from slime_like.config.slime_flags.taken import SAID_ANYWAY, SlimesOwn, notice_or_refuse, take_slimes
from slime_like.config.transports import choices

_SGLANG = "sglang"
#: Flags that are about the command line itself.
_COMMAND_LINE_ONLY = ("config", "plan", "help")
#: Where a run writes beside its run directory.
_WRITTEN = ("save", "save_hf", "save_debug_rollout_data")


def config_paths(argv: Sequence[str]) -> list[str]:
    """The files of every --config of a command line, in order."""
    parser = ProblemParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", nargs="*", action="extend", default=[])
    return parser.parse_known_args(argv)[0].config


@dataclasses.dataclass
class FileSettings:
    """What the config files of one command line say together; a later file wins over an earlier one.

    values: field name -> value, of the type that its flag gives. sglang: SGLang's own flags, as arguments.py reads
    them.
    origins: flag -> the file and key that it is from. notes: flag -> (file, what to tell of it unless the command line
    has that flag).
    """

    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    sglang: dict[str, Any] = dataclasses.field(default_factory=dict)
    problems: list[str] = dataclasses.field(default_factory=list)
    origins: dict[str, str] = dataclasses.field(default_factory=dict)
    notes: dict[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    #: slime's own flags and functions among them
    slimes: SlimesOwn = dataclasses.field(default_factory=SlimesOwn)

    def with_origins(self, problems: Sequence[str], argv: Sequence[str]) -> list[str]:
        """The problems, each with the files and keys of the flags in it that the command line itself does not have."""
        here = _flags_of(argv)
        named = []
        for problem in problems:
            flags = dict.fromkeys(re.findall(r"--[a-z0-9][a-z0-9-]*[a-z0-9]", problem))
            origins = [self.origins[name] for name in flags if name in self.origins and name not in here]
            named.append(problem + (f" (from {'; '.join(origins)})" if origins else ""))
        return named

    def notes_for(self, argv: Sequence[str]) -> list[str]:
        """What to tell with this command line."""
        here = _flags_of(argv)
        return [note for name, (_, note) in self.notes.items() if name not in here]


def read_config_files(paths: Sequence[str]) -> FileSettings:
    """Read files in order. Whatever is wrong is in `problems`, with file and key."""
    settings = FileSettings()
    for path in paths:
        tables, problem = _load(path)
        if problem:
            settings.problems.append(f"--config {path}: {problem}")
        else:
            _FileReader(path, settings).read(_given_back(path, tables, settings))
    return settings


def _load(path: str) -> tuple[dict, str]:
    """(a file's content, what is wrong with it)."""
    kind = os.path.splitext(path)[1]
    if kind not in (".toml", ".json"):
        return {}, "is neither a .toml file nor a .json file."
    try:
        with open(path, "rb") as file:
            content = tomllib.load(file) if kind == ".toml" else json.load(file)
    except OSError as error:
        return {}, f"{(error.strerror or 'cannot be read').lower()}."
    except RecursionError:
        return {}, "is nested too deeply to be read."
    except ValueError as error:  # TOMLDecodeError, JSONDecodeError, UnicodeDecodeError
        return {}, f"{error}."
    return (content, "") if isinstance(content, dict) else ({}, "holds no table.")


def _given_back(path: str, tables: dict, settings: FileSettings) -> dict:
    """The config.json that a run wrote, without what belongs to that run alone; any other content unchanged.

    A new run gets a run directory of its own, and what was filled in from the old one (cluster.build.resolve) is filled
    in anew.
    """
    if (
        "role" not in tables
        or not isinstance(tables.get("observability"), dict)
        or not isinstance(tables.get("sync"), dict)
    ):
        return tables
    tables = {
        name: dict(table) if isinstance(table, dict) else table
        for name, table in tables.items()
        if name not in ("role", "custom")  # the latter is read again from --custom-config-path
    }
    if isinstance(tables.get("eval"), dict):
        tables["eval"].pop("eval_sets", None)  # read again from --eval-config
    sync, old = tables["sync"], tables["observability"].pop("run_dir", None)
    if old and "run_dir" not in settings.values:
        settings.notes["--run-dir"] = path, f"{path} is of the run in {old}: this run gets a directory of its own"
    if sync.get("update_weight_transport") not in choices():  # a delta's has no name among the flags
        sync["update_weight_transport"] = None
    if old and str(sync.get("update_weight_disk_dir") or "").startswith(os.path.join(old, "")):
        sync["update_weight_disk_dir"] = None
    for name in _WRITTEN:
        for table in tables.values():
            if isinstance(table, dict) and table.get(name):
                text = f"{_flag(name)} {table[name]} is that of {path}: what the run before wrote there may be replaced"
                settings.notes[_flag(name)] = path, text
    return tables


class _FileReader:
    """Reads one file's keys into the settings."""

    def __init__(self, path: str, settings: FileSettings):
        self._path, self._settings = path, settings
        self._seen: dict[str, str] = {}  # field or SGLang flag -> the key that gave it

    def read(self, tables: dict) -> None:
        """Every key; a table is a group's, or SGLang's."""
        for key, value in tables.items():
            if not isinstance(value, dict):
                self._entry(None, key, value)
            elif key == _SGLANG:
                self._sglang_table(value, f"[{key}]")
            elif key in GROUPS:
                for name, entry in value.items():
                    if key == "engine" and name == _SGLANG and isinstance(entry, dict):
                        self._sglang_table(entry, "[engine.sglang]")
                    else:
                        self._entry(key, name, entry)
            else:
                close = difflib.get_close_matches(key, [*GROUPS, _SGLANG], n=1)
                hint = f"Did you mean [{close[0]}]?" if close else f"Known: {', '.join([*GROUPS, _SGLANG])}."
                self._problem(f"[{key}]", f"unknown table. {hint}")

    def _sglang_table(self, table: dict, name: str) -> None:
        for key, value in table.items():
            self._entry("engine", f"{_SGLANG}_{key}", value, where=f"{name} {key}")

    def _entry(self, group: str | None, key: str, value: Any, where: str | None = None) -> None:
        where = where or (f"[{group}] {key}" if group else key)
        name = key.replace("-", "_")
        if name not in self._seen and _flag(name) in SAID_ANYWAY:
            self._seen[name] = where
            words = [str(item) for item in (value if isinstance(value, list) else [value])]
            if value is not False:  # a switch that is off says nothing
                notice_or_refuse(_flag(name), [] if value is True else words, self._settings.slimes)
            return
        problem = self._key_problem(name, where, group) or self._refusal(name, value)
        if problem:
            self._problem(where, problem)
            return
        if name.endswith("_path") and isinstance(value, str) and value.startswith("slime."):
            self._slimes_function(name, value, where)
            return
        self._seen[name] = where
        problems: list[str] = []
        if name in _FIELDS:
            field, hint = _FIELDS[name][1:]
            answer = read_value(field, hint, value, problems)
        else:
            answer = _sglang_value(name, value, problems)
        for problem in problems:
            self._problem(where, problem)
        if problems:
            return
        if name in _FIELDS:
            self._settings.values[name] = answer
        else:
            self._settings.sglang[name.removeprefix("sglang_")] = answer
        self._settings.origins[_flag(name)] = f"{self._path}: {where}"
        if self._settings.notes.get(_flag(name), (self._path, ""))[0] != self._path:
            del self._settings.notes[_flag(name)]  # it was about what an earlier file says

    def _slimes_function(self, name: str, path: str, where: str) -> None:
        """One of slime's own functions: ours in its place."""
        taken = take_slimes([_flag(name), path])
        if taken.argv[:1] != [_flag(name)]:  # else ours is the same flag, and read below
            self._seen[name] = where
        slimes = self._settings.slimes
        slimes.notes += taken.notes
        slimes.is_sft |= taken.is_sft
        for problem in taken.problems:
            self._problem(where, problem)
        if taken.argv:
            ours, value = taken.argv
            self._entry(None, ours.removeprefix("--"), value, where=f"{where} ({ours})")

    def _key_problem(self, name: str, where: str, group: str | None) -> str:
        """Why a key is none, or stands in the wrong place."""
        if name in self._seen:
            return f"is given twice, as {self._seen[name]} before."
        if name in _COMMAND_LINE_ONLY:
            return "is for the command line only."
        if _flag(name) in REFUSED:
            return ""
        home = _FIELDS[name][0] if name in _FIELDS else "engine" if name.startswith("sglang_") else None
        if home is not None:
            return "" if group in (None, home) else f"belongs into [{home}]."
        positive = name.removeprefix("no_")
        if positive != name and positive in _FIELDS:
            return f"is written {positive.replace('_', '-')} = false."
        close = difflib.get_close_matches(name, _FIELDS, n=1)
        return "unknown key." + (
            f" Did you mean {close[0].replace('_', '-')} in [{_FIELDS[close[0]][0]}]?" if close else ""
        )

    def _refusal(self, name: str, value: Any) -> str:
        """Why a flag, or this value of it, is refused; the same as on the command line."""
        flag = _flag(name)
        if flag in REFUSED:
            return f"{flag} is refused: {REFUSED[flag]}"
        texts = [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)]
        return next(
            (
                f"{flag} {text} is refused: {REFUSED_VALUES[flag, text]}"
                for text in texts
                if (flag, text) in REFUSED_VALUES
            ),
            "",
        )

    def _problem(self, where: str, problem: str) -> None:
        self._settings.problems.append(f"{self._path}: {where}: {problem}")


def _sglang_value(name: str, value: Any, problems: list[str]) -> Any:
    """A value for SGLang as the command line gives it: text, a list of texts, or True for a switch."""
    items = value if isinstance(value, list) else [value]
    if isinstance(value, bool):
        return True if value else "false"
    if not items or any(isinstance(item, bool) or not isinstance(item, (str, int, float)) for item in items):
        problems.append(f"{_flag(name)} takes a text, a number, true or false, or a list of texts and numbers.")
        return None
    texts = [str(item) for item in items]
    return texts[0] if len(texts) == 1 else texts


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _flags_of(argv: Sequence[str]) -> set[str]:
    """The flags of a command line; --no-x counts as --x too."""
    flags = {text.partition("=")[0] for text in argv if text.startswith("--")}
    return flags | {"--" + flag.removeprefix("--no-") for flag in flags if flag.startswith("--no-")}


def _fields() -> dict[str, tuple[str, dataclasses.Field, Any]]:
    fields: dict[str, tuple[str, dataclasses.Field, Any]] = {}
    for group, kind in GROUPS.items():
        hints = typing.get_type_hints(kind)
        fields |= {
            field.name: (group, field, hints[field.name])
            for field in dataclasses.fields(kind)
            if "help" in field.metadata
        }
    return fields


#: Field -> its group, its declaration and its type.
_FIELDS = _fields()
