"""Dropped prompts by number, on the disk when it happens."""

from __future__ import annotations

import json

from slime_like.rollout.drop_log import DropLog
from slime_like.utils.files import RunDirectory, read_json_lines


def test_each_prompt_is_named_at_once(tmp_path):
    path = RunDirectory(str(tmp_path)).dropped
    log = DropLog(path)
    assert not path.exists()
    log(17, "stale")
    assert read_json_lines(path) == [{"prompt": 17, "why": "stale"}]
    log.resumed({"stale": 1}, 120)
    log(121, "filter/zero_std")
    assert [json.loads(line) for line in path.read_text().splitlines()[1:]] == [
        {"resumed": {"stale": 1}, "position": 120},
        {"prompt": 121, "why": "filter/zero_std"},
    ]


def test_without_a_run_directory_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    DropLog(None)(1, "stale")
    assert list(tmp_path.iterdir()) == []
