"""One step's samples in the object store: put there once, scored and trained on by several roles."""

from __future__ import annotations

import dataclasses

import numpy as np
import ray

from slime_like.records import TrainSample

#: Field of TrainSample -> an array for each sample.
Columns = dict[str, list[np.ndarray]]


@dataclasses.dataclass(frozen=True)
class SampleBatch:
    """A handle: who drives trainers passes it on and never looks inside.

    Example: batch = critic.with_values(train.put(samples))
    What a role computes of the samples stays in the object store where the role put it, as a column of its own.
    """

    size: int
    samples: ray.ObjectRef  # list[TrainSample]
    columns: tuple[tuple[str, ray.ObjectRef], ...] = ()  # field of TrainSample, and its arrays, one a sample

    def __len__(self) -> int:
        return self.size

    def with_columns(self, **columns: ray.ObjectRef) -> SampleBatch:
        """The same samples with fields that were computed since; the samples themselves are not sent again."""
        return dataclasses.replace(self, columns=(*self.columns, *columns.items()))

    @property
    def parts(self) -> tuple:
        """The arguments of `merged` for an actor's call: Ray fetches references that are arguments themselves."""
        return tuple(name for name, _ in self.columns), self.samples, *(ref for _, ref in self.columns)


def merged(names: tuple[str, ...], samples: list[TrainSample], *columns: list[np.ndarray]) -> list[TrainSample]:
    """The records with their columns in place, inside the rank that needs them.

    Arrays are views into the object store.
    """
    fields: Columns = dict(zip(names, columns, strict=True))
    if not fields:
        return samples
    rows = zip(*fields.values(), strict=True)
    return [
        dataclasses.replace(sample, **dict(zip(fields, row, strict=True)))
        for sample, row in zip(samples, rows, strict=True)
    ]
