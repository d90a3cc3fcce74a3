"""What is wrong with a client's pass, said before any rank runs it."""

import dataclasses

import numpy as np
import pytest

from slime_like.config.model import ModelConfig
from slime_like.megatron_backend.lora.tenant_rows import pass_problem
from slime_like.records import LossRow, TenantPass

MODEL = ModelConfig(vocab_size=10, max_position_embeddings=4)


def row(tokens=(1, 2), targets=(2, 3), **inputs):
    arrays = {name: np.asarray(values, np.float32) for name, values in inputs.items()}
    return LossRow(tokens=np.asarray(tokens, np.int32), targets=np.asarray(targets, np.int64), inputs=arrays)


def problem(*rows, loss="cross_entropy", **options):
    return pass_problem(TenantPass(weights="ada", rows=rows, loss=loss, **options), MODEL)


POLICY = {"logprobs": (-1, -2), "advantages": (1, 0)}


def test_a_sound_pass_has_no_problem():
    assert problem(row(), row(weights=(1, 0))) is None
    assert problem(row(targets=((1, 2), (3, 4)))) is None
    assert problem(row(**POLICY), loss="gspo", config={"clip_low_threshold": 0.5}) is None
    assert problem(row(tokens=(1, 2, 3, 4), targets=(2, 3, 4, 9))) is None


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: problem(), "at least one row"),
        (lambda: problem(row(), loss="dpo"), "'dpo' is unknown"),
        (lambda: problem(row(), loss="custom"), "'custom'"),
        (lambda: problem(row(), loss="configured"), "'configured' is not one that clients have"),
        (lambda: problem(row(**POLICY), loss="dro", config={"gamma": 1.0}), "has no gamma"),
        (lambda: problem(row(), row(logprobs=(0, 0)), loss="ppo"), "row 0: loss 'ppo' needs logprobs, advantages"),
        (lambda: problem(row(**POLICY), row(logprobs=(0, 0)), loss="ppo"), "row 1: loss 'ppo' needs advantages"),
        (lambda: problem(row(tokens=(1, 10))), "token ids from 1 to 10"),
        (lambda: problem(row(targets=(-1, 2))), "target ids from -1 to 2"),
        (lambda: problem(row(tokens=(1,) * 5, targets=(1,) * 5)), "5 tokens are more than the model's 4"),
        (lambda: problem(row(tokens=(), targets=())), "0 tokens"),
        (lambda: problem(row(targets=np.zeros((2, 0)))), "0"),
        (
            lambda: problem(
                row(targets=((1, 2), (3, 4)), logprobs=((0, 0), (0, 0)), advantages=((0, 0), (0, 0))), loss="gspo"
            ),
            "takes one target a position, not 2",
        ),
    ],
)
def test_what_is_wrong_is_said(wrong, said):
    assert said in wrong()


def test_records_compare_shapes_already():
    with pytest.raises(ValueError, match="other shapes"):
        dataclasses.replace(row(), inputs={"weights": np.ones(3, np.float32)})
