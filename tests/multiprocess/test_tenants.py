"""Tenants' adapters on one trainer against PEFT on the HF model in float64, under each layout; apart from each other,
to the bit; and on disk.
"""

# Covers slime_like.megatron_backend.lora.tenant_files,
# slime_like.megatron_backend.lora.tenant_gradients, slime_like.megatron_backend.lora.tenant_runner,
# slime_like.megatron_backend.lora.tenant_verbs, slime_like.megatron_backend.lora.tenants and
# slime_like.megatron_backend.step.several_targets too.

import dataclasses

import numpy as np
import pytest
import torch

from slime_like.config.lora import LoraConfig
from slime_like.megatron_backend.step.optimizer import AdamParams
from slime_like.records import LossRow
from tests.helpers.lora_rows import STEPS
from tests.helpers.peft_truth import load_peft, log_probs_of, make_peft_folder, peft_truth
from tests.helpers.tenants import loss_rows, one_pass, trainer_of_tenants, whole_numbers
from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.train_world import free_ports, make_samples, run_ranks

pytestmark = pytest.mark.multiprocess

SEQUENCE = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
#: name -> (ranks, --… of the parallel group)
LAYOUTS = {
    "one rank": (1, {}),
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "tp2 with sequence parallelism": (2, SEQUENCE),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "dp2": (2, {}),
    "cp2": (2, {"context_parallel_size": 2}),
    "recomputed": (1, RECOMPUTED),
}
QUICK = ("one rank", "tp2 with sequence parallelism", "dp2")
MARKED = [name if name in QUICK else pytest.param(name, marks=pytest.mark.long_run) for name in LAYOUTS]
#: tenant -> PEFT's options
TENANTS = {
    "ada": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"},
    "bob": {"r": 3, "lora_alpha": 7, "use_rslora": True, "target_modules": ["q_proj", "v_proj", "up_proj", "o_proj"]},
}
GRADIENT_BOUND, LOG_PROB_BOUND = 2e-5, 1e-5


def lora_of(name):
    options = TENANTS[name]
    targets = options["target_modules"]
    return LoraConfig(
        lora_rank=options["r"],
        lora_alpha=float(options["lora_alpha"]),
        lora_use_rslora=options.get("use_rslora", False),
        lora_target_modules=[targets] if isinstance(targets, str) else targets,
    )


def samples_of(name):
    return make_samples(8, seed=list(TENANTS).index(name))


def one_layout(worker, folders, layout, saves):
    """What this rank says of each tenant: both train in turns."""
    result = {name: {} for name in TENANTS}
    rows = {name: loss_rows(samples_of(name)) for name in TENANTS}
    for name in TENANTS:
        worker.add_tenant(name, lora_of(name), 1)
        worker.load_tenant(name, folders["adapters of " + name], False)
    answers = worker.run_passes([one_pass(name, rows[name], forward_only=True) for name in TENANTS])
    for name, answer in zip(TENANTS, answers, strict=True):
        result[name]["log_probs"], result[name]["loss"] = answer.log_probs, answer.metrics["loss"]
    for number, params in enumerate(STEPS):
        # in two calls, the second of both tenants
        worker.run_passes([one_pass(name, rows[name][:3]) for name in TENANTS])
        answers = worker.run_passes([one_pass(name, rows[name][3:]) for name in TENANTS])
        for name in TENANTS:
            if not number:
                result[name]["gradients"] = whole_numbers(worker, name, "gradient")
            report = worker.tenant_step(name, AdamParams(**params), 0.0)
            if not number:
                result[name]["grad_norm"] = report["train/grad_norm"]
    for name in TENANTS:
        result[name]["stepped"] = whole_numbers(worker, name)
        (answer,) = worker.run_passes([one_pass(name, rows[name], forward_only=True)])
        result[name]["after"] = answer.log_probs
        worker.save_tenant(name, f"{saves}/{layout}/{name}", True)
        worker.export_tenant(name, f"{saves}/{layout}/engine's {name}")
    return result | {"third": third_step(worker, rows)}


def third_step(worker, rows):
    """The tenants' weights after one more step, taken with shared micro-batches."""
    worker.run_passes([one_pass(name, rows[name]) for name in TENANTS], together=True)
    for name in TENANTS:
        worker.tenant_step(name, AdamParams(lr=3e-3), 1.0)
    return {name: whole_numbers(worker, name) for name in TENANTS}


def in_world(place, layouts, base, folders, ports, saves):
    """Each layout, and in each again the third step of tenants that the first one saved."""
    results = {}
    for layout, port in zip(layouts, ports, strict=True):
        ranks, parallel = LAYOUTS[layout]
        if place["rank"] >= ranks:
            continue
        worker = trainer_of_tenants(place, base, parallel, num_ranks=ranks, port=port)
        try:
            results[layout] = one_layout(worker, folders, layout, saves)
            for name in TENANTS:
                worker.load_tenant(name, f"{saves}/{layouts[0]}/{name}", True)
            results[layout]["resumed"] = third_step(worker, {name: loss_rows(samples_of(name)) for name in TENANTS})
        except Exception as error:
            raise RuntimeError(f"{layout}: {error}") from error
        worker.close()
    return results


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_tiny_model(str(tmp_path_factory.mktemp("model") / "qwen3"), "qwen3", num_layers=2)


@pytest.fixture(scope="module")
def folders(tmp_path_factory, base):
    root = tmp_path_factory.mktemp("adapters")
    return {"adapters of " + name: make_peft_folder(base, str(root / name), **TENANTS[name]) for name in TENANTS}


@pytest.fixture(scope="module")
def saves(tmp_path_factory):
    return str(tmp_path_factory.mktemp("saves"))


@pytest.fixture(scope="module")
def outcomes(request, base, folders, saves):
    items = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    wanted = [name for name in LAYOUTS if any(item is not None and item.params.get("layout") == name for item in items)]
    return run_ranks(in_world, 2, wanted, base, folders, free_ports(len(wanted)), saves, timeout_s=200)


@pytest.fixture(scope="module")
def truths(base, folders):
    return {name: peft_truth(base, folders["adapters of " + name], samples_of(name)) for name in TENANTS}


def largest(arrays):
    return max(float(np.abs(array).max()) for array in arrays)


def ranks_of(outcomes, layout):
    return [of_rank[layout] for of_rank in outcomes[: LAYOUTS[layout][0]]]


each_layout = pytest.mark.parametrize("layout", MARKED)


@each_layout
def test_log_probs_and_losses_are_pefts(outcomes, truths, layout):
    for of_rank in ranks_of(outcomes, layout):
        for name, truth in truths.items():
            weights = [row.inputs["weights"] for row in loss_rows(samples_of(name))]
            for mine, expected in zip(of_rank[name]["log_probs"], truth.log_probs, strict=True):
                np.testing.assert_allclose(mine, expected, atol=LOG_PROB_BOUND, rtol=0)
            loss = -sum(float((w * row).sum()) for w, row in zip(weights, truth.log_probs, strict=True))
            assert of_rank[name]["loss"] == pytest.approx(loss, rel=1e-5)


@each_layout
def test_every_gradient_is_pefts(outcomes, truths, layout):
    for name, truth in truths.items():
        most, seen = largest(truth.gradients.values()), set()
        norm = np.sqrt(sum((gradient**2).sum() for gradient in truth.gradients.values()))
        for of_rank in ranks_of(outcomes, layout):
            for key, gradient in of_rank[name]["gradients"].items():
                np.testing.assert_allclose(gradient, truth.gradients[key], atol=GRADIENT_BOUND * most, rtol=0)
            seen |= set(of_rank[name]["gradients"])
            assert of_rank[name]["grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert seen == set(truth.gradients)


@each_layout
def test_two_steps_lead_where_torchs_adamw_leads(outcomes, truths, layout):
    for name, truth in truths.items():
        for of_rank in ranks_of(outcomes, layout):
            for key, matrix in of_rank[name]["stepped"].items():
                clear = np.abs(truth.gradients[key]) > 1e-3 * np.abs(truth.gradients[key]).max()
                assert clear.mean() > 0.9
                np.testing.assert_allclose(matrix[clear], truth.stepped[key][clear], atol=1e-4, rtol=0, err_msg=key)


@each_layout
def test_peft_loads_what_was_saved_and_what_engines_get(outcomes, base, saves, layout):
    for name in TENANTS:
        for folder in (f"{saves}/{layout}/{name}", f"{saves}/{layout}/engine's {name}"):
            with torch.no_grad():
                theirs = log_probs_of(load_peft(base, folder), samples_of(name))
            for mine, expected in zip(outcomes[0][layout][name]["after"], theirs, strict=True):
                np.testing.assert_allclose(mine, expected.numpy(), atol=LOG_PROB_BOUND, rtol=0)


@each_layout
def test_a_tenant_goes_on_under_another_layout(outcomes, layout):
    """Adam's moments came along: after a fresh start the third step would be ten times as long."""
    first = next(iter(outcomes[0]))
    for name in TENANTS:
        expected = [of_rank["third"][name] for of_rank in ranks_of(outcomes, first)]
        whole = {key: matrix for of_rank in expected for key, matrix in of_rank.items()}
        for of_rank in ranks_of(outcomes, layout):
            for key, matrix in of_rank["resumed"][name].items():
                np.testing.assert_allclose(matrix, whole[key], atol=2e-5, rtol=0, err_msg=key)


# ---------------------------------------------------------------------- apart from each other


def trained(worker, names, *, together=False, spoil=None, broken=None):
    """The answers of three steps, and each tenant's weights after them; then all are dropped.

    spoil: whose rows weigh NaN. broken: whose adapters are NaN, and with them all that the model makes of its rows.
    """
    rows = {name: loss_rows(samples_of(name)) for name in names}
    if spoil is not None:
        wrong = {"weights": np.full_like(rows[spoil][2].inputs["weights"], np.nan)}
        bad = dataclasses.replace(rows[spoil][2], inputs={**rows[spoil][2].inputs, **wrong})
        rows[spoil] = (*rows[spoil][:2], bad, *rows[spoil][3:])
    for name in names:
        worker.add_tenant(name, lora_of(name), 1)
        if name == broken:
            worker._tenants._tenants[name].memory.master.fill_(float("nan"))
    answers = []
    for _ in range(3):
        answers.append(worker.run_passes([one_pass(name, rows[name]) for name in names], together))
        for name in names:
            if name not in (spoil, broken):
                worker.tenant_step(name, AdamParams(lr=1e-2), 1.0)
    weights = {name: whole_numbers(worker, name) for name in names}
    for name in names:
        worker.drop_tenant(name)
    return answers, weights


def side_by_side(place, base, layout, port):
    """What one trainer's tenants end with, alone, beside others, and with too little room."""
    ranks, parallel = LAYOUTS[layout]
    worker = trainer_of_tenants(place, base, parallel, num_ranks=ranks, port=port)
    result = {
        "alone": trained(worker, ["ada"]),
        "beside": trained(worker, ["bob", "ada"]),
        "beside one that fails": trained(worker, ["bob", "ada"], spoil="bob"),
        "in one pack": trained(worker, ["bob", "ada"], together=True),
        "in one pack with one that fails": trained(worker, ["bob", "ada"], together=True, broken="bob"),
    }
    worker.limit_tenants(1)
    result["in turn on the device"] = trained(worker, ["bob", "ada"])
    worker.add_tenant("ada", lora_of("ada"), 1)
    worker.add_tenant("bob", lora_of("bob"), 1)
    result["resident"] = worker._tenants.resident
    result["names"] = worker.tenants()
    result["refused"] = worker.run_passes(
        [
            one_pass("eve", loss_rows(samples_of("ada"))),
            one_pass("ada", ()),
            one_pass("ada", loss_rows(samples_of("ada")), loss="dpo"),
            one_pass("bob", loss_rows(samples_of("bob"))[:1], forward_only=True),
        ]
    )
    worker.close()
    return result


@pytest.fixture(scope="module", params=["one rank", pytest.param("pp2", marks=pytest.mark.long_run)])
def neighbours(request, base):
    return run_ranks(side_by_side, LAYOUTS[request.param][0], base, request.param, free_ports(1)[0], timeout_s=120)


@pytest.mark.parametrize(
    "setting",
    ["beside", "beside one that fails", "in turn on the device"],
)
def test_a_tenants_numbers_are_those_it_has_alone_to_the_bit(neighbours, setting):
    for of_rank in neighbours:
        alone, weights = of_rank["alone"], of_rank[setting][1]["ada"]
        for step in range(3):
            assert of_rank[setting][0][step][-1].metrics == alone[0][step][0].metrics
        for key, matrix in alone[1]["ada"].items():
            np.testing.assert_array_equal(weights[key], matrix, err_msg=key)
    assert alone[0][0][0].metrics["loss"] > alone[0][2][0].metrics["loss"] + 1.0


@pytest.mark.parametrize("setting", ["in one pack", "in one pack with one that fails"])
def test_shared_micro_batches_round_otherwise_only(neighbours, setting):
    for of_rank in neighbours:
        for name in ("ada",) if "fails" in setting else ("ada", "bob"):
            for key, matrix in of_rank["beside"][1][name].items():
                np.testing.assert_allclose(of_rank[setting][1][name][key], matrix, atol=1e-6, rtol=0, err_msg=key)


def test_what_fails_is_said_and_changes_nothing(neighbours):
    for of_rank in neighbours:
        answers, weights = of_rank["beside one that fails"]
        assert all("'cross_entropy' is nan: all log-probs are finite" in of_step[0] for of_step in answers)
        assert all(not matrix.any() for key, matrix in weights["bob"].items() if "lora_B" in key)
        answers, _ = of_rank["in one pack with one that fails"]
        assert all("log-probs of rows [0, 1, 2, 3, 4] are not finite" in of_step[0] for of_step in answers)
        assert "'eve' is not here" in of_rank["refused"][0] and "at least one row" in of_rank["refused"][1]
        assert "'dpo' is unknown" in of_rank["refused"][2]
        assert of_rank["refused"][3].log_probs[0].shape == loss_rows(samples_of("bob"))[0].targets.shape
        assert of_rank["resident"] == ("bob",) and of_rank["names"] == ("ada", "bob")


def on_one_rank_and_interleaved(place, base, ports):
    """Weights after three steps, on rank 0 alone and on an interleaved pipeline."""
    results = {}
    for name, ranks, parallel, port in zip(
        ("alone", "interleaved"),
        (1, 2),
        ({}, {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2}),
        ports,
        strict=True,
    ):
        if place["rank"] < ranks:
            worker = trainer_of_tenants(place, base, parallel, num_ranks=ranks, port=port)
            results[name] = trained(worker, list(TENANTS), together=True)[1]
            worker.close()
    return results


@pytest.mark.long_run
def test_an_interleaved_pipeline_leads_where_one_rank_leads(tmp_path):
    base = make_tiny_model(str(tmp_path), "llama", num_layers=4)
    results = run_ranks(on_one_rank_and_interleaved, 2, base, free_ports(2), timeout_s=120)
    for name, whole in results[0]["alone"].items():
        ours = results[0]["interleaved"][name] | results[1]["interleaved"][name]
        assert set(ours) == set(whole)
        for key, matrix in whole.items():
            np.testing.assert_allclose(ours[key], matrix, atol=1e-4, rtol=0, err_msg=key)


# ---------------------------------------------------------------------- several targets a position


def several_targets(place, base, layout, port):
    """Log-probs, losses and gradients of rows with three targets a position, and of each target by itself."""
    ranks, parallel = LAYOUTS[layout]
    worker = trainer_of_tenants(place, base, parallel, num_ranks=ranks, port=port)
    worker.add_tenant("ada", dataclasses.replace(lora_of("ada"), lora_init="gaussian"), 1)
    generator = np.random.default_rng(3)
    rows = []
    for row in loss_rows(samples_of("ada")):
        targets = generator.integers(0, 101, (len(row.tokens), 3))
        inputs = {name: generator.normal(size=targets.shape).astype(np.float32) for name in ("weights", "advantages")}
        inputs["logprobs"] = -4.0 - generator.random(targets.shape, dtype=np.float32)
        rows.append(LossRow(tokens=row.tokens, targets=targets, inputs=inputs))
    by_column = [
        [
            LossRow(tokens=r.tokens, targets=r.targets[:, k], inputs={n: x[:, k] for n, x in r.inputs.items()})
            for r in rows
        ]
        for k in range(3)
    ]
    result = {}
    for loss in ("cross_entropy", "importance_sampling"):
        (whole,) = worker.run_passes([one_pass("ada", tuple(rows), loss)])
        gradients = whole_numbers(worker, "ada", "gradient")
        worker._tenants._tenants["ada"].memory.clear_gradient()
        each = worker.run_passes([one_pass("ada", tuple(column), loss) for column in by_column])
        result[loss] = (whole, gradients), (each, whole_numbers(worker, "ada", "gradient"))
        worker._tenants._tenants["ada"].memory.clear_gradient()
    worker.close()
    return result


@pytest.mark.parametrize("layout", ["tp2", pytest.param("cp2", marks=pytest.mark.long_run)])
def test_several_targets_a_position_are_each_by_itself(base, layout):
    for of_rank in run_ranks(several_targets, 2, base, layout, free_ports(1)[0], timeout_s=120):
        for (whole, gradients), (each, summed) in of_rank.values():
            for number, mine in enumerate(whole.log_probs):
                theirs = np.stack([answer.log_probs[number] for answer in each], 1)
                np.testing.assert_allclose(mine, theirs, atol=2e-6, rtol=0)
            assert whole.metrics["loss"] == pytest.approx(sum(a.metrics["loss"] for a in each), abs=1e-3)
            most = largest(summed.values())
            for key, gradient in summed.items():
                np.testing.assert_allclose(gradients[key], gradient, atol=1e-5 * most, rtol=0, err_msg=key)
