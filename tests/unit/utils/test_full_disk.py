"""Records that have no room are lost, counted and said once; nothing else is swallowed."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from slime_like.utils.files import PACKAGE_ROOT, append_text
from slime_like.utils.full_disk import LostWrites
from tests.helpers.full_disks import largest_file


def test_it_is_said_when_it_begins_and_when_it_ends(caplog):
    caplog.set_level(logging.WARNING, logger="slime_like")
    lost = LostWrites()
    for _ in range(3):
        with lost.going_on("metrics"), open("/dev/full", "w") as file:
            file.write("x")
    assert lost.total == 3
    with lost.going_on("metrics"):
        pass
    assert [record.getMessage().partition(".")[0] for record in caplog.records] == [
        "metrics: No space left on device",
        "metrics is written again; 3 writes are missing in it",
    ]


def test_other_errors_are_raised(tmp_path):
    lost = LostWrites()
    with pytest.raises(FileNotFoundError), lost.going_on("metrics"), open(tmp_path / "absent" / "file", "w"):
        pass
    assert lost.total == 0


def test_a_line_is_whole_or_absent(tmp_path):
    path = tmp_path / "lines"
    append_text(path, "first\n")
    with largest_file(10), pytest.raises(OSError, match="File too large"):
        append_text(path, "second, of which four bytes would fit\n")
    assert path.read_text() == "first\n"
    append_text(path, "third\n")
    assert path.read_text() == "first\nthird\n"


PRINTS = """
import sys
from slime_like.utils.full_disk import LOST_WRITES, lose_output_when_full
if sys.argv[1] == "lossy":
    lose_output_when_full()
for _ in range(3):
    print("a line")
sys.stdout.flush()
assert LOST_WRITES.total >= 1
"""


@pytest.mark.parametrize(("how", "ends_well"), [("lossy", True), ("as it was", False)])
def test_a_process_whose_log_is_full_goes_on(how, ends_well):
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-c", PRINTS, how]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=PACKAGE_ROOT, timeout=60)
    assert (done.returncode == 0) is ends_well, done.stderr
