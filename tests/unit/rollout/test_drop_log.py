"""Dropped prompts by number, on the disk when it happens."""

from __future__ import annotations

from slime_like.rollout.drop_log import DropLog
from slime_like.utils.files import RunDirectory, read_json_lines
from tests.helpers.full_disks import largest_file


def test_each_prompt_is_named_at_once(tmp_path):
    path = RunDirectory(str(tmp_path)).dropped
    log = DropLog(path)
    assert not path.exists()
    log(17, "stale")
    assert read_json_lines(path) == [{"prompt": 17, "why": "stale"}]


def test_a_run_in_another_directory_counts_what_the_first_one_names(tmp_path):
    path = RunDirectory(str(tmp_path)).dropped
    log = DropLog(path)
    log.resumed({"stale": 1}, 120)
    log(121, "filter/zero_std")
    assert read_json_lines(path) == [
        {"resumed": {"stale": 1}, "position": 120},
        {"prompt": 121, "why": "filter/zero_std"},
    ]


def test_a_run_that_goes_on_in_its_own_directory_names_each_prompt_once(tmp_path):
    path = RunDirectory(str(tmp_path)).dropped
    log = DropLog(path)
    for prompt in (3, 5, 9):
        log(prompt, "stale")
        log.put_aside(prompt + 100, "KeyError")
    DropLog(path).resumed({"stale": 2}, 8, {103: "KeyError", 105: "KeyError"})  # the others came after the checkpoint
    assert [line.get("put_aside", line.get("prompt")) for line in read_json_lines(path)] == [3, 103, 5, 105]
    DropLog(path)(9, "stale")
    assert [line["prompt"] for line in read_json_lines(path) if "prompt" in line] == [3, 5, 9]


def test_without_a_run_directory_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    DropLog(None)(1, "stale")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_costs_names(tmp_path):
    path = RunDirectory(str(tmp_path)).dropped
    log = DropLog(path)
    with largest_file(10):
        log(17, "stale")
    log(18, "stale")
    assert read_json_lines(path) == [{"prompt": 18, "why": "stale"}]
