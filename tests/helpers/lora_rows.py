"""What a trainer with adapters says of a row (a set of adapters under a layout), and that PEFT says the same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file

from slime_like.records import BASE, REFERENCE
from tests.helpers.parity import gradients_as
from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.train_world import make_config, make_samples

DYNAMIC = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 40, "balance_data": True}
#: Of each optimizer step.
STEPS = (
    {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1},
    {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0},
)
ALL = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
ATTENTION, OUTPUT = [f"{x}_proj" for x in "qkvo"], ["q_proj", "lm_head"]
LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
#: adapters' name -> (family, PEFT's options, our flags)
ADAPTERS = {
    "qwen3": ("qwen3", ALL, {}),
    "some modules": (
        "qwen3",
        {"r": 3, "lora_alpha": 7, "use_rslora": True, "target_modules": ["q_proj", "v_proj", "up_proj", "o_proj"]},
        {"lora_use_rslora": True, "lora_target_modules": ["q_proj", "v_proj", "up_proj", "o_proj"]},
    ),
    "llama": ("llama", ALL, {}),
    "output": ("llama", ALL | {"target_modules": OUTPUT}, {"lora_target_modules": OUTPUT}),
    "glm4": ("glm4", ALL, {}),
    "qwen3_moe": ("qwen3_moe", ALL | {"target_modules": ATTENTION}, {"lora_target_modules": ATTENTION}),
    "experts": ("qwen3_moe", ALL | {"target_modules": ATTENTION, "experts": True}, {}),
    "deepseek_v3": ("deepseek_v3", ALL | {"target_modules": LATENT}, {"lora_target_modules": LATENT}),
}
#: Of gradients in units of the largest one: PEFT's own in float32 are up to 1.03e-5 from those in float64 (llama).
GRADIENT_BOUND, LOG_PROB_BOUND = 2e-5, 1e-5


def lora_flags(name, folders):
    _, options, flags = ADAPTERS[name]
    return {
        "lora_rank": options["r"],
        "lora_alpha": float(options["lora_alpha"]),
        "lora_load": folders["adapters of " + name],
        **flags,
    }


def worker_of(place, port, ranks, folders, name, parallel, **options):
    from slime_like.megatron_backend.worker import TrainWorker

    base = folders[ADAPTERS[name][0]]
    options = {"lora": lora_flags(name, folders), "optimizer": {"clip_grad": 0.0}, "batch": DYNAMIC} | options
    config = make_config(base, num_ranks=ranks, parallel=parallel, loss={"use_kl_loss": True}, **options)
    worker = TrainWorker(config, **(place | {"world_size": ranks, "master_port": port}))
    return worker, worker.start()


def whole_adapters(worker):
    from slime_like.megatron_backend.lora.peft_files import adapter_tensors

    return {name: tensor.float().cpu().numpy().copy() for name, tensor in adapter_tensors(worker.stage).items()}


def one_row(worker, samples, folder):
    """What this rank says of a row."""
    from slime_like.megatron_backend.lora.peft_files import save_adapters
    from slime_like.megatron_backend.step.loss_spec import LossSpec
    from slime_like.megatron_backend.step.optimizer import AdamParams

    result = {
        name: worker.forward(samples, weights=weights).rows("log_probs")
        for name, weights in (("log_probs", BASE), ("bare", REFERENCE))
    }
    result["merged"] = {name: tensor.float().cpu().numpy().copy() for name, tensor in worker.export(BASE)}
    with worker.using(REFERENCE):
        result["exported base"] = {
            name: tensor.float().cpu().numpy().copy() for name, tensor in worker.export(REFERENCE)
        }
    loss = LossSpec(name="cross_entropy")
    for number, params in enumerate(STEPS):
        worker.forward_backward(samples, loss, weights=BASE)
        if not number:
            result["gradients"] = gradients_as(worker, lambda: whole_adapters(worker))
            worker._clear_gradients()
            worker.forward_backward(samples, loss, weights=BASE)
        report = worker.optim_step(AdamParams(**params), weights=BASE)
        if not number:
            result["grad_norm"] = report["train/grad_norm"]
    result["stepped"] = whole_adapters(worker)
    result["after"] = worker.forward(samples, weights=BASE).rows("log_probs")
    result["bare after"] = worker.forward(samples, weights=REFERENCE).rows("log_probs")
    if worker.rank == 0:
        import os

        os.makedirs(folder)
    torch.distributed.barrier()
    config = worker.config
    save_adapters(worker.stage, folder, lora=config.lora, model=config.model, base=config.checkpoint.hf_checkpoint)
    trained = [p for chunk in worker.model for p in chunk.parameters() if p.requires_grad]
    buffers = [buffer for chunk in worker.model for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]]
    result["named"] = [
        (name, tuple(p.shape)) for part in worker.stage for name, p in part.named_parameters() if p.requires_grad
    ]
    result |= {"config": worker.config, "rank": worker.rank}
    result["bytes"] = worker._card.held_bytes()
    # counters and tables, which are not the plan's subject here; several may share their memory
    memory = {b.untyped_storage().data_ptr(): b.untyped_storage().nbytes() for b in worker.stage.buffers()}
    result["bytes"]["weights"] -= sum(memory.values())
    result["sizes"] = {
        "trained": sum(p.numel() for p in trained),
        "gradients": sum(parameter.numel() for buffer in buffers for parameter in buffer.params),
        "moments": sum(
            state["exp_avg"].numel()
            for part in worker.optimizer.chained_optimizers
            for state in part.optimizer.state.values()
        ),
    }
    return result


class Truths(dict):
    """What PEFT says of each set of adapters, once somebody asks."""

    def __init__(self, folders):
        super().__init__()
        self._folders = folders

    def __missing__(self, name):
        from tests.helpers.peft_truth import peft_truth  # not where a trainer's rank imports this

        folders, family = self._folders, ADAPTERS[name][0]
        self[name] = peft_truth(folders[family], folders["adapters of " + name], make_samples(8))
        return self[name]


def largest(arrays):
    return max(float(np.abs(array).max()) for array in arrays)


def check_log_probs(ranks: Sequence[Mapping], truth) -> None:
    """With adapters and without, before steps and after."""
    assert largest([a - b for a, b in zip(truth.log_probs, truth.bare, strict=True)]) > 0.1
    for of_rank in ranks:
        for ours, theirs in (("log_probs", truth.log_probs), ("bare", truth.bare), ("bare after", truth.bare)):
            for mine, expected in zip(of_rank[ours], theirs, strict=True):
                np.testing.assert_allclose(mine[1:], expected, atol=LOG_PROB_BOUND, rtol=0, err_msg=ours)


def check_gradients(ranks: Sequence[Mapping], truth) -> None:
    """Every one, and their norm."""
    seen, most = set(), largest(truth.gradients.values())
    norm = np.sqrt(sum((gradient**2).sum() for gradient in truth.gradients.values()))
    for of_rank in ranks:
        for name, gradient in of_rank["gradients"].items():
            expected = truth.gradients[name]
            np.testing.assert_allclose(gradient, expected, atol=GRADIENT_BOUND * most, rtol=0, err_msg=name)
        seen |= set(of_rank["gradients"])
        assert abs(of_rank["grad_norm"] - norm) <= 1e-5 * norm
    assert seen == set(truth.gradients)


def check_steps(ranks: Sequence[Mapping], truth) -> None:
    """Adapters after STEPS: Adam's first steps are of the size of the learning rate wherever a gradient is not exactly
    zero.
    """
    for of_rank in ranks:
        for name, matrix in of_rank["stepped"].items():
            clear = np.abs(truth.gradients[name]) > 1e-3 * np.abs(truth.gradients[name]).max()
            assert clear.mean() > 0.9
            np.testing.assert_allclose(matrix[clear], truth.stepped[name][clear], atol=1e-4, rtol=0, err_msg=name)


def check_merged(ranks: Sequence[Mapping], truth, base_folder: str) -> None:
    """Merged weights are PEFT's, and the base is what it was."""
    base, seen = load_file(f"{base_folder}/model.safetensors"), set()
    for of_rank in ranks:
        for name, tensor in of_rank["merged"].items():
            seen.add(name)
            np.testing.assert_array_equal(of_rank["exported base"][name], base[name], err_msg=name)
            np.testing.assert_allclose(tensor, truth.merged[name], atol=1e-6, rtol=0, err_msg=name)
    assert seen == set(base)


def check_saved(of_rank: Mapping, base_folder: str, folder: str) -> None:
    """PEFT loads what was saved after STEPS, and says the same."""
    from tests.helpers.peft_truth import load_peft, log_probs_of

    with torch.no_grad():
        theirs = log_probs_of(load_peft(base_folder, folder), make_samples(8))
    for mine, expected in zip(of_rank["after"], theirs, strict=True):
        np.testing.assert_allclose(mine[1:], expected.numpy(), atol=LOG_PROB_BOUND, rtol=0)


def adapter_folders(root: Path, names: Iterable[str]) -> dict[str, str]:
    """Folders of the families' models, by their names, and of these sets of adapters ("adapters of …")."""
    from tests.helpers.peft_truth import make_peft_folder

    paths = {}
    for name in names:
        family, options, _ = ADAPTERS[name]
        if family not in paths:
            paths[family] = make_tiny_model(str(root / family), family, num_layers=4 if family == "llama" else 2)
        folder = str(root / f"adapters of {name}")
        paths["adapters of " + name] = make_peft_folder(paths[family], folder, **options)
    return paths
