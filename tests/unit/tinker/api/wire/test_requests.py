"""Passes as the client library sends them are read as it meant them; all else is refused."""

from __future__ import annotations

import numpy as np
import pytest
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto

from slime_like.tinker.api.bodies import JsonPass
from slime_like.tinker.api.wire.bounds import BodyLimits
from slime_like.tinker.api.wire.messages import MESSAGES
from slime_like.tinker.api.wire.requests import read_json_pass, read_pass, read_prompt
from slime_like.tinker.errors import Refused
from tests.helpers.tinker_data import draw_datums

LIMITS = BodyLimits()


def encode(data: list[types.Datum], **more) -> bytes:
    wanted = types.ForwardBackwardInput(data=data, loss_fn="ppo", loss_fn_config={"clip_low_threshold": 0.5})
    request = types.ForwardBackwardRequest(forward_backward_input=wanted, model_id="s:train:0", seq_id=3, **more)
    return forward_backward_request_to_proto(request).SerializeToString()


def expected_array(tensor: types.TensorData) -> np.ndarray:
    return tensor.to_numpy()


def test_what_the_library_encodes_is_read_as_it_was():
    rng = np.random.default_rng(1)
    num_sparse = 0
    for _ in range(40):
        data = draw_datums(rng, int(rng.integers(1, 8)))
        wanted = read_pass(encode(data), LIMITS)
        assert (wanted.model_id, wanted.seq_id, wanted.loss, wanted.config, wanted.forward_only) == (
            "s:train:0",
            3,
            "ppo",
            {"clip_low_threshold": 0.5},
            False,
        )
        for datum, row in zip(data, wanted.rows, strict=True):
            assert row.tokens.dtype == np.int32 and row.tokens.tolist() == datum.model_input.to_ints()
            expected = {name: expected_array(tensor) for name, tensor in datum.loss_fn_inputs.items()}
            np.testing.assert_array_equal(row.targets, expected.pop("target_tokens"), strict=True)
            assert set(row.inputs) == set(expected)
            for name, array in expected.items():
                np.testing.assert_array_equal(row.inputs[name], array, strict=True)
            num_sparse += any(t.sparse_crow_indices is not None for t in datum.loss_fn_inputs.values())
    assert num_sparse > 10


def as_json(data: list[types.Datum]) -> dict:
    def tensor(t: types.TensorData) -> dict:
        fields = {"data": t.data, "dtype": t.dtype, "shape": t.shape}
        return fields | {
            "sparse_crow_indices": t.sparse_crow_indices,
            "sparse_col_indices": t.sparse_col_indices,
        }

    datums = [
        {
            "model_input": {"chunks": [{"tokens": c.tokens, "type": "encoded_text"} for c in d.model_input.chunks]},
            "loss_fn_inputs": {name: tensor(t) for name, t in d.loss_fn_inputs.items()},
        }
        for d in data
    ]
    return {
        "model_id": "s:train:0",
        "seq_id": 3,
        "forward_backward_input": {"data": datums, "loss_fn": "ppo", "loss_fn_config": {"clip_low_threshold": 0.5}},
    }


def test_json_of_old_clients_is_read_as_protobuf_is():
    data = draw_datums(np.random.default_rng(2), 12)
    ours = read_json_pass(JsonPass.model_validate(as_json(data)).model_dump(), LIMITS)
    theirs = read_pass(encode(data), LIMITS)
    assert (ours.model_id, ours.seq_id, ours.loss, ours.config) == (
        theirs.model_id,
        theirs.seq_id,
        theirs.loss,
        theirs.config,
    )
    for mine, other in zip(ours.rows, theirs.rows, strict=True):
        np.testing.assert_array_equal(mine.tokens, other.tokens, strict=True)
        np.testing.assert_array_equal(mine.targets, other.targets, strict=True)
        for name in other.inputs:
            np.testing.assert_array_equal(mine.inputs[name], other.inputs[name], strict=True)


def mutate(rng: np.random.Generator, body: bytes) -> bytes:
    """Bytes changed, cut out, doubled or put in."""
    data = bytearray(body)
    for _ in range(int(rng.integers(1, 6))):
        at = int(rng.integers(0, len(data) + 1))
        match rng.integers(0, 4):
            case 0 if at < len(data):
                data[at] = int(rng.integers(0, 256))
            case 1:
                del data[at : at + int(rng.integers(1, 30))]
            case 2:
                data[at:at] = data[at : at + int(rng.integers(1, 200))]
            case _:
                data[at:at] = rng.bytes(int(rng.integers(1, 12)))
    return bytes(data)


def test_a_thousand_damaged_bodies_are_read_or_refused():
    rng = np.random.default_rng(3)
    refused = 0
    for number in range(1000):
        body = encode(draw_datums(rng, 2)) if number % 4 else rng.bytes(int(rng.integers(1, 300)))
        try:
            read_pass(mutate(rng, body), LIMITS)
        except Refused as error:
            assert 400 <= error.status < 500 and len(str(error)) < 1000
            refused += 1
    assert refused > 500


def message(**tensors) -> bytes:
    body = MESSAGES["ForwardBackwardRequest"](model_id="m", seq_id=1, loss_fn="cross_entropy")
    datum = body.data.add()
    datum.model_input.add().encoded_text.tokens = np.array([1, 2], "<i4").tobytes()
    for name, tensor in tensors.items():
        datum.loss_fn_inputs[name].CopyFrom(MESSAGES["Tensor"](**tensor))
    return body.SerializeToString()


TARGETS = {"dense": np.array([2, 3], "<i8").tobytes(), "dtype": 2, "shape": [2]}


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        ({}, "needs target_tokens"),
        ({"target_tokens": {"dense": b"\0" * 8, "dtype": 1}}, "needs target_tokens, as whole numbers"),
        ({"target_tokens": {**TARGETS, "dtype": 0}}, "dtype 0 is unknown"),
        ({"target_tokens": {**TARGETS, "dense": b"\0" * 9}}, "9 bytes are no whole number of 8-byte"),
        ({"target_tokens": {**TARGETS, "shape": [3]}}, "2 values have no shape"),
        ({"target_tokens": {**TARGETS, "shape": [-1, -2]}}, "2 values have no shape"),
        ({"target_tokens": {**TARGETS, "shape": [2**62, 4]}}, "2 values have no shape"),
        ({"target_tokens": TARGETS, "weights": {"dense": b"\0" * 12, "dtype": 1}}, "arrays of other shapes"),
        (
            {"target_tokens": TARGETS, "weights": {"dense": np.array([1, np.nan], "<f4").tobytes(), "dtype": 1}},
            "weights has a value that is not finite",
        ),
    ],
)
def test_a_datum_that_cannot_be_meant_is_refused(tensors: dict, problem: str):
    with pytest.raises(Refused, match=problem) as refused:
        read_pass(message(**tensors), LIMITS)
    assert refused.value.status == 400


def test_a_seq_id_below_one_a_text_for_a_number_and_an_image_are_refused():
    rng = np.random.default_rng(4)
    with pytest.raises(Refused, match="seq_id 0"):
        body = MESSAGES["ForwardBackwardRequest"].FromString(encode(draw_datums(rng, 1)))
        body.seq_id = 0
        read_pass(body.SerializeToString(), LIMITS)
    body.seq_id = 1
    body.loss_fn_config_v2["mode"].text = "fast"
    with pytest.raises(Refused, match="'mode' is 'fast', not a finite number"):
        read_pass(body.SerializeToString(), LIMITS)
    image = MESSAGES["ForwardBackwardRequest"](model_id="m", seq_id=1, loss_fn="ppo")
    image.data.add().model_input.add().image.data = b"png"
    with pytest.raises(Refused, match="a chunk of kind image; only tokens"):
        read_pass(image.SerializeToString(), LIMITS)
    with pytest.raises(Refused, match="at least one datum"):
        read_pass(MESSAGES["ForwardBackwardRequest"](model_id="m", seq_id=1, loss_fn="ppo").SerializeToString(), LIMITS)


def test_a_prompt_has_at_least_one_token_that_an_int32_holds():
    assert read_prompt([{"tokens": [1]}, {"tokens": []}, {"tokens": [2, 3]}], LIMITS).tolist() == [1, 2, 3]
    for chunks in ([], [{"tokens": []}], [{"tokens": [2**31]}]):
        with pytest.raises(Refused):
            read_prompt(chunks, LIMITS)
