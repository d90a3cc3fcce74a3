"""The engines of a run and their router: a fleet whose members can change while the run is up (members.py has their
states).

    fleet.start(); fleet.wait_started()  # all that the plan has; each is registered with the router once it is healthy
    fleet.sync(weights, trainer)  # the serving ones, and those that wait for weights, get them, prove them, and serve
    fleet.add(plan, trainer)  # one more while the run is up: healthy, then proven, then in the router
    fleet.begin_replacement(index); fleet.started(index); fleet.bring_up(index, trainer)  # in a dead one's place
    fleet.set_aside(count); fleet.take_back()  # some for an evaluation, and back when it is over
    fleet.drain(index, seconds); fleet.remove(index)
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Sequence

import numpy as np

from slime_like.cluster.engine_memory import EngineMemory
from slime_like.cluster.engine_processes import EngineProcesses
from slime_like.cluster.engine_vitals import Vitals
from slime_like.cluster.external_engines import external_endpoint, returned_endpoint
from slime_like.cluster.fleet_router import FleetRouter
from slime_like.cluster.members import IN_USE, Member, Membership, MemberState
from slime_like.cluster.receivers import Receivers
from slime_like.config.run import RunConfig
from slime_like.errors import EngineError, RunError, WeightSyncError
from slime_like.planning.cards import cards_of
from slime_like.planning.engines import EnginePlan
from slime_like.planning.placement import PlacementPlan
from slime_like.records import EngineEndpoint, SyncReceipt, TrainSample, WeightsRef
from slime_like.sglang_backend.client import EngineClient
from slime_like.sglang_backend.external_server import answers
from slime_like.utils.net import wait_until
from slime_like.weight_sync.proof.probe import compare_probe
from slime_like.weight_sync.session import Publishes, PublishOrder, abandon

logger = logging.getLogger(__name__)

#: Deadline of one control request to an engine, in seconds.
CONTROL_TIMEOUT_S = 60.0
#: SGLang's server goes on for 5 s after its scheduler was killed, without answering; then it ends, and its log says
#: why.
_DYING_S = 10.0


class EngineFleet:
    """Every engine of the run, and the router that its serving members are registered with."""

    def __init__(
        self,
        config: RunConfig,
        plan: PlacementPlan,
        processes: EngineProcesses | None,
        run_dir: str,
        membership: Membership | None = None,
    ):
        """processes: of our own engines; None where all are external. membership: engines that are up already."""
        self._config, self._plan, self._processes, self._run_dir = config, plan, processes, run_dir
        self.membership = membership or Membership()
        self.router = FleetRouter(config, run_dir)
        self._plans: dict[int, EnginePlan] = {}  # of each member that was started or adopted here
        self._clients: dict[EngineEndpoint, EngineClient] = {}
        self._vitals = Vitals(processes, config.engine.engine_hang_timeout_s)
        self._receivers = Receivers(config, run_dir) if config.sync.sends_deltas else None
        self._memory = EngineMemory()
        self._digest = ""  # of the weights that the fleet holds
        self.num_deaths = 0

    @property
    def endpoints(self) -> tuple[EngineEndpoint, ...]:
        """Of the serving members."""
        return self.membership.endpoints

    @property
    def clients(self) -> list[EngineClient]:
        """Of the serving members."""
        return self._clients_of(MemberState.SERVING)

    @property
    def num_members(self) -> int:
        """Engines that serve."""
        return len(self.membership.serving)

    @property
    def members(self) -> tuple[Member, ...]:
        """All, in whatever state."""
        return self.membership.members

    def _clients_of(self, *states: MemberState) -> list[EngineClient]:
        return [self._client(one.endpoint) for one in self.membership.in_state(*states) if one.endpoint is not None]

    def _client(self, endpoint: EngineEndpoint) -> EngineClient:
        if endpoint not in self._clients:
            self._clients[endpoint] = EngineClient(endpoint, timeout_s=CONTROL_TIMEOUT_S)
        return self._clients[endpoint]

    def start(self) -> None:
        """Begin starting every engine and the router; `wait_started` waits."""
        self._begin(self._plan.engines)
        self.router.start()

    def wait_started(self) -> None:
        """Wait for every engine, then register each with the router and wait until it is healthy there."""
        indices = [member.index for member in self.membership.in_state(MemberState.STARTING)]
        self._wait_healthy(indices)
        for index in indices:
            self._admit(index)

    def add(self, engine: EnginePlan, trainer: Publishes | None = None) -> Member:
        """Start an engine, or adopt an external one, while the run is up. Its index must be membership.next_index.

        It is registered with the router once it is healthy and, after the first sync, once it has proven the fleet's
        weights, which `trainer` must still hold; without a trainer the next `sync` brings it in. Whatever fails, it
        is taken away again.
        """
        if self._memory.is_released(self.clients):
            raise EngineError(
                f"engine {engine.index}: no engine can join while the others have given their memory back."
            )
        if (free := self.membership.next_index) != engine.index:
            raise EngineError(f"engine {engine.index} cannot join under this number: the next one is {free}.")
        try:
            self._begin([engine])
            self._wait_healthy([engine.index])
            if trainer is not None or self.membership.present is None:
                self.bring_up(engine.index, trainer)
        except BaseException as error:
            self.mark_dead(engine.index, f"it could not join: {error}")
            self.remove(engine.index)
            raise
        return self.membership[engine.index]

    def begin_replacement(self, index: int) -> int:
        """Begin starting an engine in the place of a dead one, which is forgotten, or wait for the same address to
        answer again; its number. `started` tells when it is healthy, `bring_up` takes it in.
        """
        dead = self.membership[index]
        if dead.state is not MemberState.DEAD:
            raise EngineError(f"{dead.name} is {dead.state}, not dead: nothing is to be put in its place.")
        engine = dataclasses.replace(self._plans[index], index=self.membership.next_index)
        self.remove(index)
        self._begin([engine])
        return engine.index

    def started(self, index: int) -> bool:
        """Whether an engine that was begun answers by now; it waits for weights then. Raises what ended its start."""
        plan = self._plans[index]
        if plan.external_url is None:
            assert self._processes is not None, "engines of ours have processes"
            endpoint = self._processes.poll(index)
        else:
            endpoint = returned_endpoint(self._config, plan)
        if endpoint is None:
            return False
        self._answers([endpoint])
        return True

    def bring_up(self, index: int, trainer: Publishes | None) -> None:
        """Send a joining member what the fleet holds, if that ever was sent, and take it in.

        Raises WeightSyncError if the trainer has gone on since.
        """
        member, present = self.membership[index], self.membership.present
        if present is not None:
            assert trainer is not None, "whoever has synced has a trainer"
            receipt = self._publish(present, [member], trainer)
            if receipt.digest != self._digest:
                raise WeightSyncError(
                    f"{member.name} got weights with digest {receipt.digest}, but {present} of the fleet has"
                    f" {self._digest}: the trainer has gone on since. Fix: let the next sync bring it in."
                )
            self.membership = self.membership.prove([index], present)
        self._admit(index)

    def _admit(self, index: int) -> None:
        """Take a member into the router."""
        admitted = self.membership.admit(index)  # raises before anything is sent to it
        endpoint = admitted[index].endpoint
        assert endpoint is not None, "only one that answers is admitted"
        if endpoint.external:
            # A run that failed inside a sync left it paused: /health would stay 503, and the router never take it.
            self._client(endpoint).continue_generation()
        self.router.register(endpoint)
        self._vitals.watch(endpoint)
        self.membership = admitted

    def _begin(self, engines: Sequence[EnginePlan]) -> None:
        """Begin starting engines of ours; external ones answer already."""
        for engine in engines:
            self.membership = self.membership.start(engine.index)
            self._plans[engine.index] = engine
        local = [engine for engine in engines if engine.external_url is None]
        if local:
            assert self._processes is not None, "engines of ours have processes"
            self._processes.begin(local, self._receivers)

    def _wait_healthy(self, indices: Sequence[int]) -> None:
        """Wait for engines that were begun; their endpoints are known afterwards."""
        local = any(self._plans[index].external_url is None for index in indices)
        endpoints = self._processes.wait() if local and self._processes is not None else []
        endpoints += [
            external_endpoint(self._config, self._plans[index])
            for index in indices
            if self._plans[index].external_url is not None
        ]
        self._answers(endpoints)

    def _answers(self, endpoints: Sequence[EngineEndpoint]) -> None:
        """These have started; each is known with its receiver of deltas, if there is one beside it."""
        for endpoint in endpoints if self._receivers is None else self._receivers.beside(endpoints):
            self.membership = self.membership.healthy(endpoint)

    # ------------------------------------------------------------------ weights

    def sync(self, weights: WeightsRef, trainer: Publishes, in_use: frozenset[WeightsRef] = frozenset()) -> SyncReceipt:
        """One weight sync to all serving members and to those that wait for weights.

        in_use: adapters that requests under way name, which members serve on. A failed one leaves engines paused.
        """
        joining = [member for member in self.membership.in_state(MemberState.STARTING) if member.endpoint is not None]
        members = sorted([*self.membership.serving, *joining], key=lambda member: member.index)
        receipt = self._publish(weights, members, trainer, in_use)
        self._digest = receipt.digest
        self.membership = self.membership.prove([member.index for member in members], weights)
        for member in joining:
            self._admit(member.index)
        return receipt

    def _publish(
        self, weights: WeightsRef, members: Sequence[Member], trainer: Publishes, in_use: frozenset = frozenset()
    ) -> SyncReceipt:
        endpoints = [member.endpoint for member in members if member.endpoint is not None]
        assert self._plan.transport is not None, "a run with trainer and engines has a transport"
        cards = cards_of(self._plan, [self._plans.get(endpoint.index) for endpoint in endpoints])
        order = PublishOrder.of(self._config, self._plan.transport, endpoints, weights, cards=cards, in_use=in_use)
        try:
            return trainer.publish(order, self._check_silent)
        except BaseException:
            abandon(order.endpoints)
            raise

    def compare(
        self, samples: list[TrainSample], expected: list[np.ndarray], weights: WeightsRef, *, bf16: bool
    ) -> float:
        """Largest mean |log-prob difference| of fixed prompts between a serving member and the trainer, of which
        `expected` is.

        Raises WeightSyncError above the tolerance.
        """
        adapter = str(weights) if self._config.sync.sends_adapters else None
        return compare_probe(
            self._config, self.clients, samples, expected, version=weights.version, bf16=bf16, adapter=adapter
        )

    def release_memory(self) -> None:
        """Engines give back KV cache and weights, or what of them the config says, where they have not yet."""
        self._memory.release(self.clients, self._config.released_by_engines)

    def resume_memory(self, tag: str) -> None:
        """Engines take back "weights" (before a sync) or "kv_cache" (after it), if they had given it back."""
        self._memory.resume(self.clients, tag)

    def set_aside(self, count: int) -> tuple[EngineEndpoint, ...]:
        """Keep the last serving members for an evaluation: out of the router, and no sync reaches them until
        `take_back`. What they have begun ends there.

        Raises EngineError if none would be left to serve.
        """
        chosen = self.endpoints[-count:]
        aside = self.membership.set_aside([endpoint.index for endpoint in chosen])  # raises before one is taken out
        for endpoint in chosen:
            self.router.deregister(endpoint)
        self.membership = aside
        return chosen

    def take_back(self) -> None:
        """The evaluation is over: who holds the fleet's weights serves again, others when the next sync has proven
        them. Raises EngineError if an engine has died.
        """
        self.check()
        for member in self.membership.in_state(MemberState.EVALUATING):
            self.membership = self.membership.take_back(member.index)
            if member.proven == self.membership.present:
                self._admit(member.index)

    def drain(self, index: int, timeout_s: float) -> None:
        """Take a member out of the router and let the requests that it has end.

        Raises WaitTimeout naming it; it is then still draining.
        """
        self.membership = self.membership.drain(index)
        member = self.membership[index]
        assert member.endpoint is not None, "it has served"
        self.router.deregister(member.endpoint)

        def busy() -> str | None:
            count = self.num_requests(index)
            return f"{count} requests are left" if count else None

        wait_until(busy, deadline_s=timeout_s, who="train.py", whom=member.name, phase="drain")

    def num_requests(self, index: int) -> int:
        """Requests that run or wait in a member. Raises EngineError or WaitTimeout."""
        endpoint = self.membership[index].endpoint
        return 0 if endpoint is None else self._client(endpoint).num_requests()

    def remove(self, index: int) -> None:
        """Forget a member that is dead, drained or never served.

        An engine of ours is ended, an external one goes on.
        """
        self.membership = self.membership.leave(index)
        self._stop(index)
        self._plans.pop(index, None)

    def mark_dead(self, index: int, why: str) -> None:
        """A member has ended, and why: it is out of the router, and what it had proven is forgotten."""
        member = self.membership[index]
        self.num_deaths += member.state is not MemberState.DEAD
        self.membership = self.membership.die(index, why)
        self._vitals.forget(index)
        if member.endpoint is not None and member.state in (MemberState.SERVING, MemberState.DRAINING):
            try:
                self.router.deregister(member.endpoint)
            except RunError as error:  # it drops silent engines by itself, too
                logger.warning("%s stays registered: %s", member.name, error)

    def check(self) -> None:
        """Raise EngineError if an engine or the router has died, with the tail of its log; such an engine is marked
        dead.
        """
        deaths = self.note_deaths() or self._marked(self._vitals.mute(self._clients_of(*IN_USE)))
        for error in deaths.values():
            raise error
        self.router.check()

    def note_deaths(self) -> dict[int, RunError]:
        """Engines that have ended since they were asked for last, or hang, and how; they are marked dead. Asks external
        ones nothing. Raises ReceiverError if a receiver of deltas has ended, which nobody replaces.
        """
        known = {member.index for member in self.membership.in_state(MemberState.DEAD)}
        ended = self._marked(self._vitals.ended(known) | self._vitals.silent())
        if self._receivers is not None:
            self._receivers.check()
        return ended | self._end_hanging()

    def _end_hanging(self) -> dict[int, RunError]:
        hanging = self._marked(self._vitals.hanging())
        if hanging and self._processes is not None:
            self._processes.stop(list(hanging))  # with everything that it started, whatever state that is in
        return hanging

    def _marked(self, failures: dict[int, RunError]) -> dict[int, RunError]:
        for index, error in failures.items():
            self.mark_dead(index, str(error))
        return failures

    def check_after_failure(self) -> None:
        """As check(), but an engine that does not answer is given time to end, so that its own death is told instead
        of what it led to.
        """
        deadline = time.monotonic() + _DYING_S
        while True:
            self.check()
            if all(answers(client.endpoint) for client in self._clients_of(*IN_USE)) or time.monotonic() > deadline:
                return
            time.sleep(0.2)

    def check_watch(self) -> None:
        """Raise EngineError if an external engine has stopped answering, or one of ours hangs."""
        self._check_silent()
        for error in self._end_hanging().values():
            raise error

    def _check_silent(self) -> None:
        """Raise EngineError if an external engine has stopped answering; asks nobody itself.

        Whether one of ours hangs is not asked during a sync, where an engine may have to wait for the trainer: the
        sync has its own deadlines, and who is silent after it has failed is known then.
        """
        for error in self._marked(self._vitals.silent()).values():
            raise error

    def _stop(self, index: int) -> None:
        """End an engine of ours and give its GPUs back."""
        self._vitals.forget(index)
        if self._processes is not None:
            self._processes.stop([index])

    def close(self) -> None:
        """Deregister external engines, end our router and our engines."""
        self._vitals.close()
        self.router.close()
        if self._processes is not None:
            self._processes.stop()
        if self._receivers is not None:
            self._receivers.close()
