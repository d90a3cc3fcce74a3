"""The ranks of the trainer, the critic, or the reference on its own GPUs, as one typed object: each method calls every
rank and waits with a deadline.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import ray

from slime_like.cluster.bundles import Bundles
from slime_like.cluster.gpu_environment import device_number, nccl_environment
from slime_like.cluster.object_store import put
from slime_like.cluster.ray_session import Wait, deaths, kill_actors
from slime_like.cluster.sample_batch import Column, SampleBatch, merged, packed, packed_column, rows_of
from slime_like.cluster.signs_of_life import Ear, EarAddress, speak
from slime_like.config.run import RunConfig
from slime_like.config.tree import TENANTS
from slime_like.errors import ProcessLost, RunError
from slime_like.planning.placement import PlacementPlan
from slime_like.records import StepReport, SyncReceipt, TrainSample
from slime_like.sglang_backend.shared_memory import shared_environment
from slime_like.utils.files import keep_files_like
from slime_like.utils.logs import start_logging
from slime_like.utils.net import address_of_interface
from slime_like.weight_sync.session import PublishOrder

logger = logging.getLogger(__name__)


class TrainActor:
    """One rank in its own process: a megatron_backend.worker.TrainWorker, and the recipe of its role over it."""

    def __init__(
        self,
        config: RunConfig,
        rank: int,
        world_size: int,
        log_path: str,
        environment: dict[str, str],
        ear: EarAddress | None = None,
    ):
        redirect_output(log_path)
        if ear is not None:
            speak(ear, rank)
        start_logging(config.observability.log_level)
        os.environ.update(environment)  # before torch is imported
        interface = config.sync.update_weight_interface
        if interface:
            address_of_interface(interface)  # raises where there is no such thing
            # NCCL reads it once in a process, so it holds for the trainer's own groups too; "=" means exactly this
            # name.
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
        self._place = {"rank": rank, "world_size": world_size}
        self._config = config
        self._worker: Any = None  # TrainWorker, whose import needs torch
        self._recipe: Any = None

    def address(self) -> tuple[str, int]:
        """(node address, a free port there) for the ranks' rendezvous."""
        from slime_like.utils.net import free_port

        host = ray.util.get_node_ip_address()
        return host, free_port(host)

    def build(self, master_address: str, master_port: int, store_path: str | None) -> dict:
        """Make the worker and start it. store_path: where ranks of one machine meet, instead of at the address."""
        from slime_like.megatron_backend.rl_recipe import recipe_of
        from slime_like.megatron_backend.worker import TrainWorker

        started = time.monotonic()
        gpu_ids = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        self._worker = TrainWorker(
            self._config,
            **self._place,
            local_rank=device_number(gpu_ids, os.environ.get("CUDA_VISIBLE_DEVICES")),
            master_address=master_address,
            master_port=master_port,
            store_path=store_path,
        )
        self._recipe = recipe_of(self._worker)
        report = self._worker.start()
        # Modules and the model stay until the end: 0.4 million objects, 0.25 s each time that a card is made room on.
        gc.collect()
        gc.freeze()
        place, seconds = self._place, time.monotonic() - started
        logger.info(
            "%s rank %d of %d is up after %.1f s", _WHO[self._config.role], place["rank"], place["world_size"], seconds
        )
        return report

    def call(self, method: str, *args):
        """Run one method of the worker."""
        return self._timed(self._worker, method, *args)

    def leave(self) -> None:
        """Remove what would outlive this process."""
        if self._worker is not None:
            self._worker.remove_files()

    def pid(self) -> int:
        """Answers while the process lives."""
        return os.getpid()

    def follow(self, method: str, *args):
        """Run one method of the recipe."""
        return self._timed(self._recipe, method, *args)

    def train(self, step: int, *parts) -> StepReport:
        """Train on a SampleBatch, given as its parts."""
        return self._timed(self._recipe, "train", step, merged(*parts))

    def score(self, method: str, *parts) -> tuple[None, Column | None]:
        """(that it is done, what a scoring method of the recipe says of a SampleBatch), the latter from rank 0.

        The others would only send the same.
        """
        rows = self._timed(self._recipe, method, merged(*parts))
        return None, packed_column(rows) if self._place["rank"] == 0 else None

    def _timed(self, who: Any, method: str, *args):
        started = time.monotonic()
        answer = getattr(who, method)(*args)
        logger.debug("%s took %.3f s", method, time.monotonic() - started)
        return answer


#: How long ranks may take to leave.
_LEAVE_S = 2.0
#: Roles that run as a TrainGroup, in the words of messages.
_WHO = {"actor": "trainer", "critic": "critic", "ref": "reference", TENANTS: "trainer"}


def role_config(config: RunConfig, role: str) -> RunConfig:
    """What the processes of a role are told: the reference starts from --ref-load and never resumes or saves."""
    if role != "ref":
        return dataclasses.replace(config, role=role)
    return dataclasses.replace(
        config, role=role, checkpoint=dataclasses.replace(config.checkpoint, load=None, save=None, ckpt_step=None)
    )


class TrainGroup:
    """All ranks of one training role."""

    def __init__(
        self, config: RunConfig, plan: PlacementPlan, bundles: Bundles, log_dir: str, role_name: str = "actor"
    ):
        self._config = config = role_config(config, role_name)
        self._who = _WHO[role_name]
        role = plan.roles[role_name]
        nodes = [bundles.gpus[index].node_id for index in role.bundles]
        self._one_host = bundles.on_one_host()
        host = "127.0.0.1" if self._one_host else ray.util.get_node_ip_address()
        self._ear = Ear(host, role.num_gpus) if config.parallel.trainer_hang_timeout_s else None
        self._silent: dict[str, RunError] = {}  # ranks that were ended since they gave no sign of life
        actor_class = ray.remote(TrainActor)
        self.actors = []
        for rank, index in enumerate(role.bundles):
            environment = nccl_environment(os.environ, config.engine.sglang) | shared_environment()
            # Ray's own value counts only this actor's CPU share.
            environment["OMP_NUM_THREADS"] = str(threads_of(nodes.count(nodes[rank])))
            options = bundles.options(index, plan.bundles[index].roles[role_name])
            log_path = f"{log_dir}/{role_name}-{rank}.log"
            what = (config, rank, role.num_gpus, log_path, environment, self._ear and self._ear.address)
            self.actors.append(actor_class.options(**options).remote(*what))
        self._building: dict[str, ray.ObjectRef] = {}
        self._folder: str | None = None  # of the ranks' store, where all are on this machine

    def start(self) -> None:
        """Begin building every rank; `wait_started` waits for it (engines start meanwhile)."""
        if self._one_host:
            self._folder = tempfile.mkdtemp(prefix="slime-like-ranks-")  # only we can enter it
            meeting = ("127.0.0.1", 0, os.path.join(self._folder, "store"))
        else:
            meeting = (*self._wait_start({f"{self._who} rank 0": self.actors[0].address.remote()})[0], None)
        self._building = {f"{self._who} rank {i}": actor.build.remote(*meeting) for i, actor in enumerate(self.actors)}

    def wait_started(self) -> dict:
        """Rank 0's report: num_rollouts_done, client_state, num_parameters, seconds."""
        return self._wait_start(self._building)[0]

    def _wait_start(self, refs: dict[str, ray.ObjectRef]) -> list:
        seconds = self._config.engine.engine_start_timeout_s
        watch = functools.partial(self.check_signs_of_life, "start")
        return Wait(seconds, whom=f"the {self._who}", phase="start", watch=watch).gather(refs)

    def put(self, samples: Sequence[TrainSample]) -> SampleBatch:
        """The samples in the object store, for every role that scores or trains on them."""
        return SampleBatch(size=len(samples), samples=self._put(packed(samples), "sending samples"))

    def _put(self, value: Any, phase: str) -> ray.ObjectRef:
        return put(value, seconds=self._config.parallel.train_timeout_s, phase=phase)

    def with_reference(self, batch: SampleBatch) -> SampleBatch:
        """The samples with this group's log-probs as `reference_logprobs`."""
        return batch.with_columns(reference_logprobs=self._scored("log_probs", batch))

    def with_values(self, batch: SampleBatch) -> SampleBatch:
        """The samples with this group's, the critic's, `values`."""
        return batch.with_columns(values=self._scored("values", batch))

    def with_kl(self, batch: SampleBatch) -> SampleBatch:
        """The samples with the policy's `kl` to the reference."""
        return batch.with_columns(kl=self._scored("kl_to_reference", batch))

    def _scored(self, method: str, batch: SampleBatch) -> ray.ObjectRef:
        """Where rank 0 left what it computed, an array for each sample: it goes from rank to rank and never to the
        driver.
        """
        answers = [actor.score.options(num_returns=2).remote(method, *batch.parts) for actor in self.actors]
        self._gather("score", [done for done, _ in answers])
        return answers[0][1]

    def train(self, step: int, batch: SampleBatch) -> StepReport:
        """Train on one rollout; a critic is fitted to it, and the batch then carries its `values`."""
        return self._gather("train", [actor.train.remote(step, *batch.parts) for actor in self.actors])[0]

    def publish(self, order: PublishOrder, watch: Callable[[], None] | None = None) -> SyncReceipt:
        """One whole weight sync (weight_sync/session.py). watch: asked each second; what it raises ends the wait."""
        seconds = order.longest_s(self._config.parallel.pipeline_model_parallel_size)
        return self._all("publish", "weight sync", order, seconds=seconds, watch=watch)[0]

    def probe(self, samples: Sequence[TrainSample]) -> list[np.ndarray]:
        """Log-probs [T] of every sample at temperature 1."""
        return rows_of(self._gather("score", [self._scored("probe", self.put(samples))])[0])

    def save(self, num_rollouts_done: int, client_state: dict) -> str:
        """Write a Megatron checkpoint, or with --async-save begin to; returns its folder."""
        return self._follow("save", "save", num_rollouts_done, client_state)[0]

    def finish_save(self, *, wait: bool) -> bool:
        """Whether no save is under way any more; wait: until there is none, or its failure is raised."""
        return all(self._all("finish_save", "save", wait))

    def discard_save(self, num_rollouts_done: int) -> None:
        """Remove a checkpoint that was written: what it belongs to could not be."""
        self._follow("discard_save", "save", num_rollouts_done)

    def save_hf(self, folder: str) -> None:
        """Write an HF folder."""
        self._follow("save_hf", "save", folder)

    def take_weights(self, folder: str) -> None:
        """Score with the weights of an HF folder from now on."""
        self._follow("take_weights", "load", folder)

    def release_memory(self, keep: Sequence[str] = ()) -> None:
        """Give the engines on these GPUs what is not in `keep` (megatron_backend/card_memory.py)."""
        self._all("release_memory", "release memory", tuple(keep))

    def tenants(self, method: str, *args) -> Any:
        """What a verb of role "tenants" gives (megatron_backend/lora/tenant_verbs.py).

        Raises what the verb raises, on every rank or on one: see in_step.
        """
        shared = [self._put(arg, method) for arg in args] if len(self.actors) > 1 else args
        return self._all(method, method, *shared)[0]

    def in_step(self, timeout_s: float = 10.0) -> bool:
        """Whether every rank lives and has ended what it was asked for: then an error of a verb was the same on all."""
        try:
            Wait(timeout_s, whom=f"the {self._who}", phase="check").gather(self.pings())
        except RunError:
            return False
        return True

    def _follow(self, method: str, phase: str, *args) -> list:
        """What a method of the recipe gives on each rank."""
        return self._gather(phase, [actor.follow.remote(method, *args) for actor in self.actors])

    def _all(
        self, method: str, phase: str, *args, seconds: float | None = None, watch: Callable[[], None] | None = None
    ) -> list:
        """What a verb gives on each rank."""
        return self._gather(
            phase, [actor.call.remote(method, *args) for actor in self.actors], seconds=seconds, watch=watch
        )

    def _gather(
        self,
        phase: str,
        refs: list[ray.ObjectRef],
        *,
        seconds: float | None = None,
        watch: Callable[[], None] | None = None,
    ) -> list:
        def look() -> None:
            self.check_signs_of_life(phase)
            if watch is not None:
                watch()

        named = {f"{self._who} rank {i}": ref for i, ref in enumerate(refs)}
        return Wait(
            seconds or self._config.parallel.train_timeout_s, whom=f"the {self._who}", phase=phase, watch=look
        ).gather(named)

    def check_signs_of_life(self, phase: str) -> None:
        """End ranks whose process has given none for --trainer-hang-timeout-s. Raises ProcessLost for the first."""
        if self._ear is None:
            return
        for rank, silence in self._ear.silent(self._config.parallel.trainer_hang_timeout_s).items():
            name = f"{self._who} rank {rank}"
            if name in self._silent:
                continue
            ray.kill(self.actors[rank], no_restart=True)
            lost = ProcessLost(
                f"{name} (process {silence.pid}) gave no sign of life for {silence.seconds:.0f} s during {phase}: it is"
                " stopped, or its machine hangs. It was ended. A rank that is busy for so long in a call that lets no"
                " other thread run needs a longer --trainer-hang-timeout-s"
            )
            lost.who, lost.pid = name, silence.pid
            self._silent[name] = lost
        if self._silent:
            raise next(iter(self._silent.values()))

    def pings(self) -> dict[str, ray.ObjectRef]:
        """A call to each rank that answers when it is free; it fails if the rank is dead."""
        return {f"{self._who} rank {i}": actor.pid.remote() for i, actor in enumerate(self.actors)}

    def lost_ranks(self) -> dict[str, RunError]:
        """Ranks whose process has ended without an error of its own, by name; waits a moment for the news."""
        return deaths(self.pings(), "check") | self._silent

    def close(self) -> None:
        """End every rank; those that are not in the middle of something first give back what would outlive them."""
        refs = [actor.leave.remote() for actor in self.actors]
        ray.wait(refs, num_returns=len(refs), timeout=_LEAVE_S)
        kill_actors(self.actors)
        if self._ear is not None:
            self._ear.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def threads_of(num_on_node: int) -> int:
    """CPU threads of one of the processes of a role on a machine: OMP_NUM_THREADS, else its share of the cores."""
    return int(os.environ.get("OMP_NUM_THREADS") or max(1, (os.cpu_count() or 1) // num_on_node))


def redirect_output(log_path: str) -> None:
    """Send this process's standard output and error, C++ ones too, to a file; all its files are as private as that
    file's folder.
    """
    keep_files_like(os.path.dirname(log_path))
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
