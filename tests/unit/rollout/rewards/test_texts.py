"""F1 against counting by hand and a plain loop; multiple choice against written-out answers."""

from __future__ import annotations

import dataclasses
import random

import pytest

from slime_like.rollout.rewards.texts import f1, gpqa
from tests.unit.rollout.rewards.test_scorer import make_sample


def sample(response: str, label, **metadata):
    return dataclasses.replace(make_sample(), response=response, label=label, metadata=metadata)


@pytest.mark.parametrize(
    ("response", "label", "score"),
    [
        ("the red car", "a red house", 0.5),
        ("Paris!", "paris", 1.0),
        ("in Paris, France", "Paris", 0.5),  # 1 of 3 words, 1 of 1: 2 / 4
        ("yes it is", "yes", 0.0),
        ("no", "yes", 0.0),
        ("Yes.", "yes", 1.0),
        ("no answer", "noanswer", 0.0),
        ("", "Paris", 0.0),
        ("the", "a", 0.0),  # nothing is left of either
        ("red red", "red", 2 / 3),  # a word counts as often as both have it
    ],
)
def test_f1_by_hand(response: str, label: str, score: float):
    assert f1(sample(response, label)) == pytest.approx(score)


def test_f1_is_the_harmonic_mean_of_precision_and_recall():
    draw = random.Random(0)
    for _ in range(200):
        ours, theirs = ([draw.choice("pqrst") for _ in range(draw.randint(1, 6))] for _ in range(2))
        rest, shared = list(theirs), 0
        for word in ours:
            if word in rest:
                rest.remove(word)
                shared += 1
        precision, recall = shared / len(ours), shared / len(theirs)
        expected = 2 * precision * recall / (precision + recall) if shared else 0.0
        assert f1(sample(" ".join(ours), " ".join(theirs))) == pytest.approx(expected)


CHOICES = ["an electron", "a proton", "a neutron", "a photon"]


@pytest.mark.parametrize(
    ("response", "label", "metadata", "score"),
    [
        ("The answer is (B).", "B", {}, 1),
        ("Answer: C", "B", {}, 0),
        ("<think>Answer: B</think> So the answer is D", "D", {}, 1),
        ("<think>Answer: D</think> So the answer is B", "D", {}, 0),
        ("\\boxed{B}", "B", {}, 1),
        ("\\boxed{\\text{(C)}}", "C", {}, 1),
        ("First A seems right. Answer: A. No: the answer is B", "B", {}, 1),
        ("B) a proton", "B", {}, 1),
        ("B", "b", {}, 1),
        ("A good question. It is C", "C", {}, 1),
        ("the answer is B", 1, {"choices": CHOICES}, 1),
        ("the answer is B", 2, {"choices": CHOICES}, 0),
        ("the answer is B", "A proton.", {"choices": CHOICES}, 1),
        ("the answer is C", "x", {"choices": CHOICES, "correct_letter": "c"}, 1),
        ("it must be a proton", "B", {"choices": CHOICES}, 1),  # without a letter: by its text
        ("it must be a neutron", "B", {"choices": CHOICES}, 0),
        ("Answer: E", "E", {"valid_letters": ["A", "E"]}, 1),
        ("Answer: Every one of them", "E", {}, 0),  # E of a word is no letter
        ("", "B", {"choices": CHOICES}, 0),
        ("it is forty two", "forty two", {}, 1),
    ],
)
def test_multiple_choice(response: str, label, metadata: dict, score: int):
    assert gpqa(sample(response, label, **metadata)) == score
