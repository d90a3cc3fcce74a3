"""A tenant's numbers: torch's AdamW step by step, passes that are kept or not, and to the host and back."""

import copy

import pytest
import torch

from slime_like.megatron_backend.lora.tenant_memory import TenantMemory, TenantParameter
from slime_like.megatron_backend.step.optimizer import AdamParams

HOST = torch.device("cpu")
STEPS = (
    AdamParams(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1),
    AdamParams(lr=3e-3, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.0),
)


def parameters(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in ((3, 4), (4,), (2, 3), (5,))
    ]


def memory_of(own, **options):
    entries = [TenantParameter(parameter=p, decays=p.dim() > 1, lr_ratio=2.0 if p.dim() == 1 else 1.0) for p in own]
    return TenantMemory(entries, HOST, **{"attached": True} | options)


def loss_of(own, scale=1.0):
    return sum((scale * (p.float() - 0.3) ** 3).sum() for p in own)


def add(memory, own, scale=1.0, keep=True):
    with memory.collecting():
        loss_of(own, scale).backward()
    (memory.keep if keep else memory.drop)()


def test_steps_are_torchs_adamw():
    own, theirs = parameters(), parameters()
    memory = memory_of(own)
    groups = [{"params": [p for p in theirs if p.dim() > 1]}, {"params": [p for p in theirs if p.dim() == 1]}]
    adam = torch.optim.AdamW(groups)
    for params in STEPS:
        add(memory, own)
        memory.step(params)
        adam.zero_grad()
        loss_of(theirs).backward()
        for group, ratio in zip(adam.param_groups, (1.0, 2.0), strict=True):
            decay = params.weight_decay if ratio == 1.0 else 0.0
            group.update(lr=params.lr * ratio, betas=params.betas, eps=params.eps, weight_decay=decay)
        adam.step()
        for mine, expected in zip(own, theirs, strict=True):
            torch.testing.assert_close(mine, expected, atol=1e-7, rtol=0)
            assert not mine.requires_grad and mine.grad is None
    assert memory.num_steps == 2 and memory.gradient is None


def test_only_passes_that_are_kept_count():
    own = parameters()
    memory = memory_of(own)
    add(memory, own)
    once = memory.gradient.clone()
    add(memory, own, scale=float("nan"), keep=False)
    add(memory, own, scale=0.5)
    torch.testing.assert_close(memory.gradient, 1.5 * once)
    with pytest.raises(ZeroDivisionError), memory.collecting():
        loss_of(own).backward()
        raise ZeroDivisionError
    torch.testing.assert_close(memory.gradient, 1.5 * once)
    memory.clear_gradient()
    before = memory.master.clone()
    memory.step(AdamParams(lr=0.1))  # without gradients
    assert torch.equal(memory.master, before)


def test_numbers_go_to_the_host_and_come_back():
    own = parameters()
    memory = memory_of(own)
    add(memory, own)
    memory.step(STEPS[0])
    add(memory, own)
    numbers = [x.clone() for x in (memory.master, memory.gradient, *memory.moments)]
    on_device = memory.master
    for _ in range(2):
        memory.leave()
        memory.leave()
        assert not memory.is_resident and memory.master is not on_device
        memory.come()
        assert memory.is_resident and own[0].data_ptr() in [view.data_ptr() for view in memory.views(memory.weights)]
        for now, then in zip((memory.master, memory.gradient, *memory.moments), numbers, strict=True):
            assert torch.equal(now, then)
    add(memory, own)
    torch.testing.assert_close(memory.gradient, 2 * numbers[1])


def test_bf16_weights_follow_fp32_ones():
    own = parameters(torch.bfloat16)
    memory = memory_of(own)
    start = memory.master.clone()
    for _ in range(20):  # each step is below bf16's resolution of most weights
        add(memory, own)
        memory.step(AdamParams(lr=1e-4))
    assert (memory.master - start).abs().max() > 1.5e-3
    assert torch.equal(memory.weights, memory.master.bfloat16()) and own[0].dtype == torch.bfloat16
    with memory.showing(memory.master):
        assert own[0].dtype == torch.float32
    assert own[0].dtype == torch.bfloat16


def test_a_models_parameters_hold_a_tenants_weights_when_they_are_put():
    own = parameters()
    start = copy.deepcopy(own)
    memory = memory_of(own, attached=False)
    add(memory, own)
    memory.step(STEPS[0])
    assert all(torch.equal(mine, before) for mine, before in zip(own, start, strict=True))
    memory.put()
    assert not any(torch.equal(mine, before) for mine, before in zip(own, start, strict=True))
