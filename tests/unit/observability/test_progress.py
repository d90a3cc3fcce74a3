"""What a run is doing, as it is kept for its end."""

from __future__ import annotations

import pytest

from slime_like.observability.metrics import PhaseTimers
from slime_like.observability.progress import Progress


def test_a_phase_that_ends_is_progress_and_one_that_fails_stays():
    kept: list[str] = []
    progress = Progress(keep=kept.append)
    timers = PhaseTimers(step=3, progress=progress)
    with timers.phase("generate"):
        assert Progress.from_json(kept[-1]).phase == "generate"
    assert (progress.phase, progress.last) == ("between phases", "generate, step 3")
    with pytest.raises(ValueError), timers.phase("save"), timers.phase("generate"):
        raise ValueError
    assert (progress.phase, progress.last) == ("generate", "generate, step 3")
    PhaseTimers(step=4, progress=progress)
    assert (progress.phase, progress.step) == ("between phases", 4)


def test_what_is_kept_says_it_all_and_fits_an_entry():
    progress = Progress(phase="p" * 300, step=10**9, version=10**9, last="w" * 300)
    again = Progress.from_json(progress.to_json())
    assert (again.phase, again.step, again.version, again.last) == ("p" * 100, 10**9, 10**9, "w" * 100)
    assert again.last_time == pytest.approx(progress.last_time, abs=0.01) and len(progress.to_json()) < 500
