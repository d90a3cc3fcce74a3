"""The reward `ifbench`: whether a response follows all instructions of its row (IFBench, arXiv:2507.02833).

The checkers are those of the package if-verifiable (extra `ifbench`): IFBench's, and IFEval's (arXiv:2311.07911) for
names that IFBench does not have. Importing them takes seconds, and some want NLTK's data: they run in reward processes.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from slime_like.errors import DataError
from slime_like.utils.files import PACKAGE_ROOT

KIND = "ifbench"
INSTRUCTIONS = "instruction_id_list"
_PACKAGE = "if_verifiable"
_CHECK_S = 600.0
#: Long enough that no checker ends before it has looked at words, sentences and lines.
_PROBE = "Hello world, this is one. Here are two!\n\nAnd three?"


class UnscorableRow(Exception):
    """Not the response's doing: a row or an installation that no response can be scored with."""


def follows_all(response: str, metadata: Mapping) -> float:
    """1 if every checker of metadata["instruction_id_list"] passes the response as it stands, else 0.

    metadata["kwargs"]: the checkers' arguments, a list of as many dicts (nulls do not count), or one for all;
    metadata["prompt_text"]: for checkers that compare with the prompt. Raises UnscorableRow.
    """
    names = [str(name) for name in metadata[INSTRUCTIONS]]
    checkers = [
        _checker(name, arguments, str(metadata.get("prompt_text") or ""))
        for name, arguments in zip(names, _arguments(metadata.get("kwargs"), len(names)), strict=True)
    ]
    try:
        passed = [checker.check_following(response) for checker in checkers] if response.strip() else [False]
    except LookupError as error:
        if type(error) is not LookupError:  # a KeyError is one too; NLTK raises it as it is
            raise
        raise _data_fault(error, ", ".join(names)) from error
    return float(all(passed))


def row_problem(metadata: Mapping) -> str | None:
    """What is wrong with a row's metadata at first sight; None if nothing is."""
    names = metadata.get(INSTRUCTIONS)
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        return f"{INSTRUCTIONS!r} is {str(names)[:80]}, not a list of names"
    kwargs = metadata.get("kwargs")
    each = kwargs if isinstance(kwargs, list) else [kwargs]
    if not all(one is None or isinstance(one, dict) for one in each) or len(each) not in (1, len(names)):
        return f"'kwargs' is {str(kwargs)[:80]}, not {len(names)} objects as there are instructions"
    return None


def first_problem(rows: Sequence[Mapping]) -> tuple[int, str] | None:
    """(place, what is wrong) of the first row that no response can be scored with; None if all can.

    Tries every row's checkers in a process of its own. Raises DataError if the checkers are not installed.
    """
    if importlib.util.find_spec(_PACKAGE) is None:
        raise DataError("--rm-type ifbench needs the package if-verifiable. Fix: pip install 'slime-like[ifbench]'.")
    for place, row in enumerate(rows):
        if problem := row_problem(row):
            return place, problem
    paths = filter(None, [PACKAGE_ROOT, os.environ.get("PYTHONPATH")])
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__],
            input="".join(json.dumps(task(row)) + "\n" for row in rows),
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            capture_output=True,
            text=True,
            timeout=_CHECK_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise DataError(f"--rm-type ifbench: trying the rows' checkers took more than {_CHECK_S:.0f} s.") from None
    if done.returncode:
        raise DataError(f"--rm-type ifbench: its checkers cannot be loaded:\n{done.stderr[-2000:]}")
    answer = json.loads(done.stdout.splitlines()[-1])
    return None if answer is None else (answer["place"], answer["problem"])


def task(metadata: Mapping) -> dict:
    """What a reward process needs of the metadata."""
    return {key: metadata.get(key) for key in (INSTRUCTIONS, "kwargs", "prompt_text")}


def _arguments(kwargs: Any, count: int) -> list[dict]:
    each = kwargs if isinstance(kwargs, list) else [kwargs] * count
    each = each * count if len(each) == 1 else each
    return [{key: value for key, value in (one or {}).items() if value is not None} for one in each]


def _checker(name: str, arguments: dict, prompt: str) -> Any:
    make = _registry().get(name)
    if make is None:
        raise UnscorableRow(f"the instruction {name!r} is none of IFBench's or IFEval's")
    checker = make(name)
    try:
        checker.build_description(**arguments)
        if "prompt" in (checker.get_instruction_args() or ()):
            checker.build_description(prompt=prompt)
    except LookupError as error:
        if type(error) is not LookupError:
            raise
        raise _data_fault(error, name) from error
    except (TypeError, ValueError, AttributeError) as error:
        raise UnscorableRow(f"{name} does not take {arguments}: {error}") from error
    return checker


@functools.cache
def _registry() -> dict[str, Any]:
    """Name -> class. Raises UnscorableRow if the package is missing."""
    try:
        import langdetect
        from if_verifiable.ifbench.instructions_registry import INSTRUCTION_DICT as IFBENCH
        from if_verifiable.ifeval.instructions_registry import INSTRUCTION_DICT as IFEVAL
    except ImportError as error:
        raise UnscorableRow(f"{error}. Fix: pip install 'slime-like[ifbench]'") from error
    langdetect.DetectorFactory.seed = 0  # it draws: the same response must earn the same reward
    return {**IFEVAL, **IFBENCH}


def _data_fault(error: LookupError, names: str) -> UnscorableRow:
    """NLTK's error that its data is missing."""
    wanted = [line.split("'")[1] for line in str(error).splitlines() if "nltk.download('" in line]
    return UnscorableRow(f"{names}: NLTK has no data {wanted}. Fix: python -m nltk.downloader {' '.join(wanted)}")


def main() -> None:
    """Metadata a line on stdin -> on stdout null, or the first that no response can be scored with."""
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no result
    answer = None
    for place, line in enumerate(sys.stdin):
        try:
            follows_all(_PROBE, json.loads(line))
        except UnscorableRow as error:
            answer = {"place": place, "problem": str(error)}
            break
        except Exception:  # noqa: BLE001 a checker may raise at a response that it cannot read: that one's reward is 0
            continue
    print(json.dumps(answer), file=results, flush=True)


if __name__ == "__main__":
    main()
