"""A critic's adapters and head against PEFT on the HF model in float64: values, loss, every gradient; its checkpoints
under another layout, and its bytes in the plan.
"""

import dataclasses

import numpy as np
import pytest
import torch

from slime_like.config.parallel import ParallelConfig
from slime_like.planning.memory.adapters import adapter_chunks
from slime_like.planning.memory.parameters import Variant, stage_chunks
from slime_like.planning.memory.trainer_bytes import Precision, StageBytes
from tests.helpers.lora_rows import ADAPTERS, adapter_folders, lora_flags, whole_adapters
from tests.helpers.parity import gradients_as
from tests.helpers.train_world import free_ports, make_config, recipe_of, run_ranks
from tests.multiprocess.test_critic import (
    CLIP,
    DYNAMIC,
    LOSS,
    advantages_of,
    head_weight,
    rollout,
    trained,
    with_values,
    worker_of,
)

pytestmark = pytest.mark.multiprocess

SEQUENCE = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PIPELINE = {"pipeline_model_parallel_size": 2}
CASES = {"one rank": (1, {}), "tp2 sp": (2, SEQUENCE), "pp2": (2, PIPELINE), "dp2": (2, {})}
MARKED = [name if name == "tp2 sp" else pytest.param(name, marks=pytest.mark.long_run) for name in CASES]
#: The policy's adapters, of which a critic has all but the output layer's.
NAME = "output"


def critic_of(place, port, ranks, folders, parallel, **groups):
    groups = {"batch": DYNAMIC, "loss": LOSS, "optimizer": {"clip_grad": 0.0, "critic_lr": 3e-3}} | groups
    config = make_config(
        folders[ADAPTERS[NAME][0]], num_ranks=ranks, parallel=parallel, lora=lora_flags(NAME, folders), **groups
    )
    return worker_of(place, port, ranks, dataclasses.replace(config, role="critic"))


def heads_of(worker):
    return [chunk.output_layer for chunk in worker.stage if hasattr(chunk, "output_layer")]


def one_case(worker, samples, saves):
    """What this rank says of a critic that starts with the policy's adapters."""
    from slime_like.megatron_backend.step.critic import with_value_targets
    from slime_like.megatron_backend.step.loss_spec import LossSpec
    from slime_like.records import BASE

    for head in heads_of(worker):
        head.weight.data.copy_(head_weight(head.weight.size(1)))
    base = {name: p.detach().clone() for c in worker.stage for name, p in c.named_parameters() if not p.requires_grad}
    result = {"values": recipe_of(worker).values(samples)}
    brought = with_values(samples, result["values"])
    parts = [brought]
    batches = with_value_targets(parts, [worker.prepare(part) for part in parts], worker.config.loss)
    worker.forward_backward(batches[0], LossSpec(), weights=BASE)
    result["gradients"] = gradients_as(worker, lambda: whole_adapters(worker))
    worker._clear_gradients()
    result["report"] = recipe_of(worker).train(0, brought).metrics
    result["stepped"] = whole_adapters(worker)
    result["head"] = [head.weight.detach().numpy().copy() for head in heads_of(worker)]
    result["after"] = recipe_of(worker).values(samples)
    result["path"] = recipe_of(worker).save(1, {})
    stays = {name: p for c in worker.stage for name, p in c.named_parameters() if name in base}
    result["base stays"] = all(torch.equal(stays[name], tensor) for name, tensor in base.items())
    result["bytes"] = worker._card.held_bytes()
    memory = {b.untyped_storage().data_ptr(): b.untyped_storage().nbytes() for b in worker.stage.buffers()}
    result["bytes"]["weights"] -= sum(memory.values())
    return result | {"config": worker.config, "rank": worker.rank}


def in_world(place, cases, folders, ports, saves):
    results, samples, ports = {}, rollout(), list(ports)
    for name in cases:
        (ranks, parallel), port, again = CASES[name], ports.pop(0), ports.pop(0)
        if place["rank"] < ranks:
            checkpoint = {"checkpoint": {"save": f"{saves}/{name}"}}
            worker, _ = critic_of(place, port, ranks, folders, parallel, **checkpoint)
            results[name] = one_case(worker, samples, saves)
            worker.close()
        torch.distributed.is_initialized() and torch.distributed.destroy_process_group()
        # goes on where it was, on two ranks with a stage each
        worker, start = critic_of(place, again, 2, folders, PIPELINE, checkpoint={"load": f"{saves}/{name}"})
        resumed = {"start": start["num_rollouts_done"], "resumed": recipe_of(worker).values(samples)}
        results[name] = results.get(name, {}) | resumed
        worker.close()
    from slime_like.errors import CheckpointError
    from slime_like.megatron_backend.initialize import shut_down

    try:
        critic_of(place, ports.pop(0), 2, folders, PIPELINE, checkpoint={"critic_load": f"{saves}/{cases[0]}/critic"})
    except CheckpointError as error:
        results["refused"] = str(error)
    shut_down()
    return results


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return adapter_folders(tmp_path_factory.mktemp("models"), [NAME])


@pytest.fixture(scope="module")
def outcomes(request, folders, tmp_path_factory):
    items = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    cases = [name for name in CASES if any(item is not None and item.params.get("name") == name for item in items)]
    saves = str(tmp_path_factory.mktemp("saves"))
    return run_ranks(in_world, 2, cases, folders, free_ports(2 * len(cases) + 1), saves, timeout_s=150)


@pytest.fixture(scope="module")
def truth(folders):
    """By PEFT and autograd: values, the value loss, its gradients by PEFT's names and the head's."""
    from tests.helpers.peft_truth import adapters_of, load_peft

    model = load_peft(folders[ADAPTERS[NAME][0]], folders["adapters of " + NAME])
    backbone = model.base_model.model.model
    head, samples = head_weight(model.config.hidden_size).double().requires_grad_(), rollout()
    rows = []
    for sample in samples:
        hidden = backbone(torch.as_tensor(sample.tokens.astype(np.int64))[None]).last_hidden_state[0]
        rows.append(torch.cat([torch.zeros(1), (hidden[:-1] @ head.T).squeeze(-1)]))
    loss = 0.0
    for sample, row in zip(with_values(samples, [row.detach().numpy() for row in rows]), rows, strict=True):
        at = trained(sample)
        if len(at):
            old = torch.as_tensor(sample.values[at]).double()
            returns = torch.as_tensor(advantages_of(sample)) + old
            bounded = torch.min(torch.max(row[at], old - CLIP), old + CLIP)
            loss = loss + 0.5 * torch.max((row[at] - returns) ** 2, (bounded - returns) ** 2).mean() / len(samples)
    loss.backward()
    gradients = {name: p.grad.numpy() for name, p in adapters_of(model).items() if p.grad is not None}
    return {"values": [row.detach().numpy() for row in rows], "loss": loss.item(), "gradients": gradients, "head": head}


each_case = pytest.mark.parametrize("name", MARKED)


@each_case
def test_values_loss_and_every_gradient_are_pefts(outcomes, truth, name):
    most, seen = max(np.abs(g).max() for g in truth["gradients"].values()), set()
    for result in (of_rank[name] for of_rank in outcomes[: CASES[name][0]]):
        for ours, theirs in zip(result["values"], truth["values"], strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=0)
        assert result["report"]["train/value_loss"] == pytest.approx(truth["loss"], rel=1e-5)
        for key, gradient in result["gradients"].items():
            np.testing.assert_allclose(gradient, truth["gradients"][key], atol=2e-5 * most, rtol=0, err_msg=key)
        seen |= set(result["gradients"])
        squares = sum((g**2).sum() for g in [*truth["gradients"].values(), truth["head"].grad.numpy()])
        assert result["report"]["train/critic_grad_norm"] == pytest.approx(np.sqrt(squares), rel=1e-5)
    assert seen == set(truth["gradients"]) and not any("lm_head" in key for key in seen)


@each_case
def test_adapters_and_head_learn_and_the_base_stays(outcomes, truth, name):
    heads = [head for of_rank in outcomes[: CASES[name][0]] for head in of_rank[name]["head"]]
    assert heads and all(result[name]["base stays"] for result in outcomes[: CASES[name][0]])
    gradient, start = truth["head"].grad.numpy(), truth["head"].detach().numpy()
    clear = np.abs(gradient) > 1e-3 * np.abs(gradient).max()
    for head in heads:  # Adam's first step
        np.testing.assert_allclose(head[clear], (start - 3e-3 * np.sign(gradient))[clear], atol=1e-5, rtol=0)
    moved = max(
        np.abs(a - b).max() for a, b in zip(outcomes[0][name]["after"], outcomes[0][name]["values"], strict=True)
    )
    assert moved > 1e-3


@each_case
def test_a_critic_with_adapters_goes_on_under_another_layout(outcomes, name):
    assert outcomes[0][name]["path"].endswith("critic/iter_0000001")
    for of_rank in outcomes:
        assert of_rank[name]["start"] == 1
        for ours, theirs in zip(of_rank[name]["resumed"], outcomes[0][name]["after"], strict=True):
            np.testing.assert_allclose(ours, theirs, atol=5e-5, rtol=0)  # values up to 3, summed in another order


@each_case
def test_a_checkpoint_of_adapters_is_no_base(outcomes, name):
    assert all("not a model" in of_rank["refused"] for of_rank in outcomes)


@each_case
def test_the_plan_knows_its_bytes(outcomes, name):
    ranks, flags = CASES[name]
    for result in (of_rank[name] for of_rank in outcomes[:ranks]):
        config, parallel = result["config"], ParallelConfig(**flags)
        per_stage = ranks // parallel.pipeline_model_parallel_size
        stage, within = divmod(result["rank"], per_stage)
        chunks = adapter_chunks(config.model, parallel, stage, config.adapters, value_head=True)
        names = {p.name for chunk in chunks for p in chunk}
        whole = stage_chunks(config.model, parallel, stage, Variant(value_head=True))
        sizes = StageBytes(
            chunks, parallel, Precision.of(config.optimizer),
            dp_size=per_stage // parallel.tensor_model_parallel_size, expert_dp_size=1,
            frozen_elements=sum(p.numel for chunk in whole for p in chunk if p.name not in names),
        )  # fmt: skip
        held = sizes.of(within // parallel.tensor_model_parallel_size, 0)
        assert (result["bytes"]["weights"], result["bytes"]["gradients"]) == (held.weights, held.gradients)
        assert 0 <= result["bytes"]["optimizer"] - held.optimizer <= 4 * len(names)
