"""The user's hook in the weight stream, between the HF name and the bucket (--custom-weight-transform-path):
quantisation, another type, other names.

What leaves it is what is sent, hashed and compared with the engines. What enters it is what must be every tensor of the
model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import xxhash

from slime_like.config.run import RunConfig
from slime_like.config.sync import SyncConfig
from slime_like.errors import WeightSyncError
from slime_like.utils.user_functions import load_function

if TYPE_CHECKING:  # the driver checks the path before anything heavy is imported
    import torch

    from slime_like.weight_sync.buckets import NamedTensor

FLAG = "--custom-weight-transform-path"


def to_bf16(args: Any, name: str, tensor: torch.Tensor) -> list[NamedTensor]:
    """fp32 weights rounded to bf16, half the bytes on the way; an engine in fp32 then computes with the rounded ones.

    Use with --custom-weight-transform-path slime_like.weight_sync.transform.to_bf16
    """
    import torch

    return [(name, tensor.to(torch.bfloat16) if tensor.dtype == torch.float32 else tensor)]


def load_transform(sync: SyncConfig) -> Callable | None:
    """The user's (args, name, tensor) -> (name, tensor) pairs; None without the flag.

    Raises PluginError naming the flag, the path and what was found.
    """
    path = sync.custom_weight_transform_path
    return load_function(path, num_positional=3, flag=FLAG) if path else None


@dataclasses.dataclass(frozen=True)
class TransformOutcome:
    """What one rank of a pipeline stage sends, or writes a share of."""

    stage: int
    names: tuple[str, ...]  # of the stage's source; empty from the others
    summary: str  # digest of all names, types and shapes in their order


class WeightTransform:
    """The user's function over one source's tensors, checked."""

    def __init__(self, function: Callable, args: Any, path: str):
        self._function, self._args, self._path = function, args, path
        self._names: list[str] = []
        self._summary = xxhash.xxh3_128()

    @staticmethod
    def of(config: RunConfig) -> WeightTransform | None:
        """None without the flag. Raises PluginError."""
        function = load_transform(config.sync)
        return (
            None
            if function is None
            else WeightTransform(function, config.plugin_args(), str(config.sync.custom_weight_transform_path))
        )

    def over(self, tensors: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
        """What the function makes of each, in order. Forgets what was made before.

        Raises WeightSyncError naming flag, function and tensor.
        """
        self._names, self._summary = [], xxhash.xxh3_128()
        for name, tensor in tensors:
            pairs = self._make(name, tensor)
            del tensor
            while pairs:
                new_name, new = pairs.pop(0)
                self._names.append(new_name)
                self._summary.update(f"{new_name}|{new.dtype}|{list(new.shape)}\n".encode())
                yield new_name, new
                del new  # before the next one is gathered

    def outcome(self, stage: int, *, is_source: bool) -> TransformOutcome:
        """What came of the tensors of the last `over`."""
        return TransformOutcome(stage, tuple(self._names) if is_source else (), self._summary.hexdigest())

    def check(self, outcomes: Sequence[TransformOutcome]) -> None:
        """All ranks of a stage must make the same, and no name twice; something must be left.

        Raises WeightSyncError.
        """
        for stage in sorted({one.stage for one in outcomes}):
            if len({one.summary for one in outcomes if one.stage == stage}) > 1:
                raise WeightSyncError(
                    f"{self._where}: ranks of pipeline stage {stage} made other names, types or shapes of the same"
                    " tensors, of which each writes a share. Fix: a function of nothing but its arguments."
                )
        seen: set[str] = set()
        for name in (name for one in outcomes for name in one.names):
            if name in seen:
                raise WeightSyncError(f"{self._where}: {name} was made twice; an engine would keep one of them.")
            seen.add(name)
        if not seen:
            raise WeightSyncError(f"{self._where}: nothing was left to send.")

    @property
    def _where(self) -> str:
        return f"{FLAG} {self._path}"

    def _make(self, name: str, tensor: torch.Tensor) -> list[NamedTensor]:
        import torch

        where = f"{self._where}, {name}"
        changes = tensor._version
        try:
            with torch.no_grad():
                answer = self._function(self._args, name, tensor)
                # a generator raises here
                pairs = answer if isinstance(answer, str) or not isinstance(answer, Iterable) else list(answer)
        except Exception as error:
            raise WeightSyncError(f"{where}: the function raised {type(error).__name__}: {error}") from error
        if tensor._version != changes:
            raise WeightSyncError(
                f"{where}: the function changed the tensor in place, which may be the trainer's own. Fix: return"
                " another one."
            )
        if not isinstance(pairs, list):
            raise WeightSyncError(
                f"{where}: the function gave a {type(pairs).__name__}, no iterable of (name, tensor). Fix: return"
                " [(name, tensor)]."
            )
        return [_checked(pair, where) for pair in pairs]


def _checked(pair: object, where: str) -> NamedTensor:
    """A (name, tensor) that every transport can send."""
    import torch

    from slime_like.weight_sync.transports.disk import TYPES

    if (
        not isinstance(pair, (tuple, list))
        or len(pair) != 2
        or not isinstance(pair[0], str)
        or not pair[0]
        or not isinstance(pair[1], torch.Tensor)
    ):
        form = (
            f"({', '.join(type(part).__name__ for part in pair)})"
            if isinstance(pair, (tuple, list))
            else f"a {type(pair).__name__}"
        )
        raise WeightSyncError(
            f"{where}: among what the function gave is {form} instead of (name, tensor). Fix: return [(name, tensor)]."
        )
    name, tensor = pair
    if tensor.layout != torch.strided or tensor.is_meta:
        kind = "meta" if tensor.is_meta else str(tensor.layout).removeprefix("torch.")
        raise WeightSyncError(f"{where}: {name} is a {kind} tensor, whose bytes cannot be sent.")
    if str(tensor.dtype).removeprefix("torch.") not in TYPES:
        raise WeightSyncError(
            f"{where}: {name} has type {tensor.dtype}, which cannot be sent. Fix: view its bytes as uint8."
        )
    return name, tensor
