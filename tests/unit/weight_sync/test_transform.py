"""The user's hook between HF name and bucket: one name becomes one, several or none.

What is no (name, tensor) is refused and named.
"""

from __future__ import annotations

import itertools
import re

import pytest
import torch

from slime_like.config.run import RunConfig
from slime_like.config.sync import SyncConfig
from slime_like.errors import PluginError, WeightSyncError
from slime_like.weight_sync import transform as hook
from slime_like.weight_sync.transform import TransformOutcome, WeightTransform, load_transform

PATH = "mine.transform"
NAMES = ["a.weight", "b.weight", "c.bias"]


def tensors():
    torch.manual_seed(0)
    return [(name, torch.randn(3, 4)) for name in NAMES]


def over(function, weights=None, args=None):
    return list(WeightTransform(function, args, PATH).over(tensors() if weights is None else weights))


def test_one_name_becomes_two_one_or_none_in_order():
    def function(args, name, tensor):
        if name == "a.weight":
            scale = tensor.abs().amax() / args.largest
            return [(name, (tensor / scale).to(torch.float8_e4m3fn)), ("a.weight_scale", scale)]
        return [] if name == "b.weight" else ((name, tensor) for _ in range(1))

    args = type("Args", (), {"largest": 448.0})()
    (first, quantised), (second, scale), (third, last) = over(function, args=args)
    weights = dict(tensors())
    assert (first, second, third) == ("a.weight", "a.weight_scale", "c.bias")
    # e4m3 has 3 bits behind the point: half a step is 1/16 of the value; subnormals are 2**-9 apart.
    allowed = weights["a.weight"].abs() / 16 + scale * 2**-10
    assert (
        quantised.dtype == torch.float8_e4m3fn
        and ((quantised.float() * scale - weights["a.weight"]).abs() <= allowed).all()
    )
    assert torch.equal(last, weights["c.bias"])


def test_the_documented_fp8_can_be_computed_back(repo_root):
    (source,) = re.findall(
        r"```python\n(def fp8_blocks.*?)```", (repo_root / "docs/weight-sync.md").read_text(), flags=re.DOTALL
    )
    namespace = {"torch": torch}
    exec(source, namespace)
    weights = [("a.up_proj.weight", torch.randn(300, 200)), ("b.norm.weight", torch.randn(200))]
    (_, quantised), (scale_name, scales), norm = over(namespace["fp8_blocks"], weights)
    assert (scale_name, quantised.dtype, tuple(scales.shape)) == (
        "a.up_proj.weight_scale_inv",
        torch.float8_e4m3fn,
        (3, 2),
    ) and norm == weights[1]
    expected = weights[0][1]
    for row in range(3):
        for column in range(2):
            block = slice(128 * row, 128 * (row + 1)), slice(128 * column, 128 * (column + 1))
            error = (quantised[block].float() * scales[row, column] - expected[block]).abs()
            assert (error <= expected[block].abs() / 16 + scales[row, column] * 2**-10).all()


def test_one_tensor_is_taken_from_the_stream_at_a_time():
    taken = []

    def stream():
        for name, tensor in tensors():
            taken.append(name)
            yield name, tensor

    out = WeightTransform(lambda args, name, tensor: [(f"{name}.{i}", tensor) for i in range(2)], None, PATH).over(
        stream()
    )
    assert [(name, len(taken)) for name, _ in itertools.islice(out, 3)] == [
        ("a.weight.0", 1),
        ("a.weight.1", 1),
        ("b.weight.0", 2),
    ]


def test_to_bf16_rounds_fp32_and_nothing_else():
    values = [
        torch.tensor([1.0, 1.001953125, -3.3]),
        torch.ones(2, dtype=torch.float16),
        torch.ones(2, dtype=torch.int64),
    ]
    tensors = list(zip("abc", values, strict=True))
    (_, a), (_, b), (_, c) = over(hook.to_bf16, tensors)
    # 1 + 2**-9 is nearer to 1 than to 1 + 2**-7; -3.3 lies between -3.296875 and -3.3125.
    assert a.dtype == torch.bfloat16 and a.tolist() == [1.0, 1.0, -3.296875]
    assert b is values[1] and c is values[2]


BAD = {
    "nothing": (lambda args, name, tensor: None, "the function gave a NoneType, no iterable"),
    "a tensor": (lambda args, name, tensor: tensor, r"what the function gave is a Tensor instead of \(name, tensor\)"),
    "a bare pair": (
        lambda args, name, tensor: (name, tensor),
        r"is a str instead of \(name, tensor\). Fix: return \[\(name, tensor\)\]",
    ),
    "a string": (lambda args, name, tensor: name, "the function gave a str, no iterable"),
    "a triple": (lambda args, name, tensor: [(name, tensor, 1)], r"is \(str, Tensor, int\) instead of"),
    "the other way round": (lambda args, name, tensor: [(tensor, name)], r"is \(Tensor, str\) instead of"),
    "numbers": (lambda args, name, tensor: [(name, tensor.tolist())], r"is \(str, list\) instead of"),
    "no name": (lambda args, name, tensor: [("", tensor)], r"is \(str, Tensor\) instead of"),
    "an exception": (lambda args, name, tensor: {}[name], "the function raised KeyError: 'b.weight'"),
    "a late exception": (
        lambda args, name, tensor: ((name, tensor / number) for number in (1, None)),
        "the function raised TypeError",
    ),
    "complex numbers": (
        lambda args, name, tensor: [(name, tensor.to(torch.complex64))],
        "b.weight has type torch.complex64, which cannot be sent",
    ),
    "a sparse tensor": (
        lambda args, name, tensor: [(name, tensor.to_sparse())],
        "b.weight is a sparse_coo tensor, whose bytes cannot be sent",
    ),
    "no memory": (
        lambda args, name, tensor: [(name, tensor.to("meta"))],
        "b.weight is a meta tensor, whose bytes cannot be sent",
    ),
    "the trainer's own memory": (lambda args, name, tensor: [(name, tensor.mul_(2))], "changed the tensor in place"),
    "its own memory, by a view": (
        lambda args, name, tensor: [(name, tensor.view(-1)[:2].zero_())],
        "changed the tensor in place",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named(case):
    function, message = BAD[case]
    with pytest.raises(WeightSyncError, match=message) as raised:
        over(lambda args, name, tensor: function(args, name, tensor) if name == "b.weight" else [(name, tensor)])
    assert str(raised.value).startswith(f"--custom-weight-transform-path {PATH}, b.weight: ")


@pytest.mark.parametrize(
    ("reports", "message"),
    [
        ([TransformOutcome(0, ("a", "b"), "x"), TransformOutcome(1, ("c", "b"), "y")], "b was made twice"),
        ([TransformOutcome(0, ("a", "a"), "x")], "a was made twice"),
        ([TransformOutcome(0, (), "x"), TransformOutcome(1, (), "y")], "nothing was left to send"),
        (
            [
                TransformOutcome(0, ("a",), "x"),
                TransformOutcome(0, (), "x"),
                TransformOutcome(1, ("b",), "x"),
                TransformOutcome(1, (), "y"),
            ],
            "ranks of pipeline stage 1 made other names",
        ),
    ],
)
def test_what_the_ranks_made_together(reports, message):
    transform = WeightTransform(hook.to_bf16, None, PATH)
    transform.check([TransformOutcome(0, ("a",), "x"), TransformOutcome(0, (), "x"), TransformOutcome(1, ("b",), "y")])
    with pytest.raises(WeightSyncError, match=f"^--custom-weight-transform-path {PATH}: {message}"):
        transform.check(reports)


def test_the_summary_is_of_names_types_and_shapes_of_the_last_sync():
    transform = WeightTransform(lambda args, name, tensor: [(name, tensor)], None, PATH)

    def summary(*weights):
        list(transform.over(weights))
        return transform.outcome(3, is_source=True)

    first = summary(("a", torch.zeros(2)), ("b", torch.zeros(1)))
    assert first == summary(("a", torch.ones(2)), ("b", torch.zeros(1))) and (first.stage, first.names) == (
        3,
        ("a", "b"),
    )
    turned = summary(("b", torch.zeros(1)), ("a", torch.zeros(2)))
    others = [turned, summary(("a", torch.zeros(2)), ("b", torch.zeros(1).half())), summary(("a", torch.zeros(2)))]
    assert len({one.summary for one in (first, *others)}) == 4
    assert transform.outcome(3, is_source=False).names == ()


def test_the_flag():
    def config(path):
        return RunConfig(sync=SyncConfig(custom_weight_transform_path=path))

    assert WeightTransform.of(config(None)) is None and load_transform(SyncConfig()) is None
    ((name, tensor),) = WeightTransform.of(config("slime_like.weight_sync.transform.to_bf16")).over(
        [("a", torch.ones(1))]
    )
    assert (name, tensor.dtype) == ("a", torch.bfloat16)
    with pytest.raises(
        PluginError,
        match=r"^--custom-weight-transform-path .*transform.to_fp16: module .* has no 'to_fp16'. It has: .*to_bf16",
    ):
        load_transform(SyncConfig(custom_weight_transform_path="slime_like.weight_sync.transform.to_fp16"))
    with pytest.raises(PluginError, match="will be called with 3 positional arguments"):
        load_transform(SyncConfig(custom_weight_transform_path="slime_like.rollout.filters.reward_nonzero_std"))
