"""Fixed prompts are the same at every sync, fit the engine, and a disagreement names engine and prompt."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from slime_like.config.model import ModelConfig
from slime_like.config.rollout import RolloutConfig
from slime_like.config.run import RunConfig
from slime_like.config.sync import SyncConfig
from slime_like.errors import WeightSyncError
from slime_like.records import EngineEndpoint
from slime_like.weight_sync.proof.probe import compare_probe, probe_samples, tolerance_of


def config(**sync) -> RunConfig:
    return RunConfig(
        model=ModelConfig(vocab_size=50), rollout=RolloutConfig(rollout_max_context_len=24), sync=SyncConfig(**sync)
    )


@dataclasses.dataclass
class FakeClient:
    """Says of each prompt what it was told, moved by `off`."""

    rows: list
    off: float = 0.0
    index: int = 0

    @property
    def endpoint(self):
        return EngineEndpoint(index=self.index, url=self.url)

    @property
    def url(self):
        return f"http://e{self.index}"

    def prompt_log_probs(self, prompts, timeout_s=None, adapter=None):
        assert [len(prompt) - 1 for prompt in prompts] == [len(row) - 1 for row in self.rows]
        return [[float(value) + self.off for value in row[1:]] for row in self.rows]


def rows_of(samples):
    # entry 0 means nothing
    return [np.concatenate([[9.0], np.linspace(-3, -1, len(sample.tokens) - 1)]) for sample in samples]


def test_prompts_are_fixed_and_fit():
    first, again = probe_samples(config()), probe_samples(config())
    for one, other in zip(first, again, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
    assert {len(sample.tokens) for sample in first} == {16}  # SGLang keeps some of the 24 for itself
    assert (
        len(probe_samples(dataclasses.replace(config(), rollout=RolloutConfig(rollout_max_context_len=4096)))[0].tokens)
        == 32
    )
    assert 0 <= min(sample.tokens.min() for sample in first) and max(sample.tokens.max() for sample in first) < 50
    assert not np.array_equal(first[0].tokens, first[1].tokens)


def test_largest_difference_of_any_engine():
    samples = probe_samples(config())
    rows = rows_of(samples)
    clients = [FakeClient(rows, 1e-4), FakeClient(rows, -2e-4, index=1)]
    assert compare_probe(config(), clients, samples, rows, version=3, bf16=False) == pytest.approx(2e-4, rel=1e-3)


def test_with_a_transform_rounding_is_allowed():
    options = config(custom_weight_transform_path="any.function")
    samples = probe_samples(options)
    rows = rows_of(samples)
    assert compare_probe(options, [FakeClient(rows, 2e-2)], samples, rows, version=3, bf16=False) == pytest.approx(
        2e-2, rel=1e-3
    )
    with pytest.raises(WeightSyncError, match="allowed is 0.3"):
        compare_probe(options, [FakeClient(rows, 0.4)], samples, rows, version=3, bf16=False)


@pytest.mark.parametrize(
    ("sync", "bf16", "expected"),
    [
        ({}, False, 1e-3), ({}, True, 0.3), ({"rollout_quantization": "int8"}, False, 1.0),
        ({"rollout_quantization": "fp8"}, True, 1.0),
        ({"rollout_quantization": "fp8", "verify_weight_sync_tolerance": 0.01}, False, 0.01),
    ],
)  # fmt: skip
def test_eight_bits_are_allowed_to_round(sync, bf16, expected):
    assert tolerance_of(config(**sync), bf16=bf16) == expected


@pytest.mark.parametrize(
    ("off", "bf16", "tolerance"),
    [(2e-3, False, None), (0.4, True, None), (2e-3, True, 1e-3), (float("nan"), True, None)],
)
def test_a_disagreement_names_the_engine(off, bf16, tolerance):
    options = config(verify_weight_sync_tolerance=tolerance)
    samples = probe_samples(options)
    rows = rows_of(samples)
    clients = [FakeClient(rows), FakeClient(rows, off, index=1)]
    with pytest.raises(
        WeightSyncError, match=r"1 of 2 engines .*version 3.*engine 1 at http://e1: .*--verify-weight-sync-tolerance"
    ):
        compare_probe(options, clients, samples, rows, version=3, bf16=bf16)


@pytest.mark.parametrize(
    ("mode", "interval", "expected"),
    [
        ("digest", 3, [True, False, False, True]),
        ("digest", 0, [False] * 4),
        ("probe", 3, [True] * 4),
        ("full", 3, [True] * 4),
        ("off", 1, [False] * 4),
    ],
)
def test_which_syncs_are_probed(mode, interval, expected):
    sync = SyncConfig(verify_weight_sync=mode, verify_weight_sync_interval=interval)
    assert [sync.probes_at(number) for number in range(4)] == expected
    assert sync.compares_digests == (mode in ("digest", "full"))
