"""Memory that is given up and comes back to the last bit, under the same tensors. Several ranks with Megatron's own
buffers and optimizer: tests/multiprocess/test_offload.py.
"""

from __future__ import annotations

import types

import pytest
import torch

from slime_like.megatron_backend.card_memory import CardMemory, give_back_cached

HOST = torch.device("cpu")


class State:
    """A model, a gradient buffer and Adam, put together as Megatron does: parameters are views of one buffer, and the
    optimizer steps on fp32 copies of them.
    """

    def __init__(self):
        self.stage = torch.nn.Linear(3, 2, bias=False, dtype=torch.bfloat16)
        self.stage.register_buffer("counts", torch.arange(4))
        self.params = torch.arange(6, dtype=torch.bfloat16)
        self.stage.weight.data = self.params.view(2, 3)
        self.grads = torch.zeros(6)
        buffer = types.SimpleNamespace(param_data=self.params, grad_data=self.grads)
        chunk = types.SimpleNamespace(buffers=[buffer], expert_parallel_buffers=[])
        self.main = torch.nn.Parameter(self.params.float())
        self.adam = torch.optim.AdamW([self.main], lr=0.1)
        self.main.grad = torch.linspace(-1, 1, 6)
        self.adam.step()
        self.main.grad = None
        optimizer = types.SimpleNamespace(chained_optimizers=[types.SimpleNamespace(optimizer=self.adam)])
        self.given_back: list[torch.device] = []
        self.chunk, self.optimizer = chunk, optimizer

    def card(self, *, offloads: bool = True, give_back=None) -> CardMemory:
        card = CardMemory(self.stage, [self.chunk], offloads=offloads, give_back=give_back or self.given_back.append)
        card.add_optimizer(self.optimizer)
        return card

    def tensors(self) -> list[torch.Tensor]:
        moments = self.adam.state[self.main]
        return [self.params, self.stage.weight, self.stage.counts, self.grads, self.main.data, moments["exp_avg"]]


def test_everything_goes_and_comes_back_under_the_same_tensors():
    state = State()
    card, before = state.card(), [tensor.detach().clone() for tensor in state.tensors()]
    # weights 6 x 2 and the counts 4 x 8; gradients 6 x 4; main weights and moments 3 x 6 x 4, Adam's count 4
    assert card.held_bytes() == {"weights": 44, "gradients": 24, "optimizer": 76}
    card.release()
    assert card.held_bytes() == {"weights": 0, "gradients": 0, "optimizer": 0}
    card.need("weights", "gradients", "optimizer")
    assert card.held_bytes() == {"weights": 44, "gradients": 24, "optimizer": 76}
    assert all(torch.equal(now, then) for now, then in zip(state.tensors(), before, strict=True))
    state.params[0] = 100  # still one memory
    assert state.stage.weight[0, 0] == 100 and card.held_bytes()["weights"] == 44


def test_a_part_comes_back_when_it_is_needed_and_another_time_costs_nothing():
    state = State()
    card = state.card()
    card.release(keep=("weights",))
    assert card.held_bytes() == {"weights": 44, "gradients": 0, "optimizer": 0}
    card.release()
    card.need("weights")
    card.need("weights")
    assert card.held_bytes() == {"weights": 44, "gradients": 0, "optimizer": 0}
    assert state.stage.weight.flatten().tolist() == [0, 1, 2, 3, 4, 5]


def test_what_changed_in_between_is_what_comes_back():
    """The host's memory is used again; a copy of before must not be taken for one of now."""
    state = State()
    card = state.card()
    for value in (1.0, 2.0, 0.0):
        state.params.fill_(value)
        state.grads.fill_(value + 1)  # gradients that were added up, and no step yet
        card.release()
        card.need("weights", "gradients")
        assert state.stage.weight.tolist() == [[value] * 3] * 2 and state.grads.tolist() == [value + 1] * 6


def test_a_moment_that_was_replaced_is_found():
    """Loading a checkpoint gives Adam other tensors."""
    state = State()
    card = state.card()
    card.release()
    card.need("optimizer")
    state.adam.state[state.main]["exp_avg"] = torch.full((6,), 3.0)
    card.release()
    assert card.held_bytes()["optimizer"] == 0
    card.need("optimizer")
    assert state.adam.state[state.main]["exp_avg"].tolist() == [3.0] * 6


def test_without_offload_only_the_cache_is_given_back():
    state = State()
    card = state.card(offloads=False)
    card.release()
    assert card.held_bytes()["weights"] == 44 and state.given_back == [HOST]
    card.need("weights")


def test_the_cache_is_given_back_after_the_state(monkeypatch: pytest.MonkeyPatch):
    held = []
    state = State()
    card = state.card(give_back=lambda device: held.append(card.held_bytes()))
    card.release(keep=("optimizer",))
    assert held == [{"weights": 0, "gradients": 0, "optimizer": 76}]
    calls: list[str] = []
    for name in ("ipc_collect", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: calls.append(name))
    give_back_cached(HOST)
    assert calls == []
    give_back_cached(torch.device("cuda"))
    assert calls == ["ipc_collect", "empty_cache"]
