"""A model's next call is the one whose predecessors are done."""

from __future__ import annotations

import random

from slime_like.tinker.execution.entries import Entry
from slime_like.tinker.execution.ordering import ModelQueue
from slime_like.tinker.records import Call, Kind, ModelSpec


def queue(done_seq: int = 0) -> ModelQueue:
    spec = ModelSpec(model_id="m", tenant="ann", base_model="tiny", lora_rank=8)
    return ModelQueue(spec, "s1", done_seq=done_seq, snapshot_seq=0, snapshot=None)


def entry(seq: int) -> Entry:
    call = Call(kind=Kind.OPTIM_STEP, tenant="ann", session_id="s1", model_id="m", seq_id=seq)
    return Entry(request_id=f"r{seq}", call=call, tokens=1)


def test_any_order_of_arrival_gives_the_order_of_seq_id():
    for seed in range(200):
        source, model, order = random.Random(seed), queue(), []
        arrivals = list(range(1, 13))
        source.shuffle(arrivals)
        while len(order) < 12:
            head = model.next()
            if arrivals and (head is None or source.random() < 0.5):
                model.add(entry(arrivals.pop()))
            elif head is not None:
                order.append(head.seq_id)
                model.done(head.seq_id)
        assert order == list(range(1, 13)), seed


def test_what_was_executed_is_not_next_again_while_its_answer_is_written():
    model = queue()
    for seq in (1, 2):
        model.add(entry(seq))
    model.executed_seq = 1
    assert model.next().seq_id == 2 and model.missing() is None
    model.executed_seq = 2
    assert model.next() is None and model.missing() is None and model.done_seq == 0
    model.done(1)
    assert (model.done_seq, model.executed_seq) == (1, 2)


def test_a_gap_and_what_waits_behind_it():
    model = queue(done_seq=3)
    for seq in (8, 5, 6):
        model.add(entry(seq))
    assert model.next() is None and model.missing() == 4
    assert [waiting.seq_id for waiting in model.beyond_gap()] == [5, 6]
    assert queue().missing() is None and queue().beyond_gap() == []
