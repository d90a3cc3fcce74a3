"""The packing that ours is compared with keeps the same promises."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest


@pytest.fixture(scope="module")
def packing_balance(repo_root: Path) -> dict:
    return runpy.run_path(str(repo_root / "benchmarks" / "packing_balance.py"))


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_packs_of_all_samples_are_below_the_cap_and_as_many_on_every_rank(packing_balance: dict, ranks: int):
    lengths = np.random.default_rng(ranks).integers(1, packing_balance["CAP"] + 1, 100).tolist()
    plan = packing_balance["packs_first"](lengths, lengths, ranks)
    assert sorted(i for packs in plan for pack in packs for i in pack) == list(range(100))
    assert len(plan) == ranks and len({len(packs) for packs in plan}) == 1
    assert all(sum(lengths[i] for i in pack) <= packing_balance["CAP"] for packs in plan for pack in packs)
