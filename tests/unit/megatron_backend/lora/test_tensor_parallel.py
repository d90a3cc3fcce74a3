"""Adapters on two tensor parallel ranks, with and without sequence parallelism, against one rank in float64: outputs,
gradients of inputs, A and B, the delta of the weights, and what ranks gather. The ranks are threads of this process.
"""

# Covers slime_like.megatron_backend.lora.build's put_whole and gathered too.

from __future__ import annotations

import threading
import types
from collections.abc import Callable

import pytest
import torch
from torch.testing._internal.distributed import multi_threaded_pg

from slime_like.config.lora import LoraConfig
from slime_like.config.lora_targets import COLUMN, ROW, WHOLE
from slime_like.megatron_backend.hf.tables.row import GATE_UP, GATE_UP_JOINED, PLAIN, QKV
from slime_like.megatron_backend.lora.adapter import AdapterPart, AdapterShape, AdapterSwitch, LoraAdapter
from slime_like.megatron_backend.lora.build import gathered, put_whole

TOKENS, INPUTS, RANK = 6, 8, 3
#: (split, layout, rows of each HF module, places of those with an adapter)
CASES = [
    (COLUMN, QKV, (16, 8, 8), (0, 1, 2)),
    (COLUMN, QKV, (16, 8, 8), (0, 2)),
    (COLUMN, GATE_UP, (8, 8), (0, 1)),
    (COLUMN, GATE_UP_JOINED, (16,), (0,)),
    (ROW, PLAIN, (10,), (0,)),
    (WHOLE, PLAIN, (10,), (0,)),
]


def on_two_ranks(act: Callable[[int], None]) -> None:
    """Run act(rank) in two threads that torch takes for ranks of one world."""
    errors: list[BaseException] = []
    store = torch.distributed.HashStore()

    def run(rank: int) -> None:
        try:
            torch.distributed.init_process_group("threaded", rank=rank, world_size=2, store=store)
            act(rank)
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)
            multi_threaded_pg.ProcessLocalGroup.exception_handle(error)

    multi_threaded_pg._install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(2)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads), "a rank waits for the other"
    finally:
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        multi_threaded_pg.ProcessLocalGroup.reset()
        multi_threaded_pg._uninstall_threaded_pg()
    if errors:
        raise errors[0]


def adapter_of(group, case, whole, *, sizes, num_inputs, sequence_parallel) -> LoraAdapter:
    split, layout, _, places = case
    config = types.SimpleNamespace(sequence_parallel=sequence_parallel, params_dtype=torch.float64, kv_channels=2)
    shape = AdapterShape(
        split=split, layout=layout, sizes=sizes, num_inputs=num_inputs, rank=RANK, scale=2.0, dropout=0.0, group=group
    )
    parts = {place: AdapterPart(f"module.{place}th", shape, sizes[place], config) for place in places}
    adapter = LoraAdapter(shape, parts, config, AdapterSwitch(LoraConfig(lora_rank=RANK)))
    for place, part in parts.items():
        put_whole(adapter, part, *whole[place])
    return adapter


def rows_here(case, num_rows: int, rank: int) -> torch.Tensor:
    """Which rows of the whole layer's output this rank of a layer split by rows has, in its order."""
    halves = torch.arange(num_rows).chunk(2 if case[1] in (GATE_UP, GATE_UP_JOINED) else 1)
    return torch.cat([half.chunk(2)[rank] for half in halves])


def check(case, sequence_parallel: bool, rank: int, whole, hidden, pull) -> None:
    """One rank of two against the same adapter on one rank."""
    split, _, sizes, _ = case
    solo = [torch.distributed.new_group([number]) for number in range(2)][rank]
    truth = adapter_of(solo, case, whole, sizes=sizes, num_inputs=INPUTS, sequence_parallel=False)
    given = hidden.clone().requires_grad_()
    expected = truth(given)
    (expected * pull).sum().backward()
    world, tokens = torch.distributed.group.WORLD, slice(None)
    if sequence_parallel:
        tokens = slice(rank * TOKENS // 2, (rank + 1) * TOKENS // 2)
    if split == COLUMN:
        rows = rows_here(case, sum(sizes), rank)
        mine = hidden[tokens], pull[..., rows], expected[..., rows], given.grad[tokens], truth.delta()[rows]
    elif split == ROW:
        inputs, their_gradient = hidden.chunk(2, -1)[rank], given.grad.chunk(2, -1)[rank]
        mine = inputs, pull[tokens], expected[tokens], their_gradient, truth.delta().chunk(2, 1)[rank]
    else:
        mine = hidden[tokens], pull[tokens], expected[tokens], given.grad[tokens], truth.delta()
    local = tuple(size // 2 for size in sizes) if split == COLUMN else sizes
    num_inputs = INPUTS // 2 if split == ROW else INPUTS
    adapter = adapter_of(world, case, whole, sizes=local, num_inputs=num_inputs, sequence_parallel=sequence_parallel)
    inputs, own_pull, output, input_gradient, delta = mine
    inputs = inputs.clone().requires_grad_()
    gain = adapter(inputs)
    (gain * own_pull).sum().backward()
    close = {"atol": 1e-12, "rtol": 0.0}
    torch.testing.assert_close(gain, output, **close)
    torch.testing.assert_close(inputs.grad, input_gradient, **close)
    torch.testing.assert_close(adapter.delta(), delta, **close)
    for (place, part), theirs in zip(adapter.parts.items(), truth.parts.values(), strict=True):
        gradients = []
        for matrix in (part.lora_a, part.lora_b):
            gradients.append(matrix.grad.clone())
            if getattr(matrix, "sequence_parallel", False):  # as Megatron does before a step
                torch.distributed.all_reduce(gradients[-1], group=world)
        part.lora_a.data, part.lora_b.data = gradients
        for ours, whole_gradient in zip(gathered(adapter, part), (theirs.lora_a.grad, theirs.lora_b.grad), strict=True):
            torch.testing.assert_close(ours, whole_gradient, **close)
        put_whole(adapter, part, *whole[place])
        for ours, matrix in zip(gathered(adapter, part), whole[place], strict=True):
            assert torch.equal(ours, matrix)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sequence parallel"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]} {case[1]} {len(case[3])}")
def test_two_ranks_compute_what_one_does(case, sequence_parallel):
    generator = torch.Generator().manual_seed(7)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    whole = {place: (random(RANK, INPUTS), random(case[2][place], RANK)) for place in case[3]}
    hidden, pull = random(TOKENS, 1, INPUTS), random(TOKENS, 1, sum(case[2]))
    on_two_ranks(lambda rank: check(case, sequence_parallel, rank, whole, hidden, pull))
