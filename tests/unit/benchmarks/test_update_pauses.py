"""What an interruption is, by hand; rows of other sizes and ways stay."""

from __future__ import annotations

import json

import pytest

from benchmarks.running_requests import interruption

STEP = 0.1


def steps(begin: float, end: float, first: int) -> list[tuple[float, int]]:
    """A token every 0.1 s."""
    count = round((end - begin) / STEP)
    return [(begin + STEP * number, first + number) for number in range(count)]


def test_a_pause_that_nothing_was_lost_in_but_time():
    """Two requests, paused from 1.96 to 2.5 s; one goes on at 2.6, the other at 2.85."""
    one = steps(0.0, 2.0, 1) + steps(2.6, 4.0, 21)
    two = steps(0.05, 2.0, 1) + steps(2.85, 4.0, 21)
    seen = interruption([one, two], 1.96, 2.5, before_s=1.0)
    assert seen.step_s == pytest.approx(STEP) and (seen.running, seen.tokens) == (2, 40)
    # The last token before it came at 1.95 s, the first after it at 2.6 s.
    assert seen.silent_s == pytest.approx(0.65 - STEP)
    assert seen.next_token_s == pytest.approx(((2.6 - 1.9) + (2.85 - 1.95)) / 2 - STEP)
    assert seen.next_token_max_s == pytest.approx(0.9 - STEP)
    # Until 2.85 s three came from the first and one from the second: what takes 0.2 s at 20 tokens a second.
    assert seen.lost_s == pytest.approx(0.89 - 4 / 20)


def test_a_token_that_is_asked_for_again_is_no_new_one():
    """Ended at 2.0 s with 20 tokens, asked again for the last: it comes at 2.5, the next at 2.7."""
    ended = [*steps(0.0, 2.0, 1), (2.5, 20), (2.7, 21), (2.8, 22)]
    seen = interruption([ended], 2.0, 2.2, before_s=1.0)
    assert seen.next_token_s == seen.silent_s == pytest.approx(2.7 - 1.9 - STEP)


def test_what_interrupts_nothing_costs_nothing():
    seen = interruption([steps(0.0, 4.0, 1)], 2.0, 2.5, before_s=1.0)
    assert seen.silent_s == pytest.approx(0.0, abs=1e-9) and seen.lost_s == pytest.approx(0.0, abs=STEP)


def test_rows_of_other_sizes_and_ways_stay(tmp_path):
    from benchmarks.update_pauses import save

    numbers = dict.fromkeys(("sync_s", "silent_s", "next_token_s", "next_token_max_s", "lost_s", "step_s"), 0.5)
    numbers |= {"silent_s_all": [0.5, 0.125], "prefilled_tokens": 1, "thrown_tokens": 0, "tokens_in_flight": 9}
    row = {"bytes": 3_000_000, "way": "delta", "mode": "retract"} | numbers
    save(tmp_path / "results", [row])
    save(tmp_path / "results", [row | {"mode": "abort"}, row | {"way": "broadcast"}, row | {"silent_s": 0.25}])
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert [(one["way"], one["mode"], one["silent_s"]) for one in rows] == [
        ("broadcast", "retract", 0.5),
        ("delta", "retract", 0.25),
        ("delta", "abort", 0.5),
    ]
    assert "**0.250** (0.125)" in (tmp_path / "results.md").read_text()
