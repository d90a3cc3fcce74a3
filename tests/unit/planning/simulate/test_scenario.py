"""Everything impossible is listed at once, and a scenario survives JSON."""

from __future__ import annotations

import json

import pytest

from slime_like.errors import ConfigError
from slime_like.planning.simulate.scenario import Scenario, Workload
from slime_like.planning.simulate.spread import Spread


def test_json_and_back():
    scenario = Scenario(work=Workload(response_tokens=Spread("measured", (1.0, 5.0), limit=9.0)), colocated=True)
    scenario = scenario.with_rules(mode="full", num_workers=7).with_trainer(sync_s=Spread.parse("1~2"))
    assert Scenario.from_dict(json.loads(json.dumps(scenario.to_dict()))) == scenario


def test_a_field_that_there_is_not():
    with pytest.raises(ConfigError, match="colour"):
        Scenario.from_dict({"work": {"colour": 3}})


def test_gpus_are_counted_once_where_they_are_shared():
    scenario = Scenario().with_engines(num_engines=4, gpus_per_engine=2).with_trainer(num_gpus=8, per_token_s=1.0)
    assert scenario.num_gpus == 16
    assert Scenario(**{**vars(scenario), "colocated": True}).num_gpus == 8
    assert scenario.with_trainer_gpus(2).trainer.per_token_s == 4.0


def test_all_problems_at_once():
    scenario = Scenario().with_work(batch=0, filtered_share=1.0).with_engines(base_s=0.0)
    with pytest.raises(ConfigError) as error:
        scenario.with_rules(mode="sometimes").check()
    assert [problem.split(" ")[0] for problem in error.value.problems] == [
        "--batch",
        "--decode-base",
        "--filtered-share",
        "--async-mode",
    ]


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"mode": "full", "max_staleness": 1, "sync_interval": 3}, "Fix: --max-staleness 2"),
        ({"over_sampling": 5}, "--over-sampling 5 is below --batch 32"),
        ({"over_sampling": 64, "mode": "full"}, "is of mode off"),
        ({"partial": True}, "does nothing without --over-sampling"),
        ({"pause_mode": "stop"}, "--pause-mode stop is unknown. Known: retract, keep, abort"),
        ({"contention": float("nan")}, "--contention"),
    ],
)
def test_rules_that_contradict(rules: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        Scenario().with_rules(**rules).check()


def test_shared_gpus_take_turns():
    with pytest.raises(ConfigError, match="take turns"):
        Scenario(colocated=True).with_rules(mode="one-step").check()
