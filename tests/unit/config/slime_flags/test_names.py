"""Every flag of slime's is taken, noticed or refused; docs/from-slime.md says how many are which."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from arguments import build_parser
from slime_like.config.slime_flags.refused import REFUSED
from slime_like.config.slime_flags.taken import BUILT_IN, IDLE_WITHOUT, SAID_ANYWAY
from slime_like.sglang_backend.server_args import RESERVED

NAMES = [line for line in (Path(__file__).parent / "names.txt").read_text().splitlines() if not line.startswith("#")]


def kind_of(flag: str, known: set[str]) -> str:
    """What happens to a flag on our command line, if it is the only one of slime's."""
    if flag in SAID_ANYWAY or flag in IDLE_WITHOUT:
        return "noticed"
    if flag in REFUSED or flag.removeprefix("--sglang-").replace("-", "_") in RESERVED:
        return "refused"
    return "taken" if flag in known else "unknown"


@pytest.fixture(scope="module")
def kinds() -> dict[str, list[str]]:
    known = {option for action in build_parser()._actions for option in action.option_strings}
    by_kind: dict[str, list[str]] = {}
    for flag in NAMES:
        by_kind.setdefault(kind_of(flag, known), []).append(flag)
    return by_kind


def test_no_flag_of_slimes_is_unknown(kinds):
    assert len(NAMES) == len(set(NAMES)) == 231
    assert kinds.get("unknown", []) == []


def test_the_guide_has_the_counts(kinds, repo_root):
    text = (repo_root / "docs" / "from-slime.md").read_text()
    sentence = re.search(r"Of slime's (\d+) flags (\d+) are taken, (\d+) noticed and (\d+) refused", text)
    counted = f"Of slime's {len(NAMES)} flags {len(kinds['taken'])} are taken, {len(kinds['noticed'])} noticed"
    counted += f" and {len(kinds['refused'])} refused"
    assert sentence and sentence.group() == counted, f"docs/from-slime.md must say: {counted}"


def test_what_reports_more_and_paths_of_built_in_functions_are_taken(kinds):
    assert {"--log-passrate", "--log-multi-turn", "--log-correct-samples", "--use-tensorboard"} <= set(kinds["taken"])
    assert {flag for flag, _ in BUILT_IN} <= set(kinds["taken"])
