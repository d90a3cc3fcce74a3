"""One step's samples in the object store: put there once, scored and trained on by several roles."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import ray

from slime_like.records import TrainSample

#: Of an array, in the mean: larger ones (routed experts) cost more to join than they cost to send one by one.
_MOST_BYTES = 1 << 16
_FIELDS = tuple(field.name for field in dataclasses.fields(TrainSample))


@dataclasses.dataclass(frozen=True)
class JoinedRows:
    """An array for each sample, one behind the other: one buffer to send, where 10,000 samples have 60,000 arrays."""

    joined: np.ndarray  # [sum of lengths, …]
    lengths: np.ndarray  # [samples] int64

    def split(self) -> list[np.ndarray]:
        """Views of each sample's."""
        stops = np.cumsum(self.lengths).tolist()
        return [self.joined[start:stop] for start, stop in zip([0, *stops], stops, strict=False)]


#: One field of all samples; a list where it is no array, or they differ in more than their length.
Column = JoinedRows | list


@dataclasses.dataclass(frozen=True)
class SampleBatch:
    """A handle: who drives trainers passes it on and never looks inside.

    Example: batch = critic.with_values(train.put(samples))
    What a role computes of the samples stays in the object store where the role put it, as a column of its own.
    """

    size: int
    samples: ray.ObjectRef  # of TrainSamples, as `packed` gives them
    columns: tuple[tuple[str, ray.ObjectRef], ...] = ()  # field of TrainSample, and its Column

    def __len__(self) -> int:
        return self.size

    def with_columns(self, **columns: ray.ObjectRef) -> SampleBatch:
        """The same samples with fields that were computed since; the samples themselves are not sent again."""
        return dataclasses.replace(self, columns=(*self.columns, *columns.items()))

    @property
    def parts(self) -> tuple:
        """The arguments of `merged` for an actor's call: Ray fetches references that are arguments themselves."""
        return tuple(name for name, _ in self.columns), self.samples, *(ref for _, ref in self.columns)


def packed(samples: Sequence[TrainSample]) -> dict[str, Column]:
    """The samples by field."""
    return {name: packed_column([getattr(sample, name) for sample in samples]) for name in _FIELDS}


def packed_column(values: list) -> Column:
    """One value a sample."""
    kinds = {(v.dtype, v.shape[1:]) if isinstance(v, np.ndarray) and v.ndim else None for v in values}
    if len(kinds) != 1 or None in kinds or sum(value.nbytes for value in values) > _MOST_BYTES * len(values):
        return values
    return JoinedRows(np.concatenate(values), np.fromiter(map(len, values), np.int64, len(values)))


def rows_of(column: Column) -> list:
    """One value a sample again; arrays are views."""
    return column.split() if isinstance(column, JoinedRows) else column


def merged(names: tuple[str, ...], samples: dict[str, Column], *columns: Column) -> list[TrainSample]:
    """The records with their columns in place, inside the rank that needs them.

    Arrays are views into the object store.
    """
    fields = samples | dict(zip(names, columns, strict=True))
    rows = zip(*map(rows_of, fields.values()), strict=True)
    return [TrainSample(**dict(zip(fields, row, strict=True))) for row in rows]
