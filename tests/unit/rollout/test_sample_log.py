"""A few answers of each rollout can be read: from the best to the worst, by what was trained and what was not."""

from __future__ import annotations

import json

import numpy as np

from slime_like.records import Prompt, Sample, SampleGroup
from slime_like.rollout.sample_log import SampleLog, pick, spans


def sample(index: int, reward: float, *, mask=(0, 1, 1), segment: int = 0, response: str = "") -> Sample:
    flags = np.array(mask, dtype=np.int8)
    return Sample(
        prompt_index=3,
        sample_index=index,
        segment_index=segment,
        tokens=np.arange(10, 10 + len(mask), dtype=np.int32),
        loss_mask=flags,
        engine_logprobs=np.where(flags, -0.5, 0).astype(np.float32),
        weight_versions=np.where(flags, 7, -1).astype(np.int32),
        response=response or f"answer {index}",
        reward=reward,
        label="L",
        metadata={"array": np.arange(2)},  # what no JSON file takes as it is
    )


def group(*samples: Sample) -> SampleGroup:
    return SampleGroup(prompt=Prompt(index=3, text="a question", tokens=np.array([10])), samples=samples)


def rewards_of(chosen) -> list[float]:
    return [segments[-1].reward for _, segments in chosen]


def test_the_best_the_worst_and_evenly_between():
    groups = [group(*(sample(i, reward) for i, reward in enumerate((0.0, 1.0, 0.5, 0.2, 0.7))))]
    assert rewards_of(pick(groups, 2)) == [1.0, 0.0]
    assert rewards_of(pick(groups, 3)) == [1.0, 0.5, 0.0]
    assert rewards_of(pick(groups, 1)) == [1.0] and pick(groups, 0) == []
    assert len(pick(groups, 99)) == 5 and pick([], 4) == []


def test_an_episode_is_one_answer_with_all_its_segments(tmp_path):
    groups = [group(sample(0, 1.0), sample(0, 1.0, segment=1), sample(1, 0.0))]
    path = SampleLog(tmp_path, None, 1).write(5, groups)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert path.name == "rollout-5.jsonl" and [line["segment_index"] for line in lines] == [0, 1]


def test_a_line_says_what_was_trained_and_what_was_not(tmp_path, tokenizer):
    path = SampleLog(tmp_path, tokenizer, 4).write(0, [group(sample(0, 0.25, mask=(0, 0, 1, 1, 0, 1)))])
    (line,) = (json.loads(text) for text in path.read_text().splitlines())
    assert (line["prompt"], line["response"], line["reward"], line["label"]) == ("a question", "answer 0", 0.25, "L")
    assert [(span["trained"], span["tokens"]) for span in line["spans"]] == [
        (False, [10, 11]),
        (True, [12, 13]),
        (False, [14]),
        (True, [15]),
    ]
    assert line["spans"][1]["text"] == tokenizer.decode([12, 13]) and line["spans"][1]["logprob_mean"] == -0.5
    assert line["trained_tokens"] == 3 and line["weight_versions"] == [7]


def test_spans_cover_every_token_once():
    assert spans(np.array([0, 0, 1, 0])) == [(0, 2), (2, 3), (3, 4)]
    assert spans(np.array([], dtype=np.int8)) == [] and spans(np.ones(2)) == [(0, 2)]


def test_nothing_is_written_without_log_samples(tmp_path):
    nothing = SampleLog(tmp_path, None, 0)
    assert nothing.write(0, [group(sample(0, 1.0))]) is None and list(tmp_path.iterdir()) == []
    assert nothing.best_and_worst([group(sample(0, 1.0))]) == []


def test_the_console_shows_the_best_and_the_worst_on_one_line_each(tmp_path):
    long = "x" * 500
    lines = SampleLog(tmp_path, None, 1).best_and_worst([group(sample(0, 0.5, response=long), sample(1, 1.0))])
    assert lines[0] == "  best  1  a question -> answer 1"
    assert lines[1].startswith("  worst 0.5  a question -> xxx") and " … " in lines[1] and len(lines[1]) < 200
    assert len(SampleLog(tmp_path, None, 1).best_and_worst([group(sample(0, 1.0, response="a\nb"))])) == 1
