"""One level for our loggers; those of other packages stay at warning."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from slime_like.utils.logs import LOG_LEVELS

#: Every level by one of our loggers and by somebody else's.
SPEAK = """
import logging
from slime_like.utils.logs import start_logging
start_logging({level!r}, line_format="%(levelname)s %(name)s")
for name in ("slime_like.somewhere", "other"):
    for level in (10, 20, 30, 40):
        logging.getLogger(name).log(level, "text")
"""


@pytest.mark.parametrize(("level", "ours"), [("debug", 4), ("info", 3), ("warning", 2), ("error", 1), (None, 2)])
def test_our_loggers_speak_from_the_level_on_and_others_from_warning_on(repo_root: Path, level: str | None, ours: int):
    assert level is None or level in LOG_LEVELS
    done = subprocess.run(
        [sys.executable, "-c", SPEAK.format(level=level)],
        capture_output=True,
        text=True,
        check=True,
        cwd=repo_root,
        timeout=60,
    )
    lines = [line.split() for line in done.stderr.splitlines()]
    expected = ["DEBUG", "INFO", "WARNING", "ERROR"]
    assert [kind for kind, name in lines if name == "slime_like.somewhere"] == expected[-ours:]
    assert [kind for kind, name in lines if name == "other"] == ["WARNING", "ERROR"]
