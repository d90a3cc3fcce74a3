"""Weight syncs of real trainer ranks to real engines of one and of two ranks: what arrives is right, and every fault is
named.

One world a model: two trainer ranks in Ray (tensor parallel, or expert parallel) and two engines, for all transports.
The fault table is printed at the end of the test run (tests/helpers/fault_table.py).
"""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from slime_like.errors import RunError, WaitTimeout
from slime_like.sglang_backend.client import EngineClient
from slime_like.utils.guard import group_members
from slime_like.weight_sync.session import version_directory
from tests.helpers import sync_faults
from tests.helpers.fault_table import ROWS, Row
from tests.helpers.sync_faults import Fault
from tests.helpers.sync_world import START_S, TIMEOUT_S, SyncWorld, hf_log_probs, launch, sync_world

#: Every transport that sends to these engines.
TRANSPORTS = ("ipc", "broadcast", "disk", "delta")

_LAYER = "model.layers.1."
_Q, _K = _LAYER + "self_attn.q_proj.weight", _LAYER + "self_attn.k_proj.weight"
#: on different trainer ranks
_EXPERT, _OTHER = _LAYER + "mlp.experts.0.gate_proj.weight", _LAYER + "mlp.experts.2.gate_proj.weight"
#: Fewer than an engine's rank has of a trainer's group over gloo.
SOCKETS_OF_A_GROUP = 4
#: By model: fault -> what is changed.
FAULTS = {
    "dense": {
        "dropped tensor": Fault("dropped", (_LAYER + "mlp.down_proj.weight",)),
        "square matrix transposed": Fault("transposed", (_Q,)),
        "q and k exchanged": Fault("exchanged", (_Q, _K)),
        "one bit flipped": Fault("flipped", (_LAYER + "self_attn.o_proj.weight",)),
        "stale version": Fault("stale", ("model.embed_tokens.weight",)),
    },
    "moe": {
        "dropped expert": Fault("dropped", (_LAYER + "mlp.experts.3.down_proj.weight",)),
        "experts exchanged": Fault("exchanged", (_EXPERT, _OTHER)),
        "one bit of an expert flipped": Fault("flipped", (_OTHER,)),
    },
}
#: Of a change made before the digest only the probe can tell, and not of one bit.
_BEFORE_DIGEST = (
    "dropped tensor",
    "square matrix transposed",
    "q and k exchanged",
    "dropped expert",
    "experts exchanged",
)
_ALL = [(model, name) for model, faults in FAULTS.items() for name in faults]
#: The second world, and restarts: left out unless -m fault_table asks for them (scripts/test_long.sh).
_LONG = pytest.mark.fault_table


def marked(cases: list[tuple]) -> list:
    """Parameters whose first is the model; those of the mixture of experts take another world."""
    return [pytest.param(*case, marks=_LONG if case[0] == "moe" else ()) for case in cases]


@contextlib.contextmanager
def installed(model: str, root: Path) -> Iterator[SyncWorld]:
    with sync_world(model, root) as world:
        world.each_rank(sync_faults.install)
        yield world
        pids = [engine.pid for engine in world.engines.values()]
    assert [pid for pid in pids if group_members(pid)] == [], "engines are left"


@pytest.fixture(scope="module")
def current() -> Iterator[dict]:
    """The one world that is up (under "world"), and what ends it."""
    with contextlib.ExitStack() as stack:
        yield {"stack": stack, "world": None}


@pytest.fixture
def world(current, model, tmp_path_factory) -> SyncWorld:
    """The model's world. conftest.py puts the tests of one model behind another."""
    if current["world"] is None or current["world"].name != model:
        current["stack"].close()
        current["world"] = current["stack"].enter_context(installed(model, tmp_path_factory.mktemp(model)))
    return current["world"]


class Case:
    """One row of the table in the making."""

    def __init__(self, request, world: SyncWorld, fault: str, where: str, transport: str):
        self._rows = request.config.stash.setdefault(ROWS, [])
        self._row = {"fault": fault, "where": where, "transport": transport, "model": world.name}
        self._world = world

    @contextlib.contextmanager
    def caught(self, *words: str) -> Iterator[None]:
        """The sync inside fails within its deadline, in these words, and with it no sample may be generated.

        After that a clean one succeeds.
        """
        before, started, seconds, message = self._world.sampling.version, time.monotonic(), 0.0, "nothing was raised"
        complete = False
        try:
            with pytest.raises(RunError) as raised:
                yield
            seconds, message = time.monotonic() - started, str(raised.value)
            assert all(word in message for word in words), f"{words} are to be in: {message}"
            assert seconds < TIMEOUT_S
            assert self._world.sampling.version == before, "samples may be generated with it"
            complete = True
        finally:
            self._rows.append(Row(**self._row, caught=complete, seconds=seconds, message=message))


@contextlib.contextmanager
def armed(world: SyncWorld, function, *args) -> Iterator[None]:
    world.each_rank(function, *args)
    try:
        yield
    finally:
        world.each_rank(sync_faults.disarm)


def synced(world: SyncWorld, transport: str, mode: str = "digest") -> None:
    """Both engines hold this version, and the trainer has gone on from it."""
    world.use(transport, mode)
    assert world.sync(1, 2).engines_proven == (0 if mode == "probe" else 2)
    world.each_rank(sync_faults.nudge)


# ------------------------------------------------------------------ what arrives is right


@pytest.mark.parametrize("model", marked([(model,) for model in sorted(FAULTS)]))
def test_after_three_steps_engines_equal_a_fresh_one_and_transformers(world, tmp_path):
    """Three transports send between the steps, and then all of them the last weights to engines that held the first
    ones.
    """
    generator = np.random.default_rng(7)
    prompts = [generator.integers(0, 101, length).tolist() for length in (30, 17)]
    start = hf_log_probs(world.folder, prompts)
    for step in range(3):
        world.train_step(step)
        world.use(TRANSPORTS[-1 - step], "full")
        assert world.sync(1, 2).engines_proven == 2
    world.each_rank(sync_faults.save_hf, str(tmp_path / "export"))
    truth = hf_log_probs(str(tmp_path / "export"), prompts)
    fresh_engine = launch(world.name, str(tmp_path / "export"), tmp_path, 1)
    try:
        fresh_engine.wait_healthy(START_S)
        fresh = EngineClient(fresh_engine.endpoint, timeout_s=TIMEOUT_S).prompt_log_probs(prompts)
    finally:
        fresh_engine.close()
    assert largest(start, truth) > 1e-2, "training changed nothing"
    for transport in TRANSPORTS:
        world.use(transport)
        for tp in (1, 2):
            client = world.client(tp)
            client.update_weights_from_disk(world.folder)
            client.flush_cache()
            assert largest(world.log_probs(tp, prompts), start) <= 1e-5, "it holds the first weights again"
        receipt = world.sync(1, 2)
        assert (receipt.engines_proven, receipt.tensors_unproven) == (2, 0)
        for tp in (1, 2):
            ours = world.log_probs(tp, prompts)
            assert largest(ours, fresh) <= 1e-5, f"{transport}, engine of {tp}: a fresh engine differs"
            assert largest(ours, truth) <= 1e-5, f"{transport}, engine of {tp}: transformers differs"


def largest(some, others) -> float:
    """max |difference| of two lists of log-probs."""
    return max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in zip(some, others, strict=True))


# ------------------------------------------------------------------ faults


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("model", "fault"), marked(_ALL))
def test_in_flight(request, world, fault, transport):
    change = FAULTS[world.name][fault]
    synced(world, transport)
    world.each_rank(sync_faults.remember)
    world.each_rank(sync_faults.nudge)
    case = Case(request, world, fault, "in flight", transport)
    words = change.names[:1] if change.kind != "stale" else ()
    with (
        case.caught("engine 1 ", "engine 2 ", "is not what was sent", *words),
        armed(world, sync_faults.arm, "in flight", change),
    ):
        world.sync(1, 2)
    assert world.sync(1, 2).engines_proven == 2


@pytest.mark.parametrize(("model", "fault"), marked(_ALL))
def test_on_disk(request, world, fault):
    change = FAULTS[world.name][fault]
    synced(world, "disk")
    older = str(world.root / "older")
    os.rename(version_directory(str(world.root / "weights"), world.version), older)
    case = Case(request, world, fault, "on disk", "disk")
    with case.caught("engine 1 ", "engine 2 ", *change.names[:1]), armed(world, sync_faults.arm_on_disk, change, older):
        world.sync(1, 2)
    subprocess.run(["rm", "-r", older], check=True)
    assert world.sync(1, 2).engines_proven == 2


@pytest.mark.parametrize(
    ("model", "fault"), marked([(model, fault) for model, fault in _ALL if fault in _BEFORE_DIGEST])
)
def test_in_conversion(request, world, fault):
    """Before the digest: names are counted, and only the probe knows what the others mean."""
    change = FAULTS[world.name][fault]
    synced(world, "ipc", "probe" if change.kind != "dropped" else "digest")
    words = (
        (f"{change.names[0]} was not sent",)
        if change.kind == "dropped"
        else ("engine 1 ", "engine 2 ", "do not compute with the trainer's weights")
    )
    with (
        Case(request, world, fault, "in conversion", "ipc").caught(*words),
        armed(world, sync_faults.arm, "conversion", change),
    ):
        world.sync(1, 2)
    world.use("ipc", "full")
    assert world.sync(1, 2).probe_difference < 1e-5


@pytest.mark.parametrize("model", ["dense"])
def test_truncated_file(request, world):
    synced(world, "disk")
    case = Case(request, world, "truncated file", "on disk", "disk")
    with case.caught("version-", ".safetensors is cut off"), armed(world, sync_faults.arm_on_disk, None, ""):
        world.sync(1, 2)
    assert world.sync(1, 2).engines_proven == 2


@pytest.mark.parametrize("model", ["dense"])
def test_an_engine_that_reports_another_version(request, world):
    synced(world, "ipc")
    case = Case(request, world, "stale version reported", "engine", "ipc")
    with case.caught("engine 1 ", "engine 2 ", "reports"), armed(world, sync_faults.arm_version):
        world.sync(1, 2)
    assert world.sync(1, 2).engines_proven == 2


@pytest.mark.parametrize("model", ["dense"])
def test_full_disk(request, world, tmp_path):
    small = tmp_path / "small"
    with (
        small_disk(world, small),
        Case(request, world, "full disk", "on disk", "disk").caught(
            str(small), "cannot be written to", "--update-weight-disk-dir"
        ),
    ):
        world.use("disk", directory=small)
        world.sync(1, 2)
    world.use("disk", directory=world.root / "weights")
    assert world.sync(1, 2).engines_proven == 2


@contextlib.contextmanager
def small_disk(world: SyncWorld, folder: Path) -> Iterator[None]:
    """A file system of 64 KiB where that is allowed (root).

    Else both trainer ranks may write no file as large as their share.
    """
    folder.mkdir()
    if (
        os.getuid() == 0
        and subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], capture_output=True).returncode
        == 0
    ):
        try:
            yield
        finally:
            subprocess.run(["umount", folder], check=True)
    else:
        with no_large_files(world):
            yield


@contextlib.contextmanager
def no_large_files(world: SyncWorld) -> Iterator[None]:
    """Trainer ranks may write no file of more than 40 kB."""
    pids = world.each_rank(sync_faults.pid_of)
    limits = {pid: resource.prlimit(pid, resource.RLIMIT_FSIZE) for pid in pids}
    for pid, (_, hard) in limits.items():
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (40_000, hard))
    try:
        yield
    finally:
        for pid, limit in limits.items():
            resource.prlimit(pid, resource.RLIMIT_FSIZE, limit)


@pytest.mark.parametrize("model", ["dense"])
def test_full_shared_memory(request, world):
    synced(world, "ipc")
    world.use("ipc")
    with (
        no_large_files(world),
        Case(request, world, "full disk", "shared memory", "ipc").caught(
            "no room for a bucket", "--update-weight-buffer-size"
        ),
    ):
        world.sync(1, 2)
    assert world.sync(1, 2).engines_proven == 2


@pytest.mark.parametrize("model", ["dense"])
def test_nothing_is_generated_after_a_mismatch(world):
    synced(world, "ipc")
    with (
        armed(world, sync_faults.arm, "in flight", FAULTS["dense"]["one bit flipped"]),
        pytest.raises(RunError, match="is not what was sent"),
    ):
        world.sync(1, 2)
    for tp in (1, 2):
        with pytest.raises(WaitTimeout):
            world.client(tp).prompt_log_probs([[1, 2, 3]], timeout_s=1.0)
    assert world.sync(1, 2).engines_proven == 2


@_LONG
@pytest.mark.parametrize(
    ("model", "transport", "tp"), [("dense", "ipc", 1), ("dense", "broadcast", 2), ("dense", "disk", 1)]
)
def test_engine_killed_during_transfer(request, world, transport, tp):
    """The run ends and names it; one in its place gets the weights of the next sync."""
    synced(world, transport)
    pids = group_members(world.engines[tp].pid)
    with Case(request, world, "engine killed", "in flight", transport).caught(f"engine {tp}"):
        world.rank_call(0, sync_faults.arm_kill, pids, 10)
        world.sync(1, 2)
    world.each_rank(sync_faults.disarm)
    world.restart_engine(tp)
    assert world.sync(1, 2).engines_proven == 2


@_LONG
@pytest.mark.parametrize(
    ("model", "transport", "rank"), [("dense", "broadcast", 0), ("moe", "ipc", 1), ("moe", "disk", 1)]
)
def test_trainer_rank_killed_during_transfer(request, world, transport, rank):
    """The others end, and the run names the one that died; new ranks go on with the same engines, which keep nothing
    of those before.
    """
    synced(world, transport)
    sockets = sockets_of_schedulers(world)
    pids = world.each_rank(sync_faults.pid_of)
    with Case(request, world, "trainer rank killed", "in flight", transport).caught(
        f"trainer rank {rank} died during weight sync"
    ):
        world.rank_call(rank, sync_faults.arm_kill, [], 10)
        world.sync(1, 2)
    world.trainers.end()
    deadline = time.monotonic() + 15
    while [pid for pid in pids if os.path.exists(f"/proc/{pid}")] and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [pid for pid in pids if os.path.exists(f"/proc/{pid}")] == [], "a rank is left"
    world.restart_trainer()
    world.each_rank(sync_faults.install)
    assert world.sync(1, 2).engines_proven == 2
    assert all(more < SOCKETS_OF_A_GROUP for more in sockets_of_schedulers(world) - sockets), transport


def sockets_of_schedulers(world: SyncWorld) -> np.ndarray:
    """Of each engine's ranks together."""
    numbers = []
    for tp in (1, 2):
        family = [psutil.Process(pid) for pid in group_members(world.engines[tp].pid)]
        ranks = [one.pid for one in family if any("sglang::scheduler" in word for word in one.cmdline())]
        assert len(ranks) == tp, [one.cmdline() for one in family]
        links = [os.readlink(f"/proc/{pid}/fd/{fd}") for pid in ranks for fd in _descriptors(pid)]
        numbers.append(sum(link.startswith("socket:") for link in links))
    return np.array(numbers)


def _descriptors(pid: int) -> list[str]:
    """Those that are still there a moment later."""
    return [fd for fd in os.listdir(f"/proc/{pid}/fd") if os.path.islink(f"/proc/{pid}/fd/{fd}")]


def test_every_fault_was_caught(request):
    """The whole table, if the whole of it was run."""
    rows = request.config.stash.get(ROWS, [])
    assert rows and all(row.caught for row in rows)
