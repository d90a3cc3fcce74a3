"""The parts of weight_update_demo.py and its neighbours in scripts/lib that need no engine."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest


@pytest.fixture
def demo(repo_root: Path, monkeypatch: pytest.MonkeyPatch) -> dict:
    monkeypatch.setattr(sys, "path", list(sys.path))  # the script adds to it
    return runpy.run_path(str(repo_root / "scripts" / "weight_update_demo.py"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--size-mb", "0.5"], "--size-mb 0.5: must be at least 1"),
        (["--size-mb", "nan"], "--size-mb nan: must be at least 1"),
        (["--size-mb", "1e9"], "GB of memory"),
        (["--methods", "ipc,carrier-pigeon"], "--methods carrier-pigeon: known are ipc, broadcast, disk"),
        (["--methods", ","], "name at least one of"),
        (["--repeats", "0"], "--repeats 0: must be at least 1"),
        (["--tp", "3"], "--tp 3: a model of this size has 2 key/value heads"),
        (["--output", "picture.gif"], "--output picture.gif: must end in .png"),
        (["--size", "10"], "unrecognized arguments: --size 10"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(
    demo: dict, capsys: pytest.CaptureFixture, arguments: list[str], message: str
):
    with pytest.raises(SystemExit) as ended:
        demo["main"](arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("megabytes", [1, 10, 64, 200, 1000])
def test_a_model_of_about_the_size_that_was_asked_for(demo: dict, megabytes: int):
    shape = demo["Shape"].of_bytes(megabytes * 1e6)
    assert shape.num_bytes == pytest.approx(megabytes * 1e6, rel=0.15)
    assert shape.kv_heads % 2 == 0, "an engine of two ranks takes it too"


def test_bytes_of_a_shape_are_those_of_its_weights(demo: dict):
    shape = demo["Shape"].of_bytes(1e6)
    weights = demo["make_weights"](shape, seed=1)
    assert sum(tensor.nbytes for tensor in weights.values()) == shape.num_bytes
    assert all((tensor != 0).any() for tensor in weights.values())


def test_spans_of_one_kind_count_once_where_they_overlap(demo: dict):
    recorder = demo["Recorder"]()
    for started, ended in ((5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.5, 1.75)):
        recorder.add("engine", started, ended)
    recorder.add("hash", 0.0, 10.0)
    assert recorder.seconds("engine") == 4.0  # 0 to 3 and 5 to 6
    assert recorder.seconds("nothing") == 0.0


def test_bounds_are_measured_and_leave_no_file(demo: dict, tmp_path: Path, no_process_left: None):
    bounds_s = demo["BoundMeter"](4 << 20, tmp_path).measure()
    assert set(bounds_s) == set(demo["BOUNDS"]) == {demo["BOUND_OF"][method] for method in demo["METHODS"]}
    assert all(1e-6 < seconds < 5 for seconds in bounds_s.values()), bounds_s
    assert list(tmp_path.iterdir()) == []
