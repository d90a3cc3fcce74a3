"""The process that imports everything on the pretended device, and forks each job's ranks.

Run by processes.Pretender, with the guard preloaded; ends when its starter closes the line, or dies.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import logging
import multiprocessing
import os
import pickle
import sys
import time
import traceback
import warnings
from multiprocessing.connection import Connection, wait

from tests.pretend_gpu import cuda, processes
from tests.pretend_gpu.record import RECORD


def main() -> None:
    """Serve jobs until the line ends."""
    processes.end_with_parent()
    faulthandler.enable()  # a rank that crashes says where
    line = processes.connect(sys.argv[1])
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of what is not installed
    cuda.install()
    importlib.import_module("slime_like.megatron_backend.worker")
    RECORD.clear()
    while True:
        try:
            job = line.recv()
        except EOFError:
            return
        try:
            answer = _run(*job)
        except Exception:  # noqa: BLE001 - the test raises it
            answer = None, traceback.format_exc()
        line.send_bytes(pickle.dumps(answer))


def _run(module: str, name: str, num_ranks: int, args: tuple, timeout_s: float, cards: list[str]) -> tuple:
    """(results by rank, None), or (None, what went wrong)."""
    from tests.helpers.train_world import free_ports

    # Before the ranks are forked: they share what the test's module imports.
    importlib.import_module(module)
    place = {"world_size": num_ranks, "master_address": "127.0.0.1", "master_port": free_ports(1)[0]}
    pids: dict[int, int] = {}
    lines: dict[Connection, int] = {}
    sys.stdout.flush(), sys.stderr.flush()
    for rank in range(num_ranks):
        ours, theirs = multiprocessing.Pipe(duplex=False)
        pids[rank] = os.fork()
        if pids[rank] == 0:
            _rank(theirs, module, name, {**place, "rank": rank, "local_rank": rank}, args, cards[rank])
        theirs.close()
        lines[ours] = rank
    results: dict[int, object] = {}
    error, end = None, time.monotonic() + timeout_s
    while lines and error is None:
        for line in wait(list(lines), timeout=max(0.0, end - time.monotonic())) or [None]:
            if line is None:
                error = f"ranks {sorted(lines.values())} did not answer within {timeout_s} s"
                break
            rank = lines.pop(line)
            try:
                results[rank], error = pickle.loads(line.recv_bytes())
            except EOFError:
                error = "it died without a word"
            if error is not None:
                error = f"rank {rank}:\n{error}"
                break
    processes.wait_for(pids, 5.0 if error is None else 0.0)
    return ([results[rank] for rank in range(num_ranks)], None) if error is None else (None, error)


def _rank(line: Connection, module: str, name: str, place: dict, args: tuple, card: str) -> None:
    """A forked rank's whole life."""
    processes.end_with_parent()
    RECORD.card = card
    logging.disable(logging.WARNING)
    try:
        answer = (getattr(importlib.import_module(module), name)(place, *args), None)
    except BaseException:  # noqa: BLE001 - the test raises it
        answer = (None, traceback.format_exc())
    with contextlib.suppress(BrokenPipeError):
        line.send_bytes(pickle.dumps(answer))  # as bytes: the sender's memory goes with it
    for child in multiprocessing.active_children():  # Megatron's saves leave a manager's process behind
        child.kill()
        child.join(timeout=5)
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(0)  # nothing of the server's is to be cleaned up here


if __name__ == "__main__":
    main()
