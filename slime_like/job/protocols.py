"""The three sides of a run as its phases see them.

Whoever fits can be driven: Ray's groups in a run, lists of calls in a test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from slime_like.records import EngineEndpoint, SampleGroup, StepReport, SyncReceipt, TrainSample, WeightsRef
from slime_like.rollout.stock import Stock
from slime_like.weight_sync.session import PublishOrder

if TYPE_CHECKING:  # a handle that is passed on and never opened here
    from slime_like.cluster.sample_batch import SampleBatch

#: Asked each second during a wait; what it raises ends the wait.
Watch = Callable[[], None]


class Rollout(Protocol):
    """What one rollout step gave."""

    @property
    def groups(self) -> tuple[SampleGroup, ...]:
        """Exactly --rollout-batch-size of them, scored."""

    @property
    def metrics(self) -> dict[str, float]:
        """`rollout/...`"""

    @property
    def busy(self) -> tuple[tuple[float, float], ...]:
        """From and to when, by time.monotonic(), groups were being made."""


class Rollouts(Protocol):
    """Makes samples: prompts in, scored groups out. Knows weights by reference only."""

    def begin(self, step: int) -> None:
        """Begin rollout `step`, whose groups `generate` gives later; does nothing where it has begun."""

    def settle(self, watch: Watch | None = None) -> None:
        """Wait until every rollout that has begun is there, so that weights may change; nobody takes them yet."""

    def generate(self, step: int, watch: Watch | None = None) -> Rollout:
        """The groups of rollout `step`. Nothing is in flight afterwards, but for --async-mode full."""

    def ahead(self, step: int, *, wait: bool, watch: Watch | None = None) -> Rollout | None:
        """Rollout `step` if it has begun, which `generate` still gives later. wait: until it is there."""

    def put_ahead(self, step: int, groups: tuple[SampleGroup, ...], metrics: dict[str, float]) -> None:
        """What `generate` gives for rollout `step`, after a resume."""

    def begin_evaluate(self, step: int, engines: Sequence[EngineEndpoint] = ()) -> None:
        """Begin the evaluation after `step` rollouts, whose metrics `evaluate` gives later. engines: only these are
        asked; (): all.
        """

    def evaluation_is_over(self, step: int) -> bool:
        """Whether `evaluate` gives what was begun at once."""

    def evaluate(self, step: int, watch: Watch | None = None) -> dict[str, float]:
        """Metrics of all evaluation sets; moves nothing of the training's."""

    def engines_changed(self, serving: Sequence[EngineEndpoint], *, enough: bool = True) -> None:
        """These engines take the training's requests from now on, and no others. enough: whether they may be sent
        requests; else those wait.
        """

    def policy_changing(self) -> frozenset[WeightsRef]:
        """Engines are about to get other weights: what they abort now did not fail. Adapters that requests under way
        have named, which engines must serve on.
        """

    def policy_changed(self, weights: WeightsRef, steps: int = 0) -> None:
        """The engines serve these weights from now on. steps: rollouts that they were trained on."""

    def trained(self, prompts: Iterable[int]) -> None:
        """The trainer has used the groups of these prompts."""

    def snapshot(self) -> tuple[dict, Stock | None]:
        """What resuming needs, of one moment: as JSON, and what is made ahead between two rollouts, where anything
        can be.
        """

    def load_state_dict(self, state: dict) -> None:
        """Go on where the state was saved. Raises CheckpointError if the data changed."""

    def load_stock(self, stock: Stock, step: int) -> None:
        """After load_state_dict: with what a snapshot has beside it, in rollout `step`. Raises CheckpointError."""


class Changes(Protocol):
    """What has become of engines."""

    @property
    def serving_changed(self) -> bool:
        """Whether others serve than before."""

    @property
    def enough(self) -> bool:
        """Whether so many serve that requests may be sent."""

    @property
    def num_coming(self) -> int:
        """Engines that start, in the places of dead ones."""

    @property
    def num_waiting(self) -> int:
        """Engines that are up, and wait for weights."""

    @property
    def notes(self) -> tuple[str, ...]:
        """A line each, for the console."""


class Engines(Protocol):
    """Serve weights. The trainer's go to them in one `sync`."""

    @property
    def num_members(self) -> int:
        """Engines that serve."""

    @property
    def endpoints(self) -> tuple[EngineEndpoint, ...]:
        """Of those that serve."""

    def sync(self, weights: WeightsRef, trainer: Trainer, in_use: frozenset[WeightsRef] = frozenset()) -> SyncReceipt:
        """Every member that is not set aside gets the trainer's weights, proves that it holds them, and serves them as
        `weights`. in_use: adapters that it serves on beside them.
        """

    @property
    def num_deaths(self) -> int:
        """Members that have died so far."""

    def set_aside(self, count: int) -> tuple[EngineEndpoint, ...]:
        """So many members keep their weights, for an evaluation that alone asks them, until `take_back`."""

    def take_back(self) -> None:
        """They serve again once they hold what the others do. Raises EngineError if a member has died."""

    def compare(
        self, samples: list[TrainSample], expected: list[np.ndarray], weights: WeightsRef, *, bf16: bool
    ) -> float:
        """Largest mean |log-prob difference| of fixed prompts between a member and the trainer, which `expected` is of.

        Raises WeightSyncError above the tolerance.
        """

    def release_memory(self) -> None:
        """Give the GPUs to the trainer."""

    def resume_memory(self, tag: str) -> None:
        """Take "weights" (before a sync) or "kv_cache" (after it) back, if it was released."""

    def check_after_failure(self) -> None:
        """Raise EngineError if a member has died, which explains a failure better than its last request does."""


class Trainer(Protocol):
    """All ranks of one training role: the policy, the critic, or a reference on GPUs of its own."""

    def put(self, samples: Sequence[TrainSample]) -> SampleBatch:
        """Send one rollout's samples to where every role finds them, once."""

    def train(self, step: int, batch: SampleBatch) -> StepReport:
        """This role's train steps over one rollout; a critic's need its `values`."""

    def with_reference(self, batch: SampleBatch) -> SampleBatch:
        """The batch with this role's log-probs as those of the reference."""

    def with_values(self, batch: SampleBatch) -> SampleBatch:
        """The batch with this role's values."""

    def with_kl(self, batch: SampleBatch) -> SampleBatch:
        """The batch with the policy's distance to the reference."""

    def publish(self, order: PublishOrder, watch: Watch | None = None) -> SyncReceipt:
        """One whole weight sync (weight_sync/session.py); what `watch` raises ends the wait."""

    def probe(self, samples: list[TrainSample]) -> list[np.ndarray]:
        """Log-probs [T] of each sample at temperature 1."""

    def save(self, num_rollouts_done: int, client_state: dict) -> str:
        """Write a checkpoint, or begin to (--async-save); its folder."""

    def finish_save(self, *, wait: bool) -> bool:
        """Whether no save is under way any more."""

    def save_hf(self, folder: str) -> None:
        """Write an HF folder."""

    def take_weights(self, folder: str) -> None:
        """Score with the weights of an HF folder from now on."""

    def release_memory(self, keep: Sequence[str] = ()) -> None:
        """Give the engines on its GPUs what it can do without: cached memory and, with --offload-train, all of
        "weights", "gradients" and "optimizer" that is not in `keep`. What a later call needs comes back by itself.
        """


#: Notices engines that died, puts others in their places, and takes in those that are up. Of a trainer that holds what
#: the engines serve and may send it now, or None. Raises EngineError if too few are left and nobody comes.
Tend = Callable[[Trainer | None], Changes]


class Closes(Protocol):
    """Something that was started and must end."""

    def close(self) -> None:
        """End it; harmless when called twice."""
