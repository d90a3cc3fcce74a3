"""The tables of estimators and policy losses name only what there is: flags, functions and each other."""

from __future__ import annotations

import dataclasses

import pytest

from slime_like.algorithms.group_advantages import BASELINES
from slime_like.algorithms.policy_losses import POLICY_LOSSES as LOSS_FUNCTIONS
from slime_like.algorithms.token_advantages import TOKEN_ADVANTAGES
from slime_like.config.algorithms import ESTIMATORS, POLICY_LOSSES, owners, summaries
from slime_like.config.loss import LossConfig

FIELDS = {field.name for field in dataclasses.fields(LossConfig)}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_estimator_names_what_there_is(name):
    row = ESTIMATORS[name]
    assert set(row.flags) <= FIELDS and row.policy_loss in POLICY_LOSSES
    assert row.baseline is None or row.baseline in BASELINES
    assert row.tokens is None or row.tokens in TOKEN_ADVANTAGES
    assert (row.compares_with, row.scale) in {
        ("group", None),
        ("group", "group"),
        ("group", "batch"),
        ("batch", None),
        ("critic", None),
    }


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_policy_loss_has_its_function_and_its_flags(name):
    assert name in LOSS_FUNCTIONS and set(POLICY_LOSSES[name].flags) <= FIELDS
    assert POLICY_LOSSES[name].has_ratio or not POLICY_LOSSES[name].flags


def test_no_function_is_without_a_row():
    assert set(LOSS_FUNCTIONS) == set(POLICY_LOSSES)


def test_owners_and_help():
    assert owners(ESTIMATORS, "gamma") == ["reinforce_plus_plus", "ppo"] and owners(POLICY_LOSSES, "eps_clip_c") == [
        "clip"
    ]
    assert (
        summaries({"clip": POLICY_LOSSES["clip"], "gspo": POLICY_LOSSES["gspo"]})
        == "clip (PPO's bounded ratio), gspo (one bounded ratio a sample)"
    )
