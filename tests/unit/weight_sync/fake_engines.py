"""Engines without SGLang: one process for each tensor parallel rank, forked from one that has imported torch, and HTTP
in front of the first rank.

A rank joins process groups and loads weights as SGLang 0.5.23 does. Test side: `Nest` starts engines, `FakeEngine` asks
and kills them.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

import requests
import torch
import torch.distributed as dist
from sglang_backend.fake_http import serve

from slime_like.records import EngineEndpoint
from slime_like.sglang_backend.shared_memory import WEIGHT_LOADER
from slime_like.weight_sync.in_engine import shm_loader

#: Test's own requests beside SGLang's.
ORDERS, REPORT = "/test/orders", "/test/report"
#: Smaller allocations are tables and statuses.
_BLOCK_BYTES = 16 << 10


def bits(tensor: torch.Tensor) -> list:
    """[type, shape, hash of the bytes]."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return [str(tensor.dtype), list(tensor.shape), hashlib.sha256(data).hexdigest()]


class Block(bytearray):
    """Memory of a tensor: lives exactly as long as anything that looks into it, a view in the model as well as the
    tensor itself.
    """


class Received:
    """Counts the bytes of all uint8 tensors that torch.empty makes in this process: what weights are received into."""

    def __init__(self) -> None:
        self.now = self.most = self.blocks = self.most_blocks = 0
        self.room: int | None = None  # for one tensor
        self._lock = threading.RLock()
        self._empty = torch.empty
        torch.empty = self._counted

    def forget(self) -> None:
        """Begin with what is alive now."""
        with self._lock:
            self.most, self.most_blocks = self.now, self.blocks

    def _counted(self, *args, **kwargs) -> torch.Tensor:
        size = args[0] if isinstance(args[0], int) else 0
        if kwargs.get("dtype") is not torch.uint8 or size < _BLOCK_BYTES:
            return self._empty(*args, **kwargs)
        if self.room is not None and size > self.room:
            raise RuntimeError(f"no room for {size} bytes")
        block = Block(size)
        weakref.finalize(block, self._change, -len(block))
        self._change(len(block))
        return torch.frombuffer(block, dtype=torch.uint8)

    def _change(self, size: int) -> None:
        with self._lock:
            self.now += size
            self.blocks += 1 if size > 0 else -1
            self.most, self.most_blocks = max(self.most, self.now), max(self.most_blocks, self.blocks)


class Model:
    """Takes weights as a model in SGLang does, and can be told to misbehave."""

    def __init__(self, received: Received) -> None:
        self.held: dict[str, torch.Tensor] = {}
        self.received = received
        self.bytes_at: list[int] = []  # alive as each tensor is loaded
        # refuse: name of a tensor; die_at: name of a tensor; nap_s: for each tensor; room: bytes
        self.orders: dict = {}

    def load_weights(self, pairs: Iterable) -> None:
        for name, tensor in pairs:
            if name == self.orders.get("refuse"):
                raise RuntimeError(f"size mismatch for {name}")
            if name == self.orders.get("die_at"):
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(self.orders.get("nap_s", 0))
            self.bytes_at.append(self.received.now)
            held = self.held.get(name)
            if held is None or (held.dtype, held.shape) != (tensor.dtype, tensor.shape):
                self.held[name] = tensor.clone()
            else:
                held.copy_(tensor)  # as a model does: its tensors stay the same ones

    def parameters(self) -> Iterator[torch.Tensor]:
        yield torch.zeros(1)

    def named_parameters(self) -> Iterator[tuple]:
        yield from self.held.items()

    def named_buffers(self) -> Iterator[tuple]:
        yield from ()


class Rank:
    """One tensor parallel rank."""

    def __init__(self, rank: int):
        self._rank, self._received, self._groups = rank, Received(), {}
        self._model = Model(self._received)

    def answer(self, path: str, body: dict) -> dict:
        """What SGLang's scheduler answers; an exception in a weight loader is its end."""
        act = {
            "/init_weights_update_group": self._join,
            "/destroy_weights_update_group": self._leave,
            "/update_weights_from_tensor": self._load,
            "/update_weights_from_distributed": self._receive,
            ORDERS: self._obey,
            REPORT: self._report,
        }[path]
        try:
            return {"success": True, **(act(body) or {})}
        except BaseException:  # noqa: BLE001 - shown, and seen by whoever asked
            traceback.print_exc()
            os._exit(3)

    def _join(self, body: dict) -> None:
        """As sglang.srt.utils.common.init_custom_process_group."""
        from torch.distributed.distributed_c10d import (
            Backend,
            PrefixStore,
            _new_process_group_helper,
            _world,
            default_pg_timeout,
            rendezvous,
        )

        size, name = body["world_size"], body["group_name"]
        url = f"tcp://{body['master_address']}:{body['master_port']}"
        store, rank, size = next(rendezvous(url, body["rank_offset"] + self._rank, size, timeout=default_pg_timeout))
        store.set_timeout(default_pg_timeout)
        group, _ = _new_process_group_helper(
            size,
            rank,
            [],
            Backend(body["backend"]),
            PrefixStore(name, store),
            group_name=name,
            backend_options=None,
            timeout=default_pg_timeout,
        )
        _world.pg_group_ranks[group] = {number: number for number in range(size)}
        self._groups[name] = group

    def _leave(self, body: dict) -> dict | None:
        group = self._groups.pop(body["group_name"], None)
        if group is None:
            return {"success": False, "message": "The group to be destroyed does not exist."}
        dist.destroy_process_group(group)
        return None

    def _load(self, body: dict) -> None:
        assert body["load_format"] == WEIGHT_LOADER
        shm_loader.load(self._model, pickle.loads(base64.b64decode(body["serialized_named_tensors"][self._rank])))

    def _receive(self, body: dict) -> None:
        """SGLang's own way: one flat tensor for a request."""
        assert body["load_format"] == "flattened_bucket"
        shapes, dtypes = body["shapes"], [getattr(torch, dtype) for dtype in body["dtypes"]]
        ends = [0]
        for shape, dtype in zip(shapes, dtypes, strict=True):
            ends.append(ends[-1] + torch.Size(shape).numel() * dtype.itemsize)
        flat = torch.empty(ends[-1], dtype=torch.uint8)
        dist.broadcast(flat, src=0, group=self._groups[body["group_name"]])
        parts = [
            flat[start:stop].view(dtype).view(shape)
            for start, stop, dtype, shape in zip(ends, ends[1:], dtypes, shapes, strict=False)
        ]
        self._model.load_weights(zip(body["names"], parts, strict=True))

    def _obey(self, body: dict) -> None:
        self._model.orders = body if body.get("only_rank", self._rank) == self._rank else {}
        self._model.held, self._model.bytes_at = {}, []
        self._received.room = self._model.orders.get("room")
        self._received.forget()

    def _report(self, body: dict) -> dict:
        held = {name: bits(tensor) for name, tensor in self._model.held.items()}
        threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("weights from")]
        counted = self._received
        numbers = {
            "most_bytes": counted.most,
            "most_blocks": counted.most_blocks,
            "bytes": counted.now,
            "bytes_at": self._model.bytes_at,
        }
        return {"held": held, "threads": threads, **numbers}


def _live(rank: int, peers: list[Connection], line: Connection, ready: int) -> None:
    """A rank's process: the first one serves HTTP and asks the others (peers); they serve it (line)."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # SGLang has a default group too
    me, one_at_a_time, calls, loaders = Rank(rank), threading.Lock(), [], [[WEIGHT_LOADER]]
    if rank:
        while True:
            line.send(me.answer(*line.recv()))

    def whole(path: str, body: dict) -> tuple[int, dict]:
        with one_at_a_time:  # as the scheduler
            try:
                for peer in peers:
                    peer.send((path, body))
                answers = [me.answer(path, body)] + [peer.recv() for peer in peers]
            except (OSError, EOFError):
                os._exit(4)  # SGLang ends as a whole
        if path == ORDERS:
            loaders[0] = body.get("loaders", [WEIGHT_LOADER])
            calls.clear()
        elif path == REPORT:
            return 200, {"ranks": answers, "calls": calls}
        else:
            calls.append(path)
        return 200, next((answer for answer in answers if not answer["success"]), answers[0])

    names = (
        "/init_weights_update_group",
        "/destroy_weights_update_group",
        "/update_weights_from_tensor",
        "/update_weights_from_distributed",
        ORDERS,
        REPORT,
    )
    answers = {path: (lambda body, path=path: whole(path, body)) for path in names}
    with serve(answers | {"/server_info": lambda _: (200, {"custom_weight_loader": loaders[0]})}) as server:
        os.write(ready, server.url.encode())
        os.close(ready)
        threading.Event().wait()


def _fork(act, *args) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            act(*args)
        finally:
            os._exit(0)
    return pid


def _start(tp_size: int) -> dict:
    lines = [Pipe() for _ in range(1, tp_size)]
    url, ready = os.pipe()
    pids = [_fork(_live, 0, [mine for mine, _ in lines], None, ready)]
    pids += [_fork(_live, rank, [], line, ready) for rank, (_, line) in enumerate(lines, 1)]
    os.close(ready)
    for both in lines:
        for end in both:
            end.close()
    return {"pids": pids, "url": os.read(url, 100).decode()}


def main() -> None:
    """A line with a number on stdin: start an engine with so many ranks. The end of stdin is the end of all of them."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        print(json.dumps(_start(int(line))), flush=True)
    os.killpg(0, signal.SIGKILL)


@dataclasses.dataclass(frozen=True)
class FakeEngine:
    """One engine, as a test sees it."""

    endpoint: EngineEndpoint
    pids: tuple[int, ...]

    def order(self, **orders) -> None:
        """Forget weights, counts and earlier orders.

        orders: see Model; only_rank: whom they are for; loaders: of /server_info.
        """
        self._ask(ORDERS, orders)

    def obeys(self, **orders) -> bool:
        """Whether it takes the orders; an engine that hangs is killed."""
        try:
            self.order(**orders)
        except requests.RequestException:
            self.kill()
            return False
        return True

    def report(self) -> dict:
        """Of each rank (ranks): what it holds, the most bytes and blocks it received into, how much it still has.

        And the weight requests so far.
        """
        return self._ask(REPORT, {})

    def kill(self) -> None:
        """SIGKILL to all ranks."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def is_alive(self) -> bool:
        """Whether all ranks are."""
        return all(os.path.exists(f"/proc/{pid}") for pid in self.pids)

    def _ask(self, path: str, body: dict) -> dict:
        answer = requests.post(self.endpoint.url + path, json=body, timeout=15)
        answer.raise_for_status()
        return answer.json()


class Nest:
    """Engines of the given sizes, started as they are asked for, and again if they are dead or hang by then."""

    def __init__(self, *tp_sizes: int):
        self._tp_sizes = tp_sizes
        self._engines: dict[int, FakeEngine] = {}
        folders = [str(Path(__file__).parent.parent), *filter(None, sys.path)]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(folders),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from weight_sync.fake_engines import main; main()"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True,
        )  # fmt: skip

    def engines(self, **orders) -> list[FakeEngine]:
        """All of them, alive, with the same orders."""
        for index, tp_size in enumerate(self._tp_sizes):
            if index not in self._engines or not self._engines[index].obeys(**orders):
                self._engines[index] = self._start(index, tp_size)
                self._engines[index].order(**orders)
        return [self._engines[index] for index in range(len(self._tp_sizes))]

    def close(self) -> None:
        """End everything."""
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()

    def _start(self, index: int, tp_size: int) -> FakeEngine:
        self._process.stdin.write(f"{tp_size}\n")
        self._process.stdin.flush()
        started = json.loads(self._process.stdout.readline())
        return FakeEngine(EngineEndpoint(index=index, url=started["url"], tp_size=tp_size), tuple(started["pids"]))
