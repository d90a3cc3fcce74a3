"""A rollout side that works ahead is killed, and goes on from its last checkpoint: no prompt is lost, none is trained
on twice, what was made is not made again, and its account goes on.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

from slime_like.job import ahead
from slime_like.records import ABORTED, COMPLETED, WeightsRef
from slime_like.rollout.generate import Generation
from slime_like.rollout.kept_answers import AnswerSlot
from slime_like.rollout.stock import load_answers, save_answers
from slime_like.testing.scripted_engine import Fault
from slime_like.utils.files import RunDirectory, read_json_lines
from tests.unit.rollout.rows import digits_row, indexes

ROWS = [digits_row(number) for number in range(24)]
HERE = "tests.unit.rollout.user_functions"


class World:
    """Processes of one run, one after the other: what was trained on, and what a checkpoint holds."""

    def __init__(self, start_manager, folder, **options):
        self._start, self.folder, self._options = start_manager, folder, options
        self.trained: list[list[int]] = []  # by rollout
        self.saved: tuple[int, dict] | None = None
        self.manager = self.engine = None

    def begin(self, **more) -> int:
        """A process that starts or goes on; the first rollout."""
        if self.manager is not None:
            self.manager.close()  # what it had begun is lost, as after SIGKILL
        self.manager, self.engine = self._start(ROWS, run_dir=str(self.folder), **self._options, **more)
        step = 0
        if self.saved is not None:
            step, state = self.saved
            self.manager.load_state_dict(state["rollout"])
            ahead.restore(self.manager, str(self.folder), step, state)
        self.trained = self.trained[:step]
        self.sync(step)
        return step

    def sync(self, step: int) -> None:
        self.manager.policy_changing()
        self.engine.weight_version = str(step + 1)
        self.manager.policy_changed(WeightsRef(version=step + 1), step)

    def step(self, step: int):
        result = self.manager.generate(step)
        self.manager.trained(indexes(result))
        self.trained.append(indexes(result))
        return result

    def save(self, num_done: int) -> dict:
        data, stock = self.manager.snapshot()
        state, notes = ahead.kept(str(self.folder), num_done, None, stock)
        assert notes == ()
        self.saved = num_done, json.loads(json.dumps({"rollout": data} | state))
        (self.folder / f"iter_{num_done:07d}").mkdir(exist_ok=True)
        return self.saved[1]


@pytest.fixture
def world(start_manager, tmp_path):
    """Makes one."""
    return lambda **options: World(start_manager, tmp_path, num_rollout=12, **options)


def slow_sometimes(body: dict) -> Fault | None:
    return Fault(delay_s=0.05 * (sum(body["input_ids"]) % 5))


@pytest.mark.parametrize(
    "mode",
    [
        {"async_mode": "full", "max_staleness": 2},
        {"async_mode": "full", "max_staleness": 1, "update_weight_pause_mode": "abort"},
        {"async_mode": "full", "max_staleness": 1, "stale_policy": "drop"},
        {"partial_rollout": True, "over_sampling_batch_size": 4},
    ],
    ids=["full", "abort", "drop", "partial"],
)
def test_killed_anywhere_every_prompt_of_an_epoch_has_one_fate(world, mode):
    """24 rows, 12 rollouts of two: killed after rollouts 2, 4, 6, 8 and 10, one behind the last save each time."""
    run = world(**mode, engine_options={"fault_for": slow_sometimes}, dynamic_sampling_filter_path=HERE + ".no_sevens")
    first = run.begin()
    for killed_after in (2, 4, 6, 8, 10):
        for step in range(first, killed_after):
            run.step(step)
            run.sync(step + 1)
            if step == killed_after - 2:
                run.save(step + 1)
        first = run.begin()
        assert first == killed_after - 1
    for step in range(first, 10):
        run.step(step)
        run.sync(step + 1)
    state, _ = run.manager.snapshot()
    trained = [prompt for prompts in run.trained for prompt in prompts]
    lines = read_json_lines(RunDirectory(str(run.folder)).dropped)
    dropped = [line["prompt"] for line in lines if "prompt" in line]
    ledger = state["data"]
    fates = sorted([*trained, *dropped, *map(int, ledger["open"]), *ledger["waiting"]])
    assert fates == list(range(ledger["position"])), "lost, or with two fates"
    assert len(trained) == ledger["trained"] == 20 and len(dropped) == sum(ledger["dropped"].values())


def test_groups_that_wait_are_trained_on_next_and_are_not_made_again(world):
    run = world(async_mode="full", max_staleness=1)
    run.begin()
    run.step(0)
    while run.manager._tell(lambda: run.manager._service.stream.num_ready) < 2:
        pass
    state = run.save(1)
    asked = {tuple(body["input_ids"]) for body in run.engine.requests}
    expected = run.step(1)
    assert indexes(expected) == [2, 3] and state["stock"]["groups"]["bytes"] > 0
    assert run.begin() == 1
    again = run.step(1)
    asked_again = [tuple(body["input_ids"]) for body in run.engine.requests]
    assert asked and not asked & set(asked_again), "what was made is not made again"
    assert indexes(again) == [2, 3]
    for one, other in zip(again.groups, expected.groups, strict=True):
        for sample, before in zip(one.samples, other.samples, strict=True):
            assert np.array_equal(sample.tokens, before.tokens) and sample.reward == before.reward
            assert np.array_equal(sample.weight_versions, before.weight_versions)
    more = {"rollout/epoch", "async/buffer_depth", "async/groups_in_flight"}  # tell what was begun meanwhile
    names = {name for name in expected.metrics if not name.endswith("second") and "seconds" not in name} - more
    for name in sorted(name for name in names if "/ledger/" not in name):
        assert again.metrics[name] == expected.metrics[name], name
    assert again.metrics["async/staleness_max"] == 1  # by the weights of the process before


@pytest.mark.parametrize(
    "mode", [{"partial_rollout": True, "over_sampling_batch_size": 3}, {"async_mode": "full", "max_staleness": 0}]
)
def test_answers_of_a_group_in_the_making_are_gone_on_with(world, tokenizer, mode):
    """Of prompt 0 one answer is there, and the other is half of one (partial) or none (full) when the run is killed."""
    slow: list[tuple] = []

    def fault(body):
        key = tuple(body["input_ids"])
        slow.append(key)
        return Fault(delay_s=60.0) if slow.count(slow[0]) == 1 and key == slow[0] else None

    run = world(**mode, engine_options={"fault_for": fault})
    run.begin()
    if "partial_rollout" in mode:
        assert 0 not in indexes(run.step(0))
        num_done = 1
    else:
        future = run.manager.start_generate(0)
        while len(run.engine.requests) < 4 or not run.manager.snapshot()[1].answers:
            assert not future.done(), "nothing may be too old: it waits for prompt 0"
        num_done = 0
    state = run.save(num_done)
    kept = load_answers(run.folder / "ahead" / f"{num_done:07d}.answers.npz")
    assert {slot.prompt for slot in kept} >= {0} and state["stock"]["answers"]["bytes"] > 0
    whole = [slot for slot in kept if slot.prompt == 0 and slot.answer.status != ABORTED]
    assert len(whole) == 1
    run._options = mode
    run.begin()
    result = run.step(num_done)
    assert indexes(result)[0] == 0 and all(sample.reward == 1 for sample in result.groups[0].samples)
    assert [list(body["input_ids"]) for body in run.engine.requests].count(list(slow[0])) == 1  # the other one


def test_who_is_preempted_while_a_rollout_is_awaited_keeps_what_is_made(world):
    """train.py gives up the wait, then saves."""
    asked: list = []

    def all_but_one_prompt_wait(body):
        asked.append(body["input_ids"])
        return Fault(delay_s=60.0) if body["input_ids"] != asked[0] else None

    run = world(async_mode="full", engine_options={"fault_for": all_but_one_prompt_wait})
    run.begin()
    future = run.manager.start_generate(0)
    while run.manager._tell(lambda: run.manager._service.stream.num_ready) < 1:
        pass
    future.cancel()
    state, stock = run.manager.snapshot()
    assert "ready" in state["data"]["open"].values() and len(stock.groups) >= 1


def test_what_a_smaller_bound_forbids_is_dropped_by_name(world):
    """--max-staleness may change between two starts: what waits is too old then."""
    run = world(async_mode="full", max_staleness=2)
    run.begin()
    run.step(0)
    run.sync(1)
    run.step(1)
    while run.manager._tell(lambda: run.manager._service.stream.num_ready) < 2:
        pass
    run.save(2)
    run._options = {"async_mode": "full", "max_staleness": 0}
    assert run.begin() == 2
    result = run.step(2)
    assert result.metrics["async/staleness_max"] == 0
    lines = read_json_lines(RunDirectory(str(run.folder)).dropped)
    assert result.metrics["async/dropped_groups"] == sum(line.get("why") == "stale" for line in lines) >= 2


def test_a_file_of_answers_gives_back_what_was_written(tmp_path):
    versions = np.array([1, 2], dtype=np.int32)
    slots = (
        AnswerSlot(3, 7, (1, 2), Generation(
            tokens=[5, 6], logprobs=[-0.1, -0.25], text="ab", status=ABORTED, weight_version=2, weight_versions=versions
        )),
        AnswerSlot(3, 8, (1,), Generation(tokens=[], logprobs=[], text="", status=ABORTED, weight_version=2)),
        AnswerSlot(4, 9, (1,), Generation(tokens=[2], logprobs=[-1 / 3], text="", status=COMPLETED, weight_version=1)),
    )  # fmt: skip
    again = load_answers(save_answers(tmp_path / "a.npz", slots))
    for one, other in zip(again, slots, strict=True):
        assert (one.prompt, one.seed, one.sent) == (other.prompt, other.seed, other.sent)
        ours, theirs = one.answer, other.answer
        assert (ours.tokens, ours.logprobs, ours.status) == (theirs.tokens, theirs.logprobs, theirs.status)
        assert (ours.weight_version, ours.text) == (theirs.weight_version, theirs.text)
    assert again[0].answer.weight_versions.tolist() == [1, 2] and again[2].answer.weight_versions is None
