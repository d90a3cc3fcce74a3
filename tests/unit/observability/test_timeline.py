"""A run's trace as lines of text."""

from __future__ import annotations

import time

import pytest

from slime_like.errors import DataError
from slime_like.observability.timeline import Span, main, read_spans, timeline
from slime_like.observability.tracing import PhaseTrace


def test_each_column_is_the_step_that_had_half_of_it():
    spans = [Span("generate", 0.0, 4.0, 0), Span("train", 4.0, 6.0, 0), Span("sync", 6.0, 6.2, 0)]
    spans += [Span("generate", 7.0, 8.4, 1), Span("train", 8.6, 10.0, 1)]
    assert timeline(spans, width=10) == [
        "steps 0 to 1: 10.00 s, 1.000 s a column",
        "engines generate |0000   1  |  5.40 s   54%",
        "trainer trains   |    00   1|  3.40 s   34%",
        "sync             |      0   |  0.20 s    2%",
    ]


def test_engines_that_work_beside_the_trainer_have_their_own_line_and_are_cut():
    spans = [Span("generate", 2.0, 4.0, 11), Span("train", 4.0, 12.0, 11), Span("engines generate", 0.0, 5.0, 11)]
    spans += [Span("engines generate", 5.0, 20.0, 12), Span("train", 30.0, 31.0, 12)]
    assert timeline(spans, (11, 11), width=10) == [
        "step 11: 10.00 s, 1.000 s a column",
        "engines generate |1112222222| 10.00 s  100%",
        "trainer waits    |11        |  2.00 s   20%",
        "trainer trains   |  11111111|  8.00 s   80%",
    ]


def test_the_last_steps_by_default_and_only_those_that_there_are():
    spans = [Span("train", float(step), step + 0.5, step) for step in range(20)]
    assert timeline(spans)[0].startswith("steps 14 to 19:")
    with pytest.raises(DataError, match="--steps 3-20: the trace has steps 0 to 19"):
        timeline(spans, (3, 20))
    with pytest.raises(DataError, match="no event yet"):
        timeline([])


def test_of_a_run_directory(tmp_path, capsys):
    trace, now = PhaseTrace(tmp_path / "trace.json"), time.monotonic()
    trace.add("train", now + 1.0, now + 3.0, 0)
    with open(tmp_path / "trace.json", "a") as file:
        file.write('{"name": "tra')  # a write cut short
    (span,) = read_spans(tmp_path / "trace.json")
    assert (span.phase, span.step) == ("train", 0) and span.end - span.start == pytest.approx(2.0, abs=1e-5)
    assert main([str(tmp_path), "--steps", "0", "--width", "20"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["step 0: 2.00 s, 0.100 s a column", "trainer trains |" + "0" * 20 + "|  2.00 s  100%"]


def test_a_directory_without_a_trace_is_the_users_mistake(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert "trace.json: no such file" in capsys.readouterr().err
    (tmp_path / "trace.json").write_text("[\n{}\n")
    assert main([str(tmp_path)]) == 2
    assert "trace.json:2: not an event of a run's trace" in capsys.readouterr().err
