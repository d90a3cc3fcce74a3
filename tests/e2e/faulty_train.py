"""train.py in whose trainer something goes wrong during one weight sync: python tests/e2e/faulty_train.py <JSON> <flags
of train.py>.

JSON: {"version": the sync, "rank": of the trainer, "mark": a file that comes to be when that sync begins, "what": of
    the following} {"kind", "names"}: a fault of tests.helpers.sync_faults between receipt and transport "trainer": this
    rank is killed after some tensors were gathered "engine", "engine hangs": so is the last rank of the last engine; or
    it is stopped "version": engines keep their version "disk": this rank may write no file of more than 40 kB from then
    on
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time

import psutil

import train
from slime_like.cluster import train_group
from slime_like.records import EngineEndpoint

#: Tensors gathered before somebody is killed.
AFTER = 10
TOLD = json.loads(sys.argv[1]) if __name__ == "__main__" else {}


class FaultyActor(train_group.TrainActor):
    """A trainer rank; goes to Ray by value, with what it was told."""

    order: dict = TOLD

    def call(self, method: str, *args):
        """As TrainActor; arms the fault before the sync."""
        order = self.order
        if method == "publish" and args[0].weights.version == order["version"] and self._place["rank"] == order["rank"]:
            with open(order["mark"], "w", encoding="utf-8") as file:
                file.write(str(time.time()))
            self._arm(order["what"], args[0].endpoints[-1])
        return super().call(method, *args)

    def build(self, *meeting) -> dict:
        """As TrainActor."""
        report = super().build(*meeting)
        from tests.helpers import sync_faults  # imports torch

        sync_faults.install(self._worker)
        return report

    def _arm(self, what: dict | str, engine: EngineEndpoint) -> None:
        from tests.helpers import sync_faults

        if isinstance(what, dict):
            sync_faults.arm(self._worker, "in flight", sync_faults.Fault(what["kind"], tuple(what["names"])))
        elif what == "disk":
            resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        elif what == "version":
            sync_faults.arm_version(self._worker)
        else:
            pids, number = (
                [] if what == "trainer" else schedulers(engine)[-1:],
                signal.SIGSTOP if what == "engine hangs" else signal.SIGKILL,
            )
            sync_faults.arm_kill(self._worker, pids, AFTER, number)


def schedulers(engine: EngineEndpoint) -> list[int]:
    """SGLang's scheduler processes of an engine of this machine, by rank: the server starts them first."""
    port = f"--port={engine.url.rpartition(':')[2]}"
    server = next(
        process for process in psutil.Process(os.getppid()).children(recursive=True) if port in process.cmdline()
    )
    pids = sorted(process.pid for process in server.children())
    assert len(pids) == engine.tp_size + 1, f"{pids}: the detokenizer is started last"
    return pids[:-1]


if __name__ == "__main__":
    train_group.TrainActor = FaultyActor
    sys.exit(train.main(sys.argv[2:]))
