"""Connects to a Ray cluster or starts a local one, and waits for remote calls with a deadline and named errors."""

from __future__ import annotations

import logging
import math
import os
import socket
import time
from collections.abc import Callable

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from slime_like.errors import PlacementError, RunError, SlimeLikeError, WaitTimeout

logger = logging.getLogger(__name__)


def connect(num_gpus: int) -> bool:
    """Join the running Ray cluster, or start a local one with `num_gpus` GPUs. Returns True if it was started here.

    On a host without CUDA a local cluster's GPUs are logical: names for shares of the CPU. Ray listens on every interface,
    but from 2.60 on a cluster that it starts here asks for a token (~/.ray/auth_token).
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # do not empty CUDA_VISIBLE_DEVICES for actors without a GPU
    options = {"log_to_driver": False, "logging_level": logging.ERROR, "namespace": f"slime_like-{os.getpid()}"}
    address = running_cluster()
    if address is None:
        ray.init(address="local", num_gpus=num_gpus, include_dashboard=False, **options)
        return True
    try:
        ray.init(address=address, **options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise PlacementError(f"no Ray cluster answers at {address}: {error}\n  Fix: start it, or RAY_ADDRESS=local to start one for this run.") from None
    return False


def running_cluster() -> str | None:
    """The cluster to join: RAY_ADDRESS (which `ray job submit` sets), else the one that `ray start` left on this host.

    None: start a local one; RAY_ADDRESS=local asks for that even beside a running cluster.
    """
    told = os.environ.get("RAY_ADDRESS")
    if told:
        return None if told == "local" else told
    return _recorded_cluster()


def _recorded_cluster() -> str | None:
    """host:port that `ray start` wrote down, if something still listens there."""
    record = os.path.join(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster")
    if not os.path.exists(record):
        return None
    with open(record, encoding="utf-8") as file:
        address = file.read().strip()
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=3).close()
    except (OSError, ValueError):
        return None
    return address


def cpus_per_gpu() -> float:
    """CPUs that a bundle may claim: 1, or less on hosts with fewer cores than GPUs (Ray counts ten-thousandths)."""
    nodes = [n["Resources"] for n in ray.nodes() if n["Alive"] and n["Resources"].get("GPU")]
    return min([1.0] + [math.floor(1e4 * r.get("CPU", 0) / r["GPU"]) / 1e4 for r in nodes])


class Wait:
    """A deadline, and the words for what is awaited."""

    def __init__(self, seconds: float, *, whom: str, phase: str, who: str = "train.py", watch: Callable[[], None] | None = None):
        self.seconds, self.whom, self.phase, self.who = seconds, whom, phase, who
        self.watch = watch  # asked each second meanwhile; what it raises ends the wait

    def gather(self, refs: dict[str, ray.ObjectRef]) -> list:
        """Results of the named calls in their order. The first failure is raised at once, with the name in front."""
        pending, names, started = list(refs.values()), {ref: name for name, ref in refs.items()}, time.monotonic()
        while pending:
            left = self.seconds - (time.monotonic() - started)
            done, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, left if self.watch is None else min(left, 1.0)))
            if not done and self.watch is not None and left > 1.0:
                self.watch()
                continue
            if not done:
                late = ", ".join(names[ref] for ref in pending)
                heard = f"{len(refs) - len(pending)} of {len(refs)} had answered; missing: {late}"
                raise WaitTimeout(who=self.who, whom=self.whom, phase=self.phase, seconds=self.seconds, last=heard)
            self._check(done[0], names[done[0]])
        return ray.get(list(refs.values()))

    def _check(self, ref: ray.ObjectRef, name: str) -> None:
        try:
            ray.get(ref, timeout=self.seconds)
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, SlimeLikeError):
                cause.add_note(f"(from {name} during {self.phase})")
                raise cause from None
            raise RunError(f"{name} failed during {self.phase}: {type(cause).__name__}: {cause}\n{getattr(error, 'traceback_str', '')}") from None
        except RayActorError as error:
            raise RunError(f"{name} died during {self.phase}: {str(error).splitlines()[0]}") from None
        except GetTimeoutError:
            raise WaitTimeout(who=self.who, whom=name, phase=self.phase, seconds=self.seconds, last="the call ended, but its result did not arrive") from None


def kill_actors(actors: list) -> None:
    """End actors at once; ones that are gone already are fine."""
    for actor in actors:
        ray.kill(actor, no_restart=True)
