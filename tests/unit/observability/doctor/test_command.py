"""The doctor as a command."""

from __future__ import annotations

import json
import os
import re
import time

from slime_like.observability.doctor.__main__ import main
from slime_like.observability.metrics import MetricsLog
from slime_like.utils.files import RunDirectory


def test_a_run_that_was_killed(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"data": {"num_rollout": 3}}))
    (tmp_path / ".lock").write_text(str(os.getpid()))  # the number of another process by now, which has not locked it
    with MetricsLog(RunDirectory(str(tmp_path)), tensorboard=False) as log:
        log.log("step", 0, {"step/seconds": 1.0})
    assert main([str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"KILLED  {tmp_path}\n") and "after 1 of 3 rollouts" in text
    assert re.search(r"the step line of step 0 in metrics.jsonl, \d+ s ago", text)
    assert main([str(tmp_path), "--json"]) == 0
    verdict = json.loads(capsys.readouterr().out)
    assert (verdict["state"], verdict["step"], verdict["processes"]) == ("killed", 1, [])
    assert verdict["disks"][0]["free_bytes"] > 0


def test_what_is_no_run_is_the_users_mistake(tmp_path, capsys):
    assert main([str(tmp_path / "nothing")]) == 2
    assert "has no config.json" in capsys.readouterr().err


def test_a_driver_that_lives_is_recognised_by_its_lock(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    with open(tmp_path / ".lock", "w") as lock:
        lock.write(str(os.getpid()))
        lock.flush()
        assert main([str(tmp_path), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["state"] == "running"
        time.sleep(0.05)
        assert main([str(tmp_path), "--hung-after", "0.01"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("HUNG") and f"kill -TERM {os.getpid()} ends it" in text
