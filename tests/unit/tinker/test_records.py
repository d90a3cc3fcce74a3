"""What calls are made of."""

import numpy as np
import pytest

from slime_like.records import LossRow
from slime_like.tinker.errors import Refused
from slime_like.tinker.records import ModelSpec


def test_a_datum_has_arrays_of_one_shape():
    tokens, targets = np.array([11, 12], np.int32), np.array([[12, 13], [2, 3]])
    LossRow(tokens=tokens, targets=targets, inputs={"weights": np.ones((2, 2), np.float32)})
    with pytest.raises(ValueError, match="weights.*3"):
        LossRow(tokens=tokens, targets=targets[:, 0], inputs={"weights": np.ones(3, np.float32)})
    with pytest.raises(ValueError, match=r"\(2,\) tokens"):
        LossRow(tokens=tokens, targets=np.array([1, 2, 3]), inputs={})


def test_a_refusal_says_when_to_come_again():
    refused = Refused("64 requests are under way", status=429, retry_after_s=2.0)
    assert (refused.status, refused.retry_after_s, str(refused)) == (429, 2.0, "64 requests are under way")


@pytest.mark.parametrize(
    ("rank", "unembed", "is_told"), [(4, True, True), (4, False, False), (0, True, False), (0, False, False)]
)
def test_a_client_is_told_that_the_output_layer_has_no_adapter(rank, unembed, is_told):
    spec = ModelSpec(model_id="m", tenant="t", base_model="b", lora_rank=rank, train_unembed=unembed)
    assert ("train_unembed=True has no effect" in spec.notice) is is_told
