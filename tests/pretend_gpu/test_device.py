"""What the pretended device refuses, counts and sends, as a real one does."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable

import pytest
import torch

from tests.pretend_gpu.collectives import differences

#: What is done with t, tensor([1., 0., 2.]) on the device -> how many values the host waits for.
READS: dict[str, tuple[Callable, int]] = {
    "item": (lambda t: t[0].item(), 1),
    "bool": (lambda t: bool((t > 0).any()), 1),
    "float": (lambda t: float(t.sum()), 1),
    "tolist": (lambda t: t.tolist(), 1),
    "cpu": (lambda t: t.cpu(), 1),
    "to cpu": (lambda t: t.to("cpu"), 1),
    "copy into the host's": (lambda t: torch.zeros(3).copy_(t), 1),
    "nonzero": (lambda t: t.nonzero(), 1),
    "select by mask": (lambda t: t[t > 0], 1),
    "put many by mask": (lambda t: t.index_put_((t > 0,), torch.ones(2, device="cuda")), 1),
    "unique": (lambda t: t.unique(), 1),
    "equal": (lambda t: t.equal(t), 1),
    "repeats": (lambda t: t.repeat_interleave(t.long()), 1),
    "a list of scalars": (lambda t: torch.tensor([t[0], t[1]]), 2),
    "device": (lambda t: torch.cuda.synchronize(), 1),
    "stream": (lambda t: torch.cuda.Stream().synchronize(), 1),
    "event": (lambda t: torch.cuda.current_stream().record_event().synchronize(), 1),
    "add": (lambda t: t + 1, 0),
    "select by index": (lambda t: t[torch.tensor([0, 2], device="cuda")], 0),
    "put one by mask": (lambda t: t.masked_fill_(t > 0, 1.0), 0),
    "set one by mask": (lambda t: t.__setitem__(t > 0, 1.0), 0),
    "repeats of known sum": (lambda t: t.repeat_interleave(t.long(), output_size=3), 0),
    "into pinned memory": (lambda t: torch.zeros(3).pin_memory().copy_(t, non_blocking=True), 0),
    "without waiting": (lambda t: t.to("cpu", non_blocking=True), 0),
    "backward": (lambda t: (t.requires_grad_() * 2).sum().backward(), 0),
}


def counted_reads(_place) -> dict[str, dict]:
    """READS' name -> what was counted."""
    from tests.pretend_gpu.record import RECORD

    counts = {}
    for name, (act, _) in READS.items():
        tensor = torch.tensor([1.0, 0.0, 2.0], device="cuda")
        RECORD.clear()
        act(tensor)
        counts[name] = dict(RECORD.reads)
    return counts


def test_each_value_that_the_host_waits_for_is_counted_at_its_line(pretend):
    (counts,) = pretend(counted_reads)
    assert {name: sum(lines.values()) for name, lines in counts.items()} == {
        name: number for name, (_, number) in READS.items()
    }
    assert all(line.startswith("tests/pretend_gpu/test_device.py:") for lines in counts.values() for line in lines)


def refusals(_place) -> dict[str, str]:
    """What was tried -> the error."""
    import numpy as np

    device, host = torch.ones(3, device="cuda"), torch.ones(3)
    parameter = torch.nn.Parameter(torch.ones(3, device="cuda"))
    tries = {
        "add": lambda: device + host,
        "matmul": lambda: torch.ones(2, 3) @ device,
        "cat": lambda: torch.cat([device, host]),
        "add to": lambda: host.add_(device),
        "data": lambda: setattr(parameter, "data", host),
        "numpy": lambda: device.numpy(),
        "array": lambda: np.asarray(device),
        "pin": lambda: device.pin_memory(),
    }
    errors = {}
    for name, attempt in tries.items():
        try:
            attempt()
            errors[name] = ""
        except (RuntimeError, TypeError) as error:
            errors[name] = str(error)
    # These are allowed on a real device, too.
    device += torch.tensor(1.0)
    device[torch.tensor([0])] = 2.0
    return errors


def test_devices_do_not_mix(pretend):
    (errors,) = pretend(refusals)
    for name in ("add", "matmul", "cat", "add to"):
        assert "two devices, cuda:0 and cpu" in errors[name]
    assert "device tensor's data" in errors["data"]
    assert "convert cuda:0" in errors["numpy"] and "convert cuda:0" in errors["array"]
    assert "cannot pin" in errors["pin"]


def memory_and_threads(_place) -> dict:
    """Bytes before, with and after a tensor, and what another thread's tensor is."""
    before = torch.cuda.memory_allocated()
    tensor = torch.zeros(1000, device="cuda")
    views = tensor[10:], tensor.reshape(10, 100)
    during = torch.cuda.memory_allocated()
    del tensor, views
    seen: list[str] = []
    thread = threading.Thread(target=lambda: seen.append(str(torch.zeros(1, device="cuda").device)))
    thread.start()
    thread.join(10)
    return {"bytes": (during - before, torch.cuda.memory_allocated() - before), "thread": seen}


def test_memory_is_counted_once_and_threads_have_the_device(pretend):
    (answer,) = pretend(memory_and_threads)
    assert answer == {"bytes": (4000, 0), "thread": ["cuda:0"]}


def send_by_handle(place, folder) -> list:
    """Rank 0 sends a view by handle and writes to it later; rank 1 says what it saw before and after, or the error."""
    from multiprocessing.connection import Client, Listener
    from multiprocessing.reduction import ForkingPickler

    address = f"{folder}/line"
    if place["rank"] == 0:
        with Listener(address) as listener, listener.accept() as line:
            whole = torch.arange(12.0, device="cuda").reshape(3, 4)
            line.send_bytes(bytes(ForkingPickler.dumps(whole[1:, ::2])))
            line.recv()
            whole.zero_()
            line.send("written")
            line.recv()
        return []
    with _client(Client, address) as line:
        try:
            there = ForkingPickler.loads(line.recv_bytes())
            before, device = there.cpu().tolist(), str(there.device)
            line.send("seen")
            line.recv()
            line.send("done")
            return [device, before, there.cpu().tolist()]
        except RuntimeError as error:
            line.send("not seen")
            line.recv()
            line.send("done")
            return [str(error)]


def _client(connect, address):
    end = time.monotonic() + 20
    while True:
        try:
            return connect(address)
        except (FileNotFoundError, ConnectionRefusedError, multiprocessing.ProcessError):
            if time.monotonic() > end:
                raise
            time.sleep(0.02)


def test_a_handle_is_the_senders_memory_and_opens_on_its_card_only(pretend, tmp_path):
    one_card = pretend(send_by_handle, 2, str(tmp_path), cards=["0", "0"])
    assert one_card[1] == ["cuda:0", [[4.0, 6.0], [8.0, 10.0]], [[0.0, 0.0], [0.0, 0.0]]]
    (other_cards,) = pretend(send_by_handle, 2, str(tmp_path))[1]
    assert "a handle of card 0, opened on card 1" in other_cards


def fails(place) -> None:
    """Rank 1 raises, or never answers."""
    if place["rank"] == 1:
        raise ValueError("no such thing")
    time.sleep(60)


def test_an_error_and_a_deadline_are_told_and_leave_nobody_behind(pretend):
    with pytest.raises(RuntimeError, match="rank 1:(.|\n)*no such thing"):
        pretend(fails, 2)
    with pytest.raises(TimeoutError, match=r"ranks \[0\] did not answer within 1"):
        pretend(fails, 1, timeout_s=1.0)


def _call(operation: str, numbers: int, **more) -> dict:
    return {"operation": operation, "group": "0", "ranks": (0, 1), "numbers": numbers, "dtype": "float32", **more}


@pytest.mark.parametrize(
    ("first", "second", "count"),
    [
        ([_call("allreduce_", 3)], [_call("allreduce_", 3)], 0),
        ([_call("allreduce_", 3)], [_call("allreduce_", 4)], 1),
        ([_call("allreduce_", 3), _call("broadcast_", 3)], [_call("broadcast_", 3), _call("allreduce_", 3)], 1),
        ([_call("allreduce_", 3)], [], 1),
        ([_call("send", 3, peer=1)], [_call("recv_", 3, peer=0)], 0),
        ([_call("send", 3, peer=1)], [_call("recv_", 2, peer=0)], 1),
        ([_call("send", 3, peer=1)], [], 1),
        ([_call("alltoall_base_", 0, gives=[1, 2], takes=[1, 5])],
         [_call("alltoall_base_", 0, gives=[5, 6], takes=[2, 6])], 0),
        ([_call("alltoall_base_", 0, gives=[1, 2], takes=[1, 5])],
         [_call("alltoall_base_", 0, gives=[5, 6], takes=[3, 6])], 1),
    ],
)  # fmt: skip
def test_what_would_hang_nccl_is_named(first, second, count):
    assert len(differences({0: first, 1: second})) == count
