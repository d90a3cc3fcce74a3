"""The parity table: every family, layout and format of batches against HF transformers with the same weights, on one
ragged batch.

Only the rows that were selected are run (-k "qwen3 and cp2"): by default all variants and some layouts of each family,
with -m parity_table the rest. benchmarks/parity_table.py prints the whole table.
"""

import numpy as np
import pytest

from tests.helpers.parity import KL_COEF, Row, in_waves, ragged_batch
from tests.helpers.parity import run_table as run
from tests.helpers.parity_rows import (
    DENSE_LAYOUTS,
    EXPERT_LAYOUTS,
    FORMATS,
    all_rows,
    is_quick,
    layouts_of,
    make_models,
)
from tests.helpers.tiny_models import CONFIGS
from tests.helpers.train_world import advantage_of

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(900)]

ROWS = all_rows()
BOUNDS = {
    "log_probs": 1e-5,
    "reference": 1e-5,
    "gradient": 1e-5,
    "grad_norm": 1e-5,
    "loss": 1e-5,
    "entropy": 1e-5,
    "kl_loss": 1e-5,
}
#: A weight has 8 bits in bf16. Largest difference of a log-prob: with experts, a token whose best experts nearly tie
#: may go elsewhere.
BF16_BOUNDS = {"log_probs_mean": 0.05, "grad_norm": 0.01, "entropy": 0.005, "gradient": 0.1}
BF16_FURTHEST = {False: 0.2, True: 1.5}

MARKED = [row if is_quick(row) else pytest.param(row, marks=pytest.mark.parity_table) for row in ROWS]
each_row = pytest.mark.parametrize("row", MARKED, ids=lambda row: row.name)


@pytest.fixture(scope="module")
def table(request, tmp_path_factory):
    """Row's name -> what each of its ranks found.

    Of the rows that selected tests need, and one of each model to compare with.
    """
    items = [item for item in request.session.items if item.path == request.path]
    wanted = {
        item.callspec.params["row"].name for item in items if "row" in getattr(item, "callspec", _NoParameters).params
    }
    if any(item.name == test_a_step_moves_every_layout_to_the_same_weights.__name__ for item in items):
        wanted |= {row.name for row in MOVED}
    rows = [row for row in ROWS if row.name in wanted]
    by_row = run(rows, make_models(str(tmp_path_factory.mktemp("models")), rows), timeout_s=800)
    return {row.name: results for row, results in zip(rows, by_row, strict=True)}


#: Rows whose weights after a step are compared.
MOVED = [row for row in ROWS if row.model == "qwen3" and is_quick(row) and not (row.loss or row.bf16 or row.shares)]


class _NoParameters:
    params: dict = {}


@each_row
def test_equals_hf(table, row):
    for result in table[row.name]:
        furthest = {name: result[name] for name in BOUNDS}
        if not row.bf16:
            assert {name: value for name, value in furthest.items() if not value <= BOUNDS[name]} == {}
            continue
        assert {name: result[name] for name, bound in BF16_BOUNDS.items() if not result[name] <= bound} == {}
        assert (
            1e-4
            < furthest["log_probs"]
            <= BF16_FURTHEST[
                "ep" in row.layout or "moe" in row.model or "deepseek" in row.model or "moonlight" in row.model
            ]
        )


@each_row
def test_ranks_agree_and_one_without_samples_takes_part(table, row):
    """Of one sample at ratio 1 the policy loss is its advantage, negated, whatever the weights are.

    The other ranks have none.
    """
    first = table[row.name][0]
    assert first["lone"]["train/pg_loss"] == pytest.approx(-advantage_of(row.samples[0]), rel=1e-5)
    assert first["lone"]["train/grad_norm"] > 0
    for other in table[row.name][1:]:
        assert other["same"] == first["same"]
        for mine, theirs in zip(other["scores"], first["scores"], strict=True):
            np.testing.assert_array_equal(mine, theirs)


@each_row
def test_shared_prompts_are_computed_once(table, row):
    """A split group has its prompt in both parts, and so have two ranks; of the rest each token is its own."""
    for result in table[row.name]:
        assert 0.5 < result["computed"] < 0.85 if row.shares else result["computed"] == 1.0


@each_row
def test_every_gradient_was_compared(table, row):
    """The stages' gradients together are those of the whole model; a rank's weights came out as they went in."""
    results = table[row.name]
    assert set().union(*(result["gradient names"] for result in results)) == set(results[0]["all names"])
    if not row.bf16:
        assert max(result["exported"] for result in results) == 0.0


@each_row
def test_engine_difference_is_taken_before_the_step(table, row):
    samples, result = row.samples, table[row.name][0]
    masks = [s.loss_mask.astype(bool) for s in samples]
    differences = np.concatenate(
        [np.abs(ours - s.engine_logprobs)[m] for ours, s, m in zip(result["scores"], samples, masks, strict=False)]
    )
    assert result["engine"] == pytest.approx([differences.mean(), differences.max()], rel=1e-5)


def test_a_step_moves_every_layout_to_the_same_weights(table):
    """The step's effect, seen through log-probs.

    Adam divides by its second moment, which blows rounding up to about 1e-3 of a step.
    """
    count = len(ragged_batch())
    before, after = (table[MOVED[0].name][0]["scores"][part] for part in (slice(0, count), slice(count, None)))
    moved = max(np.abs(a - b).max() for a, b in zip(after, before, strict=True))
    assert moved > 0.1
    for row in MOVED[1:]:
        for ours, theirs in zip(table[row.name][0]["scores"][count:], after, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=2e-2 * moved, rtol=0, err_msg=row.name)


def test_the_table_is_as_large_as_promised():
    """At least 14 layouts up to 4 ranks for each family, packed and padded."""
    assert min(len(DENSE_LAYOUTS), len(EXPERT_LAYOUTS)) >= 14 and set(FORMATS) == {"packed", "padded"}
    for family in CONFIGS:
        for form in FORMATS:
            layouts = {row.layout for row in ROWS if (row.model, row.format) == (family, form) and not row.bf16}
            assert layouts >= set(layouts_of(family))
        assert sum(is_quick(row) for row in ROWS if row.model == family and not row.bf16) >= 6
    assert len({row.name for row in ROWS}) == len(ROWS)
    assert KL_COEF > 0  # else the reference would not matter


def test_rows_side_by_side_share_no_rank():
    rows = [Row("m", str(n), ranks, {}) for n, ranks in enumerate([1, 4, 2, 1, 2, 1, 4])]
    waves = in_waves(rows)
    assert sorted(number for wave in waves for number, _ in wave) == list(range(7))
    for wave in waves:
        taken = [rank for number, first in wave for rank in range(first, first + rows[number].ranks)]
        assert len(taken) == len(set(taken)) <= 4 and max(taken) < 4
