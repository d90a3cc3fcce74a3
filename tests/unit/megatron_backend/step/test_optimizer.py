"""Adam's moments forgotten, states of other layouts fitted, and the learning rate's steps.

tests/multiprocess/ trains with it.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from slime_like.config.optimizer import OptimizerConfig
from slime_like.errors import CheckpointError
from slime_like.megatron_backend.step.optimizer import (
    build_scheduler,
    fit_optimizer_state,
    forget_moments,
    stepping_with,
)


def adam() -> torch.optim.AdamW:
    """Over one weight of 1, after two steps."""
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.0)
    for _ in range(2):
        weight.grad = torch.ones(1)
        optimizer.step()
    return optimizer


def test_moments_are_forgotten_and_weights_stay():
    optimizer = adam()
    (weight,) = optimizer.param_groups[0]["params"]
    before = weight.item()
    forget_moments(SimpleNamespace(optimizer=optimizer))
    state = optimizer.state[weight]
    assert weight.item() == before and all(state[name].item() == 0 for name in ("exp_avg", "exp_avg_sq", "step"))
    weight.grad = torch.tensor([4.0])
    optimizer.step()
    assert weight.item() == pytest.approx(before - 0.1)  # Adam's first step is the learning rate, whatever the gradient


def test_adam_takes_one_pass_on_the_host_also_with_a_loaded_state():
    """Torch's kernel of one pass against its loop, over a state that says nothing of kernels."""
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(33, 7)) for _ in range(2)]
    weights[1].data.copy_(weights[0].data)
    one_pass, plain = (torch.optim.AdamW([weight], lr=0.01, weight_decay=0.1) for weight in weights)
    built = SimpleNamespace(optimizer=one_pass, param_groups=one_pass.param_groups)
    for _ in range(20):
        one_pass.load_state_dict(one_pass.state_dict() | {"param_groups": plain.state_dict()["param_groups"]})
        built.param_groups = one_pass.param_groups
        weights[0].grad = torch.randn(33, 7)
        weights[1].grad = weights[0].grad.clone()
        with stepping_with(built, None):
            assert one_pass.param_groups[0]["fused"]
            one_pass.step()
        plain.step()
    assert not plain.param_groups[0]["fused"]
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-6, atol=1e-7)


def groups(*experts: bool) -> dict:
    return {"param_groups": [{"wd_mult": 1.0, "is_expert_parallel": expert} for expert in experts]}


def test_a_state_of_as_many_parts_is_taken_as_it_is():
    loaded = {"optimizer": groups(False)}
    assert fit_optimizer_state(loaded, SimpleNamespace(chained_optimizers=[0])) is loaded


def test_two_parts_become_one_with_the_settings_of_both():
    part = {"optimizer": groups(False), "param_state": "moments", "param_state_sharding_type": "s"}
    loaded = {0: part, 1: part | {"optimizer": groups(True)}, "param_state": "joined"}
    fitted = fit_optimizer_state(loaded, SimpleNamespace(chained_optimizers=[0]))
    assert fitted["param_state"] == "joined"
    assert [group["is_expert_parallel"] for group in fitted["optimizer"]["param_groups"]] == [True, False, False, True]


def test_a_state_that_cannot_be_fitted_is_refused():
    with pytest.raises(
        CheckpointError, match="another --expert-model-parallel-size and without --use-distributed-optimizer"
    ):
        fit_optimizer_state(
            {0: {"optimizer": groups(False)}, 1: {"optimizer": groups(True)}}, SimpleNamespace(chained_optimizers=[0])
        )


@pytest.mark.parametrize(
    ("flags", "rates"),
    [
        ({"lr_decay_style": "constant"}, [1.0, 1.0, 1.0, 1.0, 1.0]),
        ({"lr_decay_style": "linear"}, [1.0, 0.75, 0.5, 0.25, 0.0]),
        ({"lr_decay_style": "linear", "lr_decay_iters": 2}, [1.0, 0.5, 0.0, 0.0, 0.0]),
        ({"lr_decay_style": "constant", "lr_warmup_iters": 2}, [0.0, 0.5, 1.0, 1.0, 1.0]),
        ({"lr_decay_style": "constant", "lr_warmup_fraction": 0.5}, [0.0, 0.5, 1.0, 1.0, 1.0]),
    ],
)
def test_the_learning_rate_of_each_step(flags: dict, rates: list[float]):
    group = {"params": [], "lr": 0.0}
    scheduler = build_scheduler(
        SimpleNamespace(param_groups=[group]), OptimizerConfig(lr=1.0, min_lr=0.0, **flags), total_steps=4
    )
    learning_rates = []
    for _ in rates:
        learning_rates.append(scheduler.get_lr(group))
        scheduler.step(1)
    assert learning_rates == pytest.approx(rates)
