"""What a rank makes of a batch's parts; how they travel is in tests/multiprocess/test_train_group.py."""

from __future__ import annotations

import numpy as np

from slime_like.cluster.sample_batch import merged
from tests.helpers.train_world import make_samples


def test_columns_are_in_the_records_that_a_rank_sees():
    """Samples without columns are the ones that were put; else they are new records around the same arrays."""
    samples = make_samples(2)
    rows = [np.arange(len(sample.tokens), dtype=np.float32) for sample in samples]
    assert merged((), samples) is samples
    first, second = merged(("kl", "values"), samples, rows, [-row for row in rows])
    assert first.kl is rows[0] and second.values.tolist() == (-rows[1]).tolist()
    assert first.tokens is samples[0].tokens and samples[0].kl is None
