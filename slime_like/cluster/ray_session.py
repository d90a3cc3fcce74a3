"""Connects to a Ray cluster or starts a local one, and waits for remote calls with a deadline and named errors."""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator

import psutil
import ray
from ray.exceptions import GetTimeoutError, OutOfMemoryError, RayActorError, RayTaskError

from slime_like.cluster.ray_trust import Recorded, ensure_token, private_folder, recorded_cluster
from slime_like.errors import PlacementError, ProcessLost, RunError, SlimeLikeError, WaitTimeout
from slime_like.utils.supervise import remove_at_end

logger = logging.getLogger(__name__)

#: How long the failure of one rank waits for news of another's death, which would explain it. In seconds.
_ECHO_S = 3.0
#: Least time between two rounds of asking for signs of life, in seconds.
_PING_S = 3.0
#: From the end of the control server of a Ray that was started here to the end of the run, in seconds: a host that is
#: very busy may leave it without an answer for some.
_GCS_GONE_S = 20
#: How long leaving the cluster may take; then its node process hangs. In seconds.
_LEAVE_S = 15.0
#: How a call fails whose actor's process has ended; the second: Ray's memory monitor has killed it.
_DEATHS = (RayActorError, OutOfMemoryError)
#: In Ray's words for a dead actor.
_PID = re.compile(r"^\s*pid: (\d+)$", re.MULTILINE)


def connect(num_gpus: int) -> bool:
    """Join the running Ray cluster, or start a local one with `num_gpus` GPUs. Returns True if it was started here.

    On a host without CUDA a local cluster's GPUs are logical: names for shares of the CPU. Ray listens on every
    interface, but a cluster that is started here asks for a token (~/.ray/auth_token), and only we can enter the folder
    of its sockets and files.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # do not empty CUDA_VISIBLE_DEVICES for actors without a GPU
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    options = {"log_to_driver": False, "logging_level": logging.ERROR, "namespace": f"slime_like-{os.getpid()}"}
    cluster = _cluster()
    if cluster.refused is not None:
        logger.warning("not joined: %s. RAY_ADDRESS=HOST:PORT joins it all the same.", cluster.refused)
    with _own_signals():
        if cluster.address is None:
            ensure_token()
            folder = private_folder()
            if not remove_at_end(folder):
                atexit.register(_end_with_folder, folder)
            # A worker that ends kills its children, guards (utils/guard.py) among them, before they can tidy up. They
            # end by themselves.
            os.environ.setdefault("RAY_kill_child_processes_on_worker_exit", "0")
            # Nobody starts its control server (GCS) again: how long the processes of a run work on without one until
            # Ray ends them, which takes a minute else.
            os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", str(_GCS_GONE_S))
            ray.init(address="local", num_gpus=num_gpus, include_dashboard=False, _temp_dir=f"{folder}/r", **options)
            return True
        try:
            ray.init(address=cluster.address, **options)
        except (ConnectionError, RuntimeError, ValueError) as error:
            fix = "start it, or RAY_ADDRESS=local to start one for this run"
            raise PlacementError(f"no Ray cluster answers at {cluster.address}: {error}\n  Fix: {fix}.") from None
        return False


def disconnect() -> None:
    """Leave the cluster; one that was started here ends. Harmless when called twice."""
    # Ray waits for its node process's answer without a deadline, in C++; killing a node that hangs would let go of it,
    # but ends us on the spot, before whatever went wrong has been told.
    leaving = threading.Thread(target=ray.shutdown, name="ray.shutdown", daemon=True)
    leaving.start()
    leaving.join(_LEAVE_S)
    if leaving.is_alive():
        logger.warning("Ray's node process on this machine hangs: the run ends without its answer")
        atexit.register(_end_our_node)  # before Ray's own handler, which would wait, too


def _end_our_node() -> None:
    """Kill the node process that was started here."""
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if child.name() == "raylet":
                child.kill()


def running_cluster() -> str | None:
    """The cluster to join: RAY_ADDRESS (which `ray job submit` sets), else the one that `ray start` left on this host.

    None: start a local one; RAY_ADDRESS=local asks for that even beside a running cluster. RAY_ADDRESS=auto asks for
    the one on this host.
    """
    return _cluster().address


def _cluster() -> Recorded:
    variable = os.environ.get("RAY_ADDRESS")
    if variable == "local":
        return Recorded()
    if variable and variable != "auto":
        return Recorded(variable)
    recorded = recorded_cluster()
    # Ray's own "auto" would join the first process of anyone's that has a head's name.
    if variable == "auto" and recorded.address is None:
        why = recorded.refused or "no `ray start` of ours has left a record here"
        raise PlacementError(
            f"RAY_ADDRESS=auto: {why}.\n  Fix: RAY_ADDRESS=HOST:PORT, or RAY_ADDRESS=local to start one for this run."
        )
    return recorded


def _end_with_folder(folder: str) -> None:
    disconnect()  # Ray's own handler, registered before ours, comes after it
    shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Keep our handler of SIGTERM: Ray puts its own in place, of which the last, in C++, aborts (2.60: status 134,
    agents left behind).
    """
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread() and handler is not None:
            signal.signal(signal.SIGTERM, handler)


def cpus_per_gpu() -> float:
    """CPUs that a bundle may claim: 1, or less on hosts with fewer cores than GPUs (Ray counts ten-thousandths)."""
    nodes = [n["Resources"] for n in ray.nodes() if n["Alive"] and n["Resources"].get("GPU")]
    return min([1.0] + [math.floor(1e4 * r.get("CPU", 0) / r["GPU"]) / 1e4 for r in nodes])


class Wait:
    """A deadline, and the words for what is awaited."""

    def __init__(
        self, seconds: float, *, whom: str, phase: str, who: str = "train.py", watch: Callable[[], None] | None = None
    ):
        self.seconds, self.whom, self.phase, self.who = seconds, whom, phase, who
        self.watch = watch  # asked each second meanwhile; what it raises ends the wait

    def gather(self, refs: dict[str, ray.ObjectRef]) -> list:
        """Results of the named calls in their order.

        A failure is raised as soon as it comes, with the name of the one that caused it in front.
        """
        pending, names, started = list(refs.values()), {ref: name for name, ref in refs.items()}, time.monotonic()
        while pending:
            left = self.seconds - (time.monotonic() - started)
            done, pending = ray.wait(
                pending, num_returns=1, timeout=max(0.0, left if self.watch is None else min(left, 1.0))
            )
            if not done and self.watch is not None and left > 1.0:
                self.watch()
                continue
            if not done:
                late = ", ".join(names[ref] for ref in pending)
                heard = f"{len(refs) - len(pending)} of {len(refs)} had answered; missing: {late}"
                raise WaitTimeout(who=self.who, whom=self.whom, phase=self.phase, seconds=self.seconds, last=heard)
            failure = self._failure(done[0])
            if failure is not None:
                raise self._cause(failure, names[done[0]], pending, names) from None
        return ray.get(list(refs.values()))

    def _failure(self, ref: ray.ObjectRef) -> RayTaskError | RayActorError | OutOfMemoryError | GetTimeoutError | None:
        """How an ended call failed; None if it did not."""
        try:
            ray.get(ref, timeout=self.seconds)
        except (RayTaskError, *_DEATHS, GetTimeoutError) as error:
            return error
        return None

    def _cause(
        self,
        failure: RayTaskError | RayActorError | OutOfMemoryError | GetTimeoutError,
        name: str,
        pending: list[ray.ObjectRef],
        names: dict[ray.ObjectRef, str],
    ) -> SlimeLikeError:
        """What to raise for the first failed call.

        A rank that dies breaks the collective that its siblings are in, and their error may arrive before the news of
        its death: an error that is not one of ours is held for a moment, for the death of another to be told instead.
        """
        until = time.monotonic() + _ECHO_S
        while pending and isinstance(failure, RayTaskError) and not isinstance(failure.cause, SlimeLikeError):
            done, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, until - time.monotonic()))
            if not done:
                break
            other = self._failure(done[0])
            if isinstance(other, _DEATHS) or (
                isinstance(other, RayTaskError) and isinstance(other.cause, SlimeLikeError)
            ):
                failure, name = other, names[done[0]]
        if isinstance(failure, GetTimeoutError):
            return WaitTimeout(
                who=self.who,
                whom=name,
                phase=self.phase,
                seconds=self.seconds,
                last="the call ended, but its result did not arrive",
            )
        return call_error(failure, name, self.phase)


def call_error(error: RayTaskError | RayActorError | OutOfMemoryError, name: str, phase: str) -> SlimeLikeError:
    """What a failed call to an actor means to a user: the actor's own error with a note, that it raised something else,
    or that it died.
    """
    if isinstance(error, _DEATHS):
        kind = RunError if isinstance(error, RayActorError) and error.actor_init_failed else ProcessLost
        meaning: SlimeLikeError = kind(f"{name} died during {phase}: {str(error).splitlines()[0]}")
        pid = _PID.search(str(error))
        meaning.pid = int(pid[1]) if pid else None
    elif isinstance(error.cause, SlimeLikeError):
        meaning = error.cause
        meaning.add_note(f"(from {name} during {phase})")
    else:
        cause = f"{type(error.cause).__name__}: {error.cause}"
        meaning = RunError(f"{name} failed during {phase}: {cause}\n{getattr(error, 'traceback_str', '')}")
    meaning.who = meaning.who or name
    return meaning


def deaths(pings: dict[str, ray.ObjectRef], phase: str) -> dict[str, RunError]:
    """Of calls to actors, by name, those whose process has ended, killed or by itself; waits a moment for news."""
    done = ray.wait(list(pings.values()), num_returns=len(pings), timeout=_ECHO_S)[0] if pings else []
    lost: dict[str, RunError] = {}
    for name, ref in pings.items():
        if ref in done:
            try:
                ray.get(ref)
            except _DEATHS as error:
                if isinstance(death := call_error(error, name, phase), ProcessLost):
                    lost[name] = death
    return lost


class LifeWatch:
    """Notices the death of actors that nobody is calling: each is asked for a sign of life, and again once it has given
    one.

    pings: gives the calls to send, by name; an actor that is busy answers later, which is no failure.
    """

    def __init__(self, pings: Callable[[], dict[str, ray.ObjectRef]]):
        self._pings = pings
        self._sent: dict[str, ray.ObjectRef] = {}
        self._next = 0.0

    def check(self, phase: str) -> None:
        """Raise RunError naming an actor that has died; asks at most every few seconds and never waits."""
        done = ray.wait(list(self._sent.values()), num_returns=len(self._sent), timeout=0)[0] if self._sent else []
        for name, ref in self._sent.items():
            if ref in done:
                try:
                    ray.get(ref)
                except (RayTaskError, *_DEATHS) as error:
                    raise call_error(error, name, phase) from None
        if len(done) == len(self._sent) and time.monotonic() >= self._next:
            self._sent, self._next = self._pings(), time.monotonic() + _PING_S


def kill_actors(actors: list) -> None:
    """End actors at once; ones that are gone already are fine."""
    for actor in actors:
        ray.kill(actor, no_restart=True)
