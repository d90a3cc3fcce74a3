"""The progress line: readable, and plain where it is not a terminal."""

from __future__ import annotations

import io
import math

from slime_like.observability.console import ProgressConsole, sparkline


class Terminal(io.StringIO):
    def isatty(self):
        return True


METRICS = {
    "rollout/reward_mean": 0.5,
    "rollout/tokens": 1280.0,
    "train/loss": 0.01234,
    "step/generate_seconds": 1.23,
    "step/train_seconds": 1.9,
    "step/sync_seconds": 0.1,
}


def test_the_line_of_a_step():
    out = io.StringIO()
    console = ProgressConsole(40, out)
    console.step(0, {"rollout/reward_mean": 0.0})
    console.step(11, METRICS)
    first, second = out.getvalue().splitlines()
    assert first == "rollout 1/40  reward 0.00 ▁"
    assert second == "rollout 12/40  reward 0.50 ▁▅  tokens 1280  loss 0.0123  gen 1.2s  train 1.9s  sync 0.1s"


def test_colour_only_on_a_terminal():
    for stream, coloured in ((io.StringIO(), False), (Terminal(), True)):
        console = ProgressConsole(2, stream)
        console.step(0, METRICS)
        console.evaluation(1, {"eval/held/reward_mean": 0.25, "eval/held/pass@1": 0.25, "eval/held/samples": 4})
        console.note("started")
        assert ("\x1b[" in stream.getvalue()) == coloured
        assert (
            stream.getvalue()
            .splitlines()[1]
            .endswith("eval after 1 rollouts\x1b[0m  held/pass@1 0.250" if coloured else "rollouts  held/pass@1 0.250")
        )


def test_a_mean_reward_that_is_no_pass_rate_is_shown():
    out = io.StringIO()
    ProgressConsole(2, out).evaluation(
        10,
        {
            "eval/held/reward_mean": -0.5,
            "eval/held/pass@1": 0.25,
            "eval/held/pass@2": 0.5,
            "eval/held/reward_model": 3.0,
        },
    )
    assert out.getvalue() == "eval after 10 rollouts  held/reward_mean -0.500  held/pass@1 0.250  held/pass@2 0.500\n"


def test_failures_are_shown():
    out = io.StringIO()
    ProgressConsole(2, out).step(0, METRICS | {"rollout/failed_samples": 3.0})
    assert out.getvalue().rstrip().endswith("failed 3")


def test_an_ascii_stream_does_not_end_the_run():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", write_through=True)
    ProgressConsole(2, stream).step(0, METRICS)
    assert raw.getvalue().startswith(b"rollout 1/2  reward 0.50 ?")


def test_sparkline():
    assert sparkline([0, 1, 2, 3]) == "▁▃▆█"
    assert sparkline([0.5], low=0, high=1) == "▅"
    assert sparkline([2, 2, 2]) == "▁▁▁"
    assert sparkline([math.nan, 1]) == "▁" and sparkline([]) == ""
    assert len(sparkline(list(range(100)), width=12)) == 12
    assert sparkline([0] * 50 + [1] * 50, width=4) == "▁▁██"
