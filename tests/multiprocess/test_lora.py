"""Adapters against PEFT on the HF model in float64: log-probs, every gradient, two optimizer steps, merged weights and
folders, for each family and layout; and checkpoints of adapters under another layout.
"""

# Covers slime_like.megatron_backend.lora.build and slime_like.megatron_backend.lora.state too.

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from slime_like.config.parallel import ParallelConfig
from slime_like.planning.memory.adapters import adapter_chunks
from slime_like.planning.memory.parameters import stage_chunks
from slime_like.planning.memory.trainer_bytes import Precision, StageBytes
from slime_like.records import BASE, REFERENCE
from tests.helpers.parity import gradients_as
from tests.helpers.peft_truth import STEPS, load_peft, log_probs_of, make_peft_folder, peft_truth
from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.train_world import free_ports, make_config, make_samples, recipe_of, run_ranks

pytestmark = pytest.mark.multiprocess

DYNAMIC = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 40, "balance_data": True}
SEQUENCE = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
#: name -> (ranks, --… of the parallel group)
LAYOUTS = {
    "one rank": (1, {}),
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "tp2 with sequence parallelism": (2, SEQUENCE),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "dp2, reduced early": (2, {"overlap_grad_reduce": True}),
    "cp2": (2, {"context_parallel_size": 2}),
    "recomputed": (1, RECOMPUTED),
    "dp2, gathered late": (2, {"overlap_grad_reduce": True, "overlap_param_gather": True}),
    "interleaved pp2": (2, {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2}),
    "ep2": (2, {"expert_model_parallel_size": 2}),
    "ep2 and tp2": (2, SEQUENCE | {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}),
}
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
ROWS = [("qwen3", layout) for layout in LAYOUTS if layout != "interleaved pp2" and "ep2" not in layout]
ROWS += [("some modules", "tp2 with sequence parallelism"), ("llama", "interleaved pp2"), ("glm4", "tp2")]
ROWS += [(name, layout) for name in ("qwen3_moe", "experts") for layout in ("ep2", "ep2 and tp2")]
ROWS += [("output", layout) for layout in ("tp2 with sequence parallelism", "pp2")]
ROWS += [("experts", layout) for layout in ("one rank", "tp2 with sequence parallelism", "pp2")]
ROWS += [(name, layout) for name in ("qwen3_moe", "deepseek_v3") for layout in ("tp2 with sequence parallelism", "pp2")]
#: In every run; the others with scripts/test_long.sh.
QUICK = [("qwen3", "tp2 with sequence parallelism"), ("qwen3", "dp2, reduced early"), ("glm4", "tp2")]
MARKED = [row if row in QUICK else pytest.param(row, marks=pytest.mark.long_run) for row in ROWS]
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

    return {name: tensor.float().numpy().copy() for name, tensor in adapter_tensors(worker.stage).items()}


def one_row(worker, samples, folder):
    """What this rank says of a row."""
    from slime_like.megatron_backend.lora.peft_files import save_adapters
    from slime_like.megatron_backend.step.loss_spec import LossSpec
    from slime_like.megatron_backend.step.optimizer import AdamParams

    result = {
        name: worker.forward(samples, weights=weights).rows("log_probs")
        for name, weights in (("log_probs", BASE), ("bare", REFERENCE))
    }
    result["merged"] = {name: tensor.float().numpy().copy() for name, tensor in worker.export(BASE)}
    with worker.using(REFERENCE):
        result["exported base"] = {name: tensor.float().numpy().copy() for name, tensor in worker.export(REFERENCE)}
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


def in_world(place, rows, folders, ports, saves):
    results, samples = {}, make_samples(8)
    for (name, layout), port in zip(rows, ports, strict=True):
        ranks, parallel = LAYOUTS[layout]
        if place["rank"] >= ranks:
            continue
        worker, _ = worker_of(place, port, ranks, folders, name, parallel)
        try:
            results[name, layout] = one_row(worker, samples, f"{saves}/{name} {layout}")
        except Exception as error:
            raise RuntimeError(f"{name}, {layout}: {error}") from error
        worker.close()
    return results


#: A run of one rank goes on under these: adapters -> layout.
RESUMED = {
    "glm4": "tp2 with sequence parallelism",
    "qwen3": "pp2",
    "experts": "ep2 and tp2",
    "output": "tp2 with sequence parallelism",
}
EACH_RESUMED = ["glm4", *(pytest.param(name, marks=pytest.mark.long_run) for name in ("qwen3", "experts", "output"))]


def resumed(place, names, folders, ports, saves):
    """Adapters after two steps of one rank, and after a save between them under another layout; and what starts."""
    results, samples, ports = {}, make_samples(8), list(ports)
    for name in names:
        layout = RESUMED[name]
        save, options = f"{saves}/run of {name}", {"optimizer": {"weight_decay": 0.1, "lr": 1e-2}}
        own_port, port, fresh_port = (ports.pop(0) for _ in range(3))
        plus = {"lora": lora_flags(name, folders) | {"lora_plus_lr_ratio": 4.0}}
        if place["rank"] == 0:
            worker, _ = worker_of(place, own_port, 1, folders, name, {}, **options, **plus)
            recipe_of(worker).train(0, samples)
            worker.save_state(save, weights=BASE, num_rollouts_done=1, client_state={"seen": 1})
            recipe_of(worker).train(1, samples)
            results[name, "whole"] = whole_adapters(worker)
            results[name, "rates"] = sorted(group["lr"] for group in worker.optimizer.param_groups)
            worker.close()
        worker, start = worker_of(
            place, port, *LAYOUTS[layout][:1], folders, name, LAYOUTS[layout][1], checkpoint={"load": save}, **options,
            **plus,
        )  # fmt: skip
        results[name, "start"] = {key: start[key] for key in ("num_rollouts_done", "client_state")}
        recipe_of(worker).train(1, samples)
        results[name, "resumed"] = whole_adapters(worker)
        worker.close()
        drawn = {"lora": {"lora_rank": 4, "lora_init": "false"}}
        if place["rank"] == 0:
            worker, _ = worker_of(place, own_port, 1, folders, name, {}, **drawn)
            results[name, "drawn"] = whole_adapters(worker)
            worker.close()
        worker, _ = worker_of(place, fresh_port, 2, folders, name, LAYOUTS[layout][1], **drawn)
        results[name, "drawn elsewhere"] = whole_adapters(worker)
        worker.close()
    return results


@pytest.fixture(scope="module")
def continued(request, folders, saves):
    items = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    names = [name for name in RESUMED if any(item is not None and item.params.get("name") == name for item in items)]
    return run_ranks(resumed, 2, names, folders, free_ports(3 * len(names)), saves, timeout_s=120)


@pytest.mark.parametrize("name", EACH_RESUMED)
def test_a_run_goes_on_under_another_layout(continued, folders, saves, name):
    seen = set()
    for of_rank in continued:
        assert of_rank[name, "start"] == {"num_rollouts_done": 1, "client_state": {"seen": 1}}
        for key, matrix in of_rank[name, "resumed"].items():
            np.testing.assert_allclose(matrix, continued[0][name, "whole"][key], atol=1e-5, rtol=0, err_msg=key)
        seen |= set(of_rank[name, "resumed"])
    assert seen == set(continued[0][name, "whole"])
    first = folders["adapters of " + name], f"{saves}/run of {name}/iter_0000001"
    before, after = (load_file(folder + "/adapter_model.safetensors") for folder in first)
    assert 0.005 < largest([after[key] - before[key] for key in before if "lora_A" in key]) < 0.02  # a step of 1e-2
    assert 0.02 < largest([after[key] - before[key] for key in before if "lora_B" in key]) < 0.06  # of four times that
    assert continued[0][name, "rates"] == pytest.approx([1e-2, 4e-2])
    load_peft(folders[ADAPTERS[name][0]], first[1])  # a checkpoint is a PEFT folder


@pytest.mark.parametrize("name", EACH_RESUMED)
def test_adapters_start_alike_under_every_layout(continued, name):
    drawn = continued[0][name, "drawn"]
    for of_rank in continued:
        for key, matrix in of_rank[name, "drawn elsewhere"].items():
            np.testing.assert_array_equal(matrix, drawn[key], err_msg=key)
    reach = {key: np.abs(matrix).max() * np.sqrt(matrix.shape[1]) for key, matrix in drawn.items()}
    assert all(0.8 < value <= 1.0 for value in reach.values()), reach  # torch.nn.Linear's uniform numbers
    assert len({matrix.flat[0] for matrix in drawn.values()}) == len(drawn)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    families = {family for family, _, _ in ADAPTERS.values()}
    paths = {
        family: make_tiny_model(str(root / family), family, num_layers=4 if family == "llama" else 2)
        for family in families
    }
    for name, (family, options, _) in ADAPTERS.items():
        folder = str(root / f"adapters of {name}")
        paths["adapters of " + name] = make_peft_folder(paths[family], folder, **options)
    return paths


@pytest.fixture(scope="module")
def saves(tmp_path_factory):
    return str(tmp_path_factory.mktemp("saves"))


@pytest.fixture(scope="module")
def outcomes(request, folders, saves):
    """What each rank says of the rows that selected tests need."""
    items = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    wanted = [row for row in ROWS if any(item is not None and item.params.get("row") == row for item in items)]
    return run_ranks(in_world, 2, wanted, folders, free_ports(len(wanted)), saves, timeout_s=200)


@pytest.fixture(scope="module")
def truths(folders):
    return _Truths(folders)


class _Truths(dict):
    """What PEFT says of each set of adapters, once somebody asks."""

    def __init__(self, folders):
        super().__init__()
        self._folders = folders

    def __missing__(self, name):
        folders, family = self._folders, ADAPTERS[name][0]
        self[name] = peft_truth(folders[family], folders["adapters of " + name], make_samples(8))
        return self[name]


def largest(arrays):
    return max(float(np.abs(array).max()) for array in arrays)


def planned(row, of_rank):
    """(adapters, bytes) that the plan says this rank has."""
    (ranks, flags), model = LAYOUTS[row[1]], of_rank["config"].model
    parallel = ParallelConfig(**flags)
    stage, within = divmod(of_rank["rank"], ranks // parallel.pipeline_model_parallel_size)
    chunks = adapter_chunks(model, parallel, stage, of_rank["config"].lora)
    frozen = sum(parameter.numel for chunk in stage_chunks(model, parallel, stage) for parameter in chunk)
    # As without experts where there are none: their sizes default to the others'.
    width = parallel.expert_tp_size * parallel.expert_model_parallel_size
    copies = ranks // parallel.pipeline_model_parallel_size // parallel.tensor_model_parallel_size
    sizes = StageBytes(
        chunks,
        parallel,
        Precision.of(of_rank["config"].optimizer),
        dp_size=copies,
        expert_dp_size=ranks // parallel.pipeline_model_parallel_size // width,
        frozen_elements=frozen,
    )
    rank = within // parallel.tensor_model_parallel_size
    return [(p.name, p.shape) for chunk in chunks for p in chunk], sizes.of(rank, within // width)


each_row = pytest.mark.parametrize("row", MARKED, ids=lambda row: ": ".join(row))


@each_row
def test_log_probs_with_and_without_adapters_are_pefts(outcomes, truths, row):
    truth = truths[row[0]]
    assert largest([a - b for a, b in zip(truth.log_probs, truth.bare, strict=True)]) > 0.1
    for of_rank in outcomes[: LAYOUTS[row[1]][0]]:
        for ours, theirs in (("log_probs", truth.log_probs), ("bare", truth.bare), ("bare after", truth.bare)):
            for mine, expected in zip(of_rank[row][ours], theirs, strict=True):
                np.testing.assert_allclose(mine[1:], expected, atol=LOG_PROB_BOUND, rtol=0, err_msg=ours)


@each_row
def test_every_gradient_is_pefts(outcomes, truths, row):
    truth, seen = truths[row[0]], set()
    most = largest(truth.gradients.values())
    norm = np.sqrt(sum((gradient**2).sum() for gradient in truth.gradients.values()))
    for of_rank in outcomes[: LAYOUTS[row[1]][0]]:
        for name, gradient in of_rank[row]["gradients"].items():
            expected = truth.gradients[name]
            np.testing.assert_allclose(gradient, expected, atol=GRADIENT_BOUND * most, rtol=0, err_msg=name)
        seen |= set(of_rank[row]["gradients"])
        assert of_rank[row]["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert seen == set(truth.gradients)


@each_row
def test_two_steps_lead_where_torchs_adamw_leads(outcomes, truths, row):
    """Adam's first steps are of the size of the learning rate wherever a gradient is not exactly zero."""
    truth = truths[row[0]]
    for of_rank in outcomes[: LAYOUTS[row[1]][0]]:
        for name, matrix in of_rank[row]["stepped"].items():
            clear = np.abs(truth.gradients[name]) > 1e-3 * np.abs(truth.gradients[name]).max()
            assert clear.mean() > 0.9
            np.testing.assert_allclose(matrix[clear], truth.stepped[name][clear], atol=1e-4, rtol=0, err_msg=name)


@each_row
def test_merged_weights_are_pefts_and_the_base_stays(outcomes, truths, folders, row):
    base = load_file(f"{folders[ADAPTERS[row[0]][0]]}/model.safetensors")
    truth, seen = truths[row[0]], set()
    for of_rank in outcomes[: LAYOUTS[row[1]][0]]:
        for name, tensor in of_rank[row]["merged"].items():
            seen.add(name)
            np.testing.assert_array_equal(of_rank[row]["exported base"][name], base[name], err_msg=name)
            np.testing.assert_allclose(tensor, truth.merged[name], atol=1e-6, rtol=0, err_msg=name)
    assert seen == set(base)


@each_row
def test_peft_loads_what_was_saved(outcomes, folders, saves, row):
    samples, (name, layout) = make_samples(8), row
    with torch.no_grad():
        theirs = log_probs_of(load_peft(folders[ADAPTERS[name][0]], f"{saves}/{name} {layout}"), samples)
    for mine, expected in zip(outcomes[0][row]["after"], theirs, strict=True):
        np.testing.assert_allclose(mine[1:], expected.numpy(), atol=LOG_PROB_BOUND, rtol=0)


@each_row
def test_only_adapters_have_gradients_and_moments(outcomes, truths, row):
    ranks, parallel = LAYOUTS[row[1]]
    whole = sum(gradient.size for gradient in truths[row[0]].gradients.values())
    sizes = [of_rank[row]["sizes"] for of_rank in outcomes[:ranks]]
    for size in sizes:
        assert size["trained"] == size["gradients"]
    split = {"tensor_model_parallel_size", "pipeline_model_parallel_size"}
    split |= {"expert_model_parallel_size"} if row[0] == "experts" else set()
    if not split & set(parallel):
        assert [size["trained"] for size in sizes] == [whole] * ranks
        assert sum(size["moments"] for size in sizes) == whole  # each data parallel rank has its part of them


@each_row
def test_the_plan_knows_the_adapters_and_their_bytes(outcomes, row):
    for of_rank in outcomes[: LAYOUTS[row[1]][0]]:
        named, held = planned(row, of_rank[row])
        assert of_rank[row]["named"] == named
        ours = of_rank[row]["bytes"]
        assert (ours["weights"], ours["gradients"]) == (held.weights, held.gradients)
        # and a count of steps in fp32 for each matrix that this rank has a part of
        assert 0 <= ours["optimizer"] - held.optimizer <= 4 * len(named)
