"""The reward curve of a run directory."""

from __future__ import annotations

import pytest

from slime_like.observability.curve import main, reward_series
from slime_like.observability.metrics import MetricsLog
from slime_like.utils.files import RunDirectory


@pytest.mark.slow
def test_the_series_and_the_picture(tmp_path, capsys):
    run = RunDirectory(str(tmp_path))
    with MetricsLog(run, tensorboard=False) as log:
        log.log(
            "eval",
            0,
            {"eval/held/reward_mean": -0.2, "eval/held/pass@1": 0.1, "eval/held/pass@2": 0.2, "eval/held/samples": 4.0},
        )
        for step, reward in enumerate([0.2, float("nan"), 0.8]):
            log.log("rollout", step, {"rollout/reward_mean": reward, "rollout/tokens": 10.0})
    assert reward_series(run) == {
        "eval/held/reward_mean": ([0], [-0.2]),
        "eval/held/pass@1": ([0], [0.1]),
        "rollout/reward_mean": ([0, 2], [0.2, 0.8]),
    }
    assert main([str(tmp_path), "--caption", "selection among planted behaviours"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "reward.png")
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")


def test_a_directory_without_a_run_is_the_users_mistake(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert "metrics.jsonl: no such file" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "step": 0, "train/loss": 1.0}\n')
    assert main([str(tmp_path)]) == 2
    assert "has no reward to draw yet" in capsys.readouterr().err
