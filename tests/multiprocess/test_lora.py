"""Adapters against PEFT on the HF model in float64: log-probs, every gradient, two optimizer steps, merged weights and
folders, for each family and layout; and checkpoints of adapters under another layout.
"""

# Covers slime_like.megatron_backend.lora.build and slime_like.megatron_backend.lora.state too.

import numpy as np
import pytest
from safetensors.numpy import load_file

from slime_like.config.parallel import ParallelConfig
from slime_like.planning.memory.adapters import adapter_chunks
from slime_like.planning.memory.parameters import stage_chunks
from slime_like.planning.memory.trainer_bytes import Precision, StageBytes
from slime_like.records import BASE
from tests.helpers.lora_rows import (
    ADAPTERS,
    Truths,
    adapter_folders,
    check_gradients,
    check_log_probs,
    check_merged,
    check_saved,
    check_steps,
    largest,
    lora_flags,
    one_row,
    whole_adapters,
    worker_of,
)
from tests.helpers.peft_truth import load_peft
from tests.helpers.train_world import free_ports, make_samples, recipe_of, run_ranks

pytestmark = pytest.mark.multiprocess

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
ROWS = [("qwen3", layout) for layout in LAYOUTS if layout != "interleaved pp2" and "ep2" not in layout]
ROWS += [("some modules", "tp2 with sequence parallelism"), ("llama", "interleaved pp2"), ("glm4", "tp2")]
ROWS += [(name, layout) for name in ("qwen3_moe", "experts") for layout in ("ep2", "ep2 and tp2")]
ROWS += [("output", layout) for layout in ("tp2 with sequence parallelism", "pp2")]
ROWS += [("experts", layout) for layout in ("one rank", "tp2 with sequence parallelism", "pp2")]
ROWS += [(name, layout) for name in ("qwen3_moe", "deepseek_v3") for layout in ("tp2 with sequence parallelism", "pp2")]
#: In every run; the others with scripts/test_long.sh.
QUICK = [("qwen3", "tp2 with sequence parallelism"), ("qwen3", "dp2, reduced early"), ("glm4", "tp2")]
MARKED = [row if row in QUICK else pytest.param(row, marks=pytest.mark.long_run) for row in ROWS]


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
    return adapter_folders(tmp_path_factory.mktemp("models"), ADAPTERS)


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
    return Truths(folders)


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
    check_log_probs([of_rank[row] for of_rank in outcomes[: LAYOUTS[row[1]][0]]], truths[row[0]])


@each_row
def test_every_gradient_is_pefts(outcomes, truths, row):
    check_gradients([of_rank[row] for of_rank in outcomes[: LAYOUTS[row[1]][0]]], truths[row[0]])


@each_row
def test_two_steps_lead_where_torchs_adamw_leads(outcomes, truths, row):
    check_steps([of_rank[row] for of_rank in outcomes[: LAYOUTS[row[1]][0]]], truths[row[0]])


@each_row
def test_merged_weights_are_pefts_and_the_base_stays(outcomes, truths, folders, row):
    check_merged(
        [of_rank[row] for of_rank in outcomes[: LAYOUTS[row[1]][0]]], truths[row[0]], folders[ADAPTERS[row[0]][0]]
    )


@each_row
def test_peft_loads_what_was_saved(outcomes, folders, saves, row):
    name, layout = row
    check_saved(outcomes[0][row], folders[ADAPTERS[name][0]], f"{saves}/{name} {layout}")


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
