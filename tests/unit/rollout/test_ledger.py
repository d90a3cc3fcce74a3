"""Every prompt ends once, every step is the only one allowed, and a resume loses and doubles nothing."""

from __future__ import annotations

import json

import pytest

from slime_like.errors import CheckpointError
from slime_like.rollout.ledger import DRAWN, IN_FLIGHT, READY, TAKEN, Ledger


def moved(ledger: Ledger, prompt: int, *states: str) -> None:
    for state in states:
        ledger.move(prompt, state)


def test_a_prompt_from_the_stream_to_the_gradient():
    ledger = Ledger()
    assert ledger.draw(2) == [0, 1]
    moved(ledger, 0, IN_FLIGHT, READY, TAKEN)
    ledger.trained([0])
    ledger.drop(1, "failed")
    assert ledger.counts() == {DRAWN: 0, IN_FLIGHT: 0, READY: 0, TAKEN: 0, "trained": 1, "dropped": 1, "waiting": 0}
    assert ledger.dropped == {"failed": 1} and ledger.draw(1) == [2]


def test_who_listens_hears_of_each_dropped_prompt_and_no_other():
    heard: list[tuple[int, str]] = []
    ledger = Ledger(on_drop=lambda prompt, why: heard.append((prompt, why)))
    ledger.draw(4)
    ledger.drop(2, "stale")
    ledger.put_back([0])
    ledger.drop(1, "failed")
    with pytest.raises(ValueError, match="not open"):
        ledger.drop(1, "failed")
    assert heard == [(2, "stale"), (1, "failed")] and ledger.dropped == {"stale": 1, "failed": 1}


@pytest.mark.parametrize("state", [READY, TAKEN, DRAWN])
def test_no_step_is_left_out(state):
    ledger = Ledger()
    ledger.draw(1)
    with pytest.raises(ValueError, match=f"prompt 0 is drawn: it cannot become {state}"):
        ledger.move(0, state)


def test_a_prompt_ends_once():
    ledger = Ledger()
    ledger.draw(1)
    with pytest.raises(ValueError, match="prompt 0 is drawn: it cannot have been trained on"):
        ledger.trained([0])
    ledger.drop(0, "stale")
    for end in (lambda: ledger.drop(0, "stale"), lambda: ledger.trained([0]), lambda: ledger.move(0, IN_FLIGHT)):
        with pytest.raises(ValueError, match="prompt 0 is not open"):
            end()


def test_what_was_put_back_comes_first_and_in_order():
    ledger = Ledger()
    ledger.draw(4)
    ledger.put_back([3, 1])
    assert ledger.draw(1) == [1] and ledger.draw(2) == [3, 4]


def test_a_resume_draws_again_what_was_open_and_nothing_else():
    ledger = Ledger()
    ledger.draw(6)
    moved(ledger, 0, IN_FLIGHT, READY, TAKEN)
    moved(ledger, 1, IN_FLIGHT, READY, TAKEN)
    moved(ledger, 2, IN_FLIGHT, READY)
    moved(ledger, 3, IN_FLIGHT)
    ledger.trained([0])
    ledger.drop(4, "failed")
    ledger.put_back([5])
    resumed = Ledger()
    resumed.load_state_dict(json.loads(json.dumps(ledger.state_dict())))
    assert resumed.draw(5) == [1, 2, 3, 5, 6]
    assert (resumed.num_trained, resumed.dropped) == (1, {"failed": 1})


def test_a_position_alone_is_taken_from_older_checkpoints():
    ledger = Ledger()
    ledger.load_state_dict({"position": 7})
    assert ledger.draw(1) == [7] and ledger.num_trained == 7


@pytest.mark.parametrize(
    "wrong", [{"trained": 2}, {"dropped": {"failed": 5}}, {"open": {"1": "drawn", "2": "drawn"}, "waiting": [1]}]
)
def test_a_ledger_that_does_not_add_up_is_refused(wrong):
    state = {
        "position": 3,
        "trained": 0,
        "dropped": {},
        "open": {"0": "drawn", "1": "drawn", "2": "drawn"},
        "waiting": [],
    } | wrong
    with pytest.raises(CheckpointError, match="does not add up: 3 were drawn"):
        Ledger().load_state_dict(state)
