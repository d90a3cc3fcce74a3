"""One declaration a flag; every problem at once."""

import dataclasses
import pickle

import pytest

from slime_like.config.base import PluginArgs, add_flags, flag, from_namespace, make_parser, parse
from slime_like.errors import ConfigError, WaitTimeout


@dataclasses.dataclass(frozen=True, kw_only=True)
class Small:
    """A small group"""

    batch_size: int = flag(4, help="How many, at 100 %.")
    kind: str = flag("a", choices=("a", "b"), help="Which.")
    names: list[str] | None = flag(None, help="Several.")
    on: bool = flag(False, help="Switch.")
    no_sound: bool = flag(False, help="A switch whose name denies.")
    derived: dict = dataclasses.field(default_factory=dict)


def read(*argv):
    parser = make_parser("test")
    add_flags(parser, Small)
    return from_namespace(Small, parse(parser, list(argv)))


def test_field_name_is_flag_name_and_types_hold():
    small = read("--batch-size", "8", "--kind", "b", "--names", "x", "y", "--on")
    assert small == Small(batch_size=8, kind="b", names=["x", "y"], on=True)
    assert read("--no-on").on is False
    assert read("--no-sound").no_sound is True and read().no_sound is False


def test_unknown_flag_names_the_closest_and_all_problems_come_at_once():
    with pytest.raises(ConfigError) as error:
        read("--batch-sizes", "8", "--kind", "c", "--batch-size", "many", "--nmaes", "x")
    text = str(error.value)
    assert "unknown flag --batch-sizes. Did you mean --batch-size?" in text
    assert "unknown flag --nmaes. Did you mean --names?" in text
    assert "--kind 'c' is unknown. Known: a, b." in text
    assert "--batch-size 'many' is no int." in text
    assert len(error.value.problems) == 4


def test_abbreviations_and_stray_values_are_refused():
    with pytest.raises(ConfigError, match="unknown flag --batch"):
        read("--batch", "8")
    with pytest.raises(ConfigError, match="stray value 'extra'"):
        read("extra")


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        read().batch_size = 3


def test_plugin_args_are_flat_and_read_only():
    args = PluginArgs(Small(batch_size=5))
    assert args.batch_size == 5
    with pytest.raises(AttributeError, match="--not-there"):
        _ = args.not_there
    with pytest.raises(AttributeError, match="read-only"):
        args.batch_size = 6
    with pytest.raises(ConfigError, match="declared twice"):
        PluginArgs(Small(), Small())


def test_errors_survive_pickling():
    for error in (ConfigError(["one", "two"]), WaitTimeout(who="a", whom="b", phase="c", seconds=3, last="d")):
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error) and str(again) == str(error)
