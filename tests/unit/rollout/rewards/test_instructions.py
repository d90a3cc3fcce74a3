"""The reward ifbench: what a row must hold; with the checkers really installed (long_run), what a response earns."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import subprocess
import sys

import pytest

from slime_like.config.reward import RewardConfig
from slime_like.errors import DataError, RewardError
from slime_like.records import Prompt
from slime_like.rollout.check_data import check_data
from slime_like.rollout.rewards.instructions import first_problem, row_problem
from slime_like.rollout.rewards.scorer import RewardScorer
from slime_like.rollout.sample_builder import SampleBuilder

REQUIREMENTS = "scripts/requirements"


def follow(*names: str, kwargs=None, **more) -> dict:
    return {"instruction_id_list": list(names), "kwargs": kwargs} | more


WORDS = follow("count:word_count_range", kwargs=[{"min_words": 3, "max_words": 5, "keyword": None}])
BOTH = follow(
    "count:word_count_range", "count:numbers", kwargs=[{"min_words": 3, "max_words": 5}, {"N": 2, "max_words": None}]
)
COPY = follow("repeat:repeat_simple", prompt_text="Say it")
#: metadata, response, whether it follows
TABLE = [
    (WORDS, "one two three four", 1),
    (WORDS, "one two", 0),
    (WORDS, "one two three four five six", 0),
    (BOTH, "7 and 9 it is", 1),
    (BOTH, "7 it is, I say", 0),  # one number
    (BOTH, "7 and 9", 1),
    (BOTH, "7 9", 0),  # two numbers, but two words
    (WORDS, "  \n", 0),
    (follow("count:word_count_range", kwargs={"min_words": 1, "max_words": 2}), "one two", 1),
    (follow("punctuation:no_comma", kwargs=[{}]), "no comma", 1),  # IFEval's
    (follow("punctuation:no_comma"), "a, comma", 0),
]


@pytest.mark.parametrize(
    ("metadata", "problem"),
    [
        (WORDS, None),
        (follow("a"), None),
        (follow("a", "b", kwargs={"n": 1}), None),
        ({}, "'instruction_id_list' is None, not a list of names"),
        (follow(), "'instruction_id_list' is"),
        ({"instruction_id_list": "a"}, "'instruction_id_list' is a,"),
        (follow("a", "b", "c", kwargs=[{}, {}]), "not 3 objects as there are instructions"),
        (follow("a", kwargs=["n"]), "'kwargs' is"),
    ],
)
def test_what_a_row_must_hold(metadata, problem):
    said = row_problem(metadata)
    assert said is None if problem is None else problem in said


def row_of(metadata: dict) -> dict:
    return {"prompt": "Say it", "label": None, "metadata": metadata}


def test_without_the_package_the_fix_is_told_before_anything_starts(make_config, tokenizer):
    if importlib.util.find_spec("if_verifiable"):
        pytest.skip("if-verifiable is installed")
    for options, row in (
        ({"rm_type": "ifbench"}, row_of(WORDS)),
        ({"rm_type": "boxed_ifbench"}, row_of(WORDS)),
        ({}, row_of(WORDS | {"rm_type": "ifbench"}) | {"label": 1}),
    ):
        with pytest.raises(
            DataError, match=r"needs the package if-verifiable. Fix: pip install 'slime-like\[ifbench\]'"
        ):
            check_data(make_config([row], **options), tokenizer=tokenizer)


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """The extra in a folder of its own, which this process and reward processes import from."""
    if importlib.util.find_spec("if_verifiable"):
        yield
        return
    folder = str(tmp_path_factory.mktemp("ifbench"))
    files = [f"{REQUIREMENTS}/{name}.txt" for name in ("envs", "ifbench")]
    pins = [line.strip() for file in files for line in open(file) if "==" in line and not line.startswith("#")]
    names = ("datasets", "emoji", "if-verifiable", "immutabledict", "langdetect", "multiprocess", "syllapy")
    wanted = [
        pin for pin in pins if pin.split("==")[0] in (*names, "nltk", "pandas", "joblib", "defusedxml", "cloudpickle")
    ]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, *wanted]
    subprocess.run(command, check=True, timeout=280)
    before = os.environ.get("PYTHONPATH")
    sys.path.append(folder)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [before, folder]))
    try:
        yield
    finally:
        sys.path.remove(folder)
        os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)


def rewards_of(table) -> list[float]:
    """What a scorer gives, in reward processes."""

    async def score():
        scorer = RewardScorer(RewardConfig(rm_type="ifbench"), None, None)
        try:
            rewards = []
            for number, (metadata, response, *_) in enumerate(table):
                prompt = Prompt(index=number, text="", tokens=[1], metadata=metadata)
                sample = SampleBuilder(prompt).observe([1]).finish(response=response)
                rewards.append((await scorer.score(sample, prompt)).reward)
            assert scorer.num_unscorable == 0
            return rewards
        finally:
            await scorer.close()

    return asyncio.run(score())


@pytest.mark.long_run
def test_a_response_earns_one_if_it_follows_every_instruction(package):
    assert rewards_of(TABLE) == [float(follows) for *_, follows in TABLE]


@pytest.mark.long_run
def test_data_of_nltk_that_is_missing_is_told_before_anything_starts(package, tmp_path, monkeypatch):
    """Also behind another checker that does not pass the words that are tried."""
    monkeypatch.setenv("HOME", str(tmp_path))  # where the package would load it to
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # nobody listens there
    row = follow("count:numbers", "ratio:stop_words", kwargs=[{"N": 40}, {"percentage": 50}])
    problem = first_problem([WORDS, row])
    assert problem is not None and problem[0] == 1
    assert "NLTK has no data ['stopwords']. Fix: python -m nltk.downloader stopwords" in problem[1]


@pytest.mark.long_run
def test_rows_that_nothing_can_be_scored_with_are_told_before_anything_starts(package, make_config, tokenizer):
    assert first_problem([WORDS, BOTH, COPY]) is None
    for wrong, message in (
        (follow("count:nothing"), "the instruction 'count:nothing' is none of IFBench's or IFEval's"),
        (follow("count:numbers", kwargs=[{"numbers": 2}]), "count:numbers does not take {'numbers': 2}"),
        (follow("count:numbers", kwargs=[2]), "'kwargs' is"),
    ):
        with pytest.raises(DataError, match="train.jsonl line 2: --rm-type ifbench cannot score it: " + message):
            check_data(make_config([row_of(WORDS), row_of(wrong)], rm_type="ifbench"), tokenizer=tokenizer)
        with pytest.raises(RewardError, match="--rm-type ifbench, prompt 0, sample 0: " + message):
            rewards_of([(wrong, "1 2 3")])
