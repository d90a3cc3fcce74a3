"""A path to a function either loads and fits, or says exactly why not."""

from __future__ import annotations

import asyncio
import time

import pytest

from slime_like.errors import PluginError, RunError
from slime_like.utils.activity import Activity
from slime_like.utils.user_functions import Hook, load_function

USER = "tests.unit.rollout.user_functions"


def load(path: str, num_positional: int = 2):
    return load_function(path, num_positional=num_positional, flag="--custom-rm-path")


def test_both_spellings_give_the_function():
    dotted, colon = load(f"{USER}.length_reward"), load(f"{USER}:length_reward")
    assert dotted is colon and dotted.__name__ == "length_reward"


def test_defaults_and_varargs_fit(tmp_path, monkeypatch):
    source = (
        "def defaults(args, sample, extra=1): pass\ndef anything(*args, **kwargs): pass\ndef keyword(args, sample, *,"
        " must): pass\n"
    )
    (tmp_path / "flexible_plugin.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    load("flexible_plugin.defaults")
    load("flexible_plugin.anything")
    with pytest.raises(PluginError, match=r"2 positional arguments, but its signature is \(args, sample, \*, must\)"):
        load("flexible_plugin.keyword")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (f"{USER}.lenght_reward", "module .*user_functions has no 'lenght_reward'. It has: length_reward"),
        (f"{USER}.one_argument", r"will be called with 2 positional arguments, but its signature is \(sample\)"),
        (f"{USER}.NOT_A_FUNCTION", "'NOT_A_FUNCTION' is a int, not a function"),
        ("nowhere.function", "no module 'nowhere'. Fix: the path, or add its folder to PYTHONPATH"),
        (f"{USER}.deeper.function", "no module .*deeper"),
        ("function", "is no path to a function"),
        ("a:b:c", "is no path to a function"),
        ("./file.py", "is no path to a function"),
        ("", "is no path to a function"),
    ],
)
def test_what_is_wrong_is_named(path, message):
    with pytest.raises(PluginError, match=message) as raised:
        load(path)
    assert str(raised.value).startswith(f"--custom-rm-path {path}")


def test_a_module_that_breaks_while_it_is_imported_is_told_from_a_missing_one(tmp_path, monkeypatch):
    (tmp_path / "needs_plugin.py").write_text("import not_installed_anywhere\n")
    (tmp_path / "broken_plugin.py").write_text("raise ValueError('at import')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PluginError, match="importing needs_plugin failed: No module named 'not_installed_anywhere'"):
        load("needs_plugin.function")
    with pytest.raises(PluginError, match="importing broken_plugin raised ValueError: at import"):
        load("broken_plugin.function")


def test_a_function_that_does_not_answer_is_named():
    hook = Hook(lambda: time.sleep(30), "--custom-rollout-log-function-path", "mine.log", timeout_s=0.1)
    with pytest.raises(RunError, match=r"^--custom-rollout-log-function-path mine\.log: the function did not answer"):
        hook()


def test_what_a_function_raises_is_named_and_what_it_gives_comes_back():
    assert Hook(lambda number: number + 1, "--flag", "mine.add")(2) == 3
    with pytest.raises(RunError, match="^--flag mine.divide: the function raised ZeroDivisionError"):
        Hook(lambda: 1 / 0, "--flag", "mine.divide")()


def test_a_coroutine_that_makes_nothing_of_the_run_is_ended_and_named():
    activity, ended = Activity(), []

    async def waits():
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    hook = Hook(waits, "--rollout-function-path", "mine.waits", timeout_s=0.2)
    with pytest.raises(RunError, match=r"--rollout-function-path mine.waits: the function neither answered nor asked"):
        asyncio.run(hook.awaited(activity=activity))
    assert ended == [True]


def test_a_coroutine_may_take_as_long_as_what_it_asked_for():
    activity = Activity()

    async def asks():
        for _ in range(3):
            with activity.call():
                await asyncio.sleep(0.4)
        return "done"

    hook = Hook(asks, "--rollout-function-path", "mine.asks", timeout_s=0.2)
    assert asyncio.run(hook.awaited(activity=activity)) == "done" and activity.num_running == 0


def test_who_waits_for_a_coroutine_and_is_cancelled_cancels_it():
    ended = []

    async def waits():
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    async def main():
        async with asyncio.timeout(0.1):
            await Hook(waits, "--eval-function-path", "mine.waits").awaited(activity=Activity())

    with pytest.raises(TimeoutError):
        asyncio.run(main())
    assert ended == [True]
