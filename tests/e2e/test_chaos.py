"""Faults in whole runs, of which scripts/chaos.sh has the table: a run outlives them, or ends by name."""

from __future__ import annotations

import os

import pytest

from tests.e2e.chaos.__main__ import FAST
from tests.e2e.chaos.cells import Cell
from tests.e2e.chaos.runs import ChaosRun, World
from tests.e2e.chaos.soak import soak

pytestmark = pytest.mark.e2e
#: A slice of the matrix, in one run on scripted engines.
LIGHT = [
    Cell("corrupt reply", "engine", "generate", "sync"),
    Cell("slow", "router", "generate", "sync"),
    Cell("slow", "driver", "train", "sync"),
    Cell("kill", "engine", "sync", "sync"),
]


@pytest.fixture
def world(tiny_model_dir, tiny_data_dir, tmp_path) -> World:
    return World(tmp_path, tiny_model_dir, tiny_data_dir)


def test_a_run_on_scripted_engines_outlives_faults_one_after_the_other(world):
    outcomes = ChaosRun(world, LIGHT, light=True).outcomes()
    assert [one.what for one in outcomes] == ["recovered"] * len(LIGHT), outcomes


@pytest.mark.long_run
def test_a_run_outlives_a_fault_of_each_kind_one_after_the_other(world):
    outcomes = ChaosRun(world, FAST).outcomes()
    assert [one.what for one in outcomes] == ["recovered"] * len(FAST), outcomes


@pytest.mark.long_run
@pytest.mark.parametrize(
    "cell",
    [
        Cell("kill", "driver", "generate", "sync"),
        Cell("stall", "trainer", "train", "sync"),
        Cell("corrupt reply", "trainer", "sync", "sync"),
        Cell("kill", "node", "train", "async"),
    ],
)
def test_what_a_run_cannot_outlive_has_a_name(world, cell):
    (outcome,) = ChaosRun(world, [cell]).outcomes()
    print(f"{cell.name}: {outcome.what} {outcome.seconds:.0f} s {outcome.error}")
    assert outcome.is_good, outcome


@pytest.mark.long_run
@pytest.mark.skipif(os.getuid() != 0, reason="each run gets a /dev/shm of its own, which needs root")
def test_a_soaked_run_is_the_calm_one(world):
    assert soak(world, 60.0) == 0
