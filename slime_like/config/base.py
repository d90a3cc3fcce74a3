"""Frozen config dataclasses that double as argparse flags.

One rule: the field name *is* the flag name (`rollout_batch_size` <-> `--rollout-batch-size`), so one grep
finds the flag, its default, its help text and every reader.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import sys
import types
import typing

from slime_like.config.bounds import Bounds
from slime_like.errors import ConfigError

#: Characters of a flag's text: paths and JSON have fewer.
_LONGEST_TEXT = 32_768


def flag(
    default=dataclasses.MISSING,
    *,
    help: str,
    choices: tuple | None = None,
    metavar: str | None = None,
    **limits: float,
):
    """Declare one config field that is also a command-line flag. A flag without a default is required.

    limits: the range of a number, in the words of bounds.Bounds (least=0). Numbers are finite in any case.
    """
    metadata = {"help": help, "choices": choices, "metavar": metavar, "bounds": Bounds(**limits)}
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def add_flags(parser: ProblemParser, group_class: type) -> None:
    """Add one argparse group holding every field of `group_class`; the docstring's first line is its title."""
    group = parser.add_argument_group((group_class.__doc__ or group_class.__name__).strip().splitlines()[0])
    hints = typing.get_type_hints(group_class)
    for field in dataclasses.fields(group_class):
        if "help" not in field.metadata:
            continue  # filled by code, not by a flag
        kwargs: dict = {"help": field.metadata["help"].replace("%", "%%"), "dest": field.name}
        base_type, is_list = _scalar_type(hints[field.name])
        if base_type is bool:
            # Not for no_load_optim: that action (Python 3.11) takes every option that begins with --no- for its denial.
            is_denial = field.name.startswith("no_")
            kwargs["action"] = "store_true" if is_denial else argparse.BooleanOptionalAction
        else:
            convert = _Converter(field, base_type, parser.problems)
            kwargs |= {"type": convert, "metavar": field.metadata["metavar"] or convert.metavar}
            if is_list:
                kwargs["nargs"] = "+"
        if field.default_factory is not dataclasses.MISSING:
            kwargs["default"] = field.default_factory()
        elif field.default is not dataclasses.MISSING:
            kwargs["default"] = field.default
        else:
            kwargs["required"] = True
        group.add_argument("--" + field.name.replace("_", "-"), **kwargs)


class ProblemParser(argparse.ArgumentParser):
    """argparse that collects problems and raises ConfigError instead of printing the first one and exiting."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.problems: list[str] = []

    def parse_known_args(self, args=None, namespace=None):
        """argparse's; a lone -- is a problem: argparse (3.11) would leave it out, also of --flag=--, and give []."""
        args = list(sys.argv[1:] if args is None else args)
        for text in args:
            name, equals, value = text.partition("=")
            if text == "--" or (name.startswith("--") and value == "--"):
                self.problems.append(f"{name if equals else 'the command line'}: -- is no value.")
        kept = [text for text in args if text != "--" and not text.endswith("=--")]
        return super().parse_known_args(kept, namespace)

    def error(self, message):
        raise ConfigError([*self.problems, message])


class _Converter:
    """Turns one argument's text into a value; a bad one becomes a problem instead of ending the parse."""

    def __init__(self, field: dataclasses.Field, base_type: type, problems: list[str]):
        self.name, self.base_type, self.problems = "--" + field.name.replace("_", "-"), base_type, problems
        self.choices, self.bounds = field.metadata["choices"], field.metadata["bounds"]
        self.metavar = "{" + ",".join(map(str, self.choices)) + "}" if self.choices else base_type.__name__.upper()

    def __call__(self, text: str):
        try:
            value = self.base_type(text)
        except ValueError:
            self.problems.append(f"{self.name} {shortened(text)} is no {self.base_type.__name__}.")
            return None
        if problem := _text_problem(value) if isinstance(value, str) else self.bounds.problem(value):
            self.problems.append(f"{self.name} {shortened(text) if isinstance(value, str) else text[:60]}: {problem}.")
            return None
        if self.choices and value not in self.choices:
            close = difflib.get_close_matches(text, [str(c) for c in self.choices], n=1)
            self.problems.append(
                f"{self.name} {shortened(text)} is unknown. Known: {', '.join(map(str, self.choices))}."
                + (f" Did you mean {close[0]}?" if close else "")
            )
            return None
        return value


def shortened(value: typing.Any, length: int = 100) -> str:
    """A value as an error shows it: its beginning only."""
    text = repr(value)
    return text if len(text) <= length else f"{text[:length]}… ({len(text)} characters)"


def _text_problem(text: str) -> str:
    """Why a text can be neither a path nor a name: no file system takes NUL, and half a character no file."""
    if len(text) > _LONGEST_TEXT:
        return f"has {len(text)} characters, at most {_LONGEST_TEXT} are taken"
    if "\0" in text:
        return "holds a NUL character"
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"holds what is no UTF-8 text, at character {error.start}"
    return ""


def make_parser(description: str) -> ProblemParser:
    """A parser that takes no abbreviations and raises ConfigError on bad input."""
    return ProblemParser(prog="train.py", description=description, allow_abbrev=False, add_help=True)


def parse(parser: ProblemParser, argv: list[str]) -> argparse.Namespace:
    """Parse; every unknown flag (with the closest known one) and every bad value is listed in one ConfigError."""
    namespace, unknown = parser.parse_known_args(argv)
    known = [option for action in parser._actions for option in action.option_strings]
    strangers = [text.split("=")[0] for text in unknown if text.startswith("--")]
    for name in strangers:
        close = difflib.get_close_matches(name, known, n=1)
        parser.problems.append(f"unknown flag {name}." + (f" Did you mean {close[0]}?" if close else ""))
    if not strangers:  # behind an unknown flag, a stray value is its own
        parser.problems += [f"stray value {text!r} belongs to no flag." for text in unknown]
    if parser.problems:
        raise ConfigError(parser.problems)
    return namespace


def read_value(field: dataclasses.Field, hint: typing.Any, value: typing.Any, problems: list[str]) -> typing.Any:
    """What a flag's field becomes by a value of a config file: a number or text counts as the same text behind the
    flag.

    hint: the field's type. A list is for flags that take several, true or false for switches, None (null in JSON) for
    fields that may be None. What does not fit is added to `problems`, and the answer is None.
    """
    name = "--" + field.name.replace("_", "-")
    base_type, is_list = _scalar_type(hint)
    items = value if isinstance(value, list) else [value]
    problem = ""
    if value is None:
        problem = "" if type(None) in typing.get_args(hint) else f"{name} needs a value."
    elif base_type is bool:
        if isinstance(value, bool):
            return value
        problem = f"{name} is a switch: true or false, not {value!r}."
    elif isinstance(value, list) and not (is_list and value):
        problem = f"{name} takes {'at least one value' if is_list else 'one value'}, not {value!r}."
    elif any(isinstance(item, bool) or not isinstance(item, (str, int, float)) for item in items):
        problem = f"{name} takes {'texts or numbers' if is_list else 'a text or a number'}, not {value!r}."
    else:
        convert = _Converter(field, base_type, problems)
        values = [convert(str(item)) for item in items]
        return values if is_list else values[0]
    if problem:
        problems.append(problem)
    return None


def from_namespace(group_class: type, namespace: argparse.Namespace):
    """Build the frozen group from the parsed flags."""
    names = [f.name for f in dataclasses.fields(group_class) if "help" in f.metadata]
    return group_class(**{name: getattr(namespace, name) for name in names})


class PluginArgs:
    """Read-only flat view (`args.rollout_batch_size`) handed to user plugins written for a flat namespace.

    extra: values of the user's own (--custom-config-path), under names that no group has.
    """

    def __init__(self, *groups, extra: dict | None = None):
        owner = {}
        for group in groups:
            for field in dataclasses.fields(group):
                if field.name in owner:
                    raise ConfigError([f"flag {field.name!r} is declared twice"])
                owner[field.name] = group
        object.__setattr__(self, "_owner", owner)
        object.__setattr__(self, "_extra", dict(extra or {}))

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        owner, extra = object.__getattribute__(self, "_owner"), object.__getattribute__(self, "_extra")
        if name in extra:
            return extra[name]
        try:
            return getattr(owner[name], name)
        except KeyError:
            raise AttributeError(f"no flag named --{name.replace('_', '-')}") from None

    def __setattr__(self, name, value):
        raise AttributeError(f"args is read-only; keep per-plugin state on your own object, not in args.{name}")


def _scalar_type(hint) -> tuple[type, bool]:
    """(type of one value, whether several are taken) of a field's annotation; `X | None` counts as X."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint = next(a for a in typing.get_args(hint) if a is not type(None))
    if typing.get_origin(hint) in (list, tuple):
        return typing.get_args(hint)[0], True
    return hint, False
