"""The server's command line: what is asked for is what runs, and what has no meaning here is refused."""

# Covers slime_like.tinker.server too.

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slime_like.config.lora import LoraConfig
from slime_like.errors import ConfigError
from slime_like.tinker.assemble import service_settings, trainer_options
from slime_like.tinker.options import ServerCommand, read_command

ROOT = Path(__file__).parents[3]
PAGE = {
    "trainer.placement.policy_num_gpus_per_node": 4,
    "generator.inference_engine.num_engines": 2,
    "generator.inference_engine.tensor_parallel_size": 2,
}
MULTI_TENANT = {
    "trainer.placement.colocate_all": False,
    "trainer.policy.megatron_config.lora_config.merge_lora": False,
    "trainer.policy.model.lora.max_loras": 3,
    "trainer.policy.model.lora.max_cpu_loras": 9,
}


def command(*argv: str, keys: dict | None = None, model: str = "models/tiny-qwen3") -> ServerCommand:
    config = ["--backend-config", json.dumps(keys)] if keys is not None else []
    return read_command(["--base-model", str(ROOT / model), *config, *argv])


def problems(*argv: str, **options) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        command(*argv, **options)
    return caught.value.problems


def test_the_pages_command_places_four_trainers_and_two_engines_of_two():
    read = command("--backend", "megatron", keys=PAGE | MULTI_TENANT)
    plan = read.report.plan
    assert [sorted(bundle.roles) for bundle in plan.bundles] == [["tenants"]] * 4 + [["rollout"]] * 4
    assert [(engine.bundles, engine.tp) for engine in plan.engines] == [((4, 5), 2), ((6, 7), 2)]
    sglang = read.config.engine.sglang
    assert (sglang["max_loras_per_batch"], sglang["max_loaded_loras"]) == ("4", "10")  # SGLang counts the base
    assert read.server.max_cpu_loras == 9
    assert read.config.role == "tenants" and not read.config.lora.enabled


def test_without_keys_there_is_one_of_each_and_colocated_they_share_a_gpu():
    assert command().report.plan.num_gpus == 2
    shared = command(keys={"trainer.placement.colocate_all": True})
    assert [sorted(bundle.roles) for bundle in shared.report.plan.bundles] == [["rollout", "tenants"]]
    assert not shared.config.offload_rollout and not shared.config.offloads_train(on_gpu=True)


def test_the_plan_has_the_room_that_tenants_are_kept():
    """Twice as many resident adapters take twice as much; the base has no gradients of its own."""
    sizes = []
    for count in ("4", "8"):
        memory = command("--max-adapters-resident", count, keys={"trainer.placement.colocate_all": True}).report.memory
        (gpu,) = memory.per_gpu
        (train,) = (phase.bytes for phase in gpu.phases if phase.name == "train")
        sizes.append([train[part] for part in ("adapter weights", "gradients", "optimizer", "engine adapter weights")])
    (weights, gradients, optimizer, _), twice = sizes
    assert twice == [2 * weights, 2 * gradients, 2 * optimizer, sizes[0][3]]
    assert gradients == optimizer and sizes[0][3] > 0
    assert "a client with all parameters, of which the trainer has one at a time" in command().text()


def test_micro_batches_are_shared_where_it_is_asked_for():
    assert not trainer_options(command()).shares_micro_batches
    shared = command("--tenant-micro-batches", "shared")
    assert trainer_options(shared).shares_micro_batches and "of several models' rows" in shared.text()
    assert any("--tenant-micro-batches" in problem for problem in problems("--tenant-micro-batches", "all"))


def test_what_tenants_and_sides_have_is_what_the_flags_say():
    limits = service_settings(command("--max-requests-a-tenant", "5", "--max-tokens-a-tenant", "700"))
    assert (limits.max_requests_a_tenant, limits.max_tokens_a_tenant) == (5, 700)
    sides = service_settings(command("--colocate", "--sampling-weight", "3", "--turn-s", "0.5"))
    assert (sides.shared_devices, sides.sampling_weight, sides.turn_s) == (True, 3.0, 0.5)
    kept = service_settings(command("--max-whole-models", "2", "--max-ephemeral-samplers", "3"))
    assert (kept.max_whole_models_resident, kept.max_ephemeral_samplers) == (2, 3)


def test_flags_of_train_py_work_beside():
    read = command("--tensor-model-parallel-size", "2", "--seed", "5", keys=PAGE)
    assert read.report.plan.roles["tenants"].tp == 2
    assert read.config.observability.seed == 5
    assert read.context_length == 1024
    assert command("--rollout-max-context-len", "100").context_length == 100


def test_every_linear_layer_of_a_dense_model_and_none_of_its_experts_may_have_an_adapter():
    dense = command().config.engine.sglang["lora_target_modules"]
    assert dense == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert dense == sorted({*LoraConfig(lora_rank=1).lora_target_modules, *dense} - {"all-linear"})
    experts = command(model="models/tiny-qwen3-moe").config.engine.sglang["lora_target_modules"]
    assert experts == ["k_proj", "o_proj", "q_proj", "v_proj"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--lora-rank", "8"], "clients' own lora_rank"),
        (["--prompt-data", "x.jsonl"], "clients bring their own loop"),
        (["--advantage-estimator", "gspo"], "clients bring their own loop"),
        (["--rm-type", "math"], "clients score their samples"),
        (["--hf-checkpoint", "x"], "--base-model"),
        (["--offload-train"], "stay on their GPUs"),
        (["--max-loras", "4", "--max-cpu-loras", "2"], "--max-cpu-loras 2"),
        (["--host", "0.0.0.0"], "clear text"),
        (["--tls-key", "k"], "need each other"),
        (["--port", "70000"], "--port 70000"),
        (["--max-lora-rank", "0"], "--max-lora-rank 0"),
        (["--turn-s", "1"], "--turn-s 1 does nothing"),
        (["--colocate", "--sampling-weight", "0"], "--sampling-weight 0: must be above 0"),
        (["--max-requests-a-tenant", "0"], "--max-requests-a-tenant 0"),
        (["--no-such-flag"], "unknown flag --no-such-flag"),
        (["--sglang-mem-fraction", "1"], "--sglang-mem-fraction-static"),
    ],
)
def test_what_has_no_meaning_here_is_refused(argv, message):
    assert any(message in problem for problem in problems(*argv)), problems(*argv)


def test_a_database_that_is_none_is_refused_before_anything_starts(tiny_model_dir, tmp_path):
    run = subprocess.run(
        [sys.executable, "-m", "slime_like.tinker.server", "--base-model", str(tiny_model_dir), "--db", "mysql://x/y",
         "--state-folder", str(tmp_path / "state")],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert run.returncode == 2 and "mysql://x/y is no database" in run.stderr and "Traceback" not in run.stderr


def test_a_model_that_is_not_there():
    (problem,) = problems(model="models/none")
    assert "--base-model" in problem and "--hf-checkpoint" not in problem


def test_a_key_of_the_servers_own_flags_may_not_contradict_them():
    (problem,) = problems("--max-loras", "2", keys={"trainer.policy.model.lora.max_loras": 3})
    assert "max_loras" in problem and "--max-loras 2" in problem


def test_the_plan_is_printed_and_nothing_heavy_is_imported():
    code = (
        "import sys; from slime_like.tinker.server import main; status = main(sys.argv[1:]);"
        "heavy = [name for name in ('torch', 'ray', 'transformers', 'fastapi') if name in sys.modules];"
        "print(heavy, file=sys.stderr); sys.exit(status)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, "--base-model", "models/tiny-qwen3", "--backend-config",
         json.dumps(PAGE | MULTI_TENANT), "--plan", "json"],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    plan = json.loads(run.stdout)
    assert plan["num_gpus"] == 8 and plan["server"]["max_loras"] == 3 and plan["problems"] == []
    assert run.stderr.strip().endswith("[]")
    wrong = subprocess.run(
        [sys.executable, "-m", "slime_like.tinker", "--base-model", "models/tiny-qwen3", "--backend-config", "{"],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert wrong.returncode == 2 and "no JSON" in wrong.stderr and "Traceback" not in wrong.stderr


def test_the_script_passes_sizes_and_flags_on():
    run = subprocess.run(
        ["bash", "scripts/run-tinker.sh", "--plan", "json", "--max-loras", "5"], cwd=ROOT, capture_output=True,
        text=True, timeout=60, check=False,
        env=os.environ | {"PYTHON": sys.executable, "ACTOR_GPUS": "4", "ENGINES": "2", "ENGINE_GPUS": "2"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    plan = json.loads(run.stdout)
    assert (plan["num_gpus"], len(plan["engines"]), plan["server"]["max_loras"]) == (8, 2, 5)


_HEAPS = """
import ctypes, sys, threading
from slime_like.tinker.server import keep_few_heaps
if sys.argv[1] == "few":
    keep_few_heaps()
barrier, libc = threading.Barrier(9), ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
def allocate():
    libc.malloc(5000)
    barrier.wait()
for _ in range(8):
    threading.Thread(target=allocate).start()
barrier.wait()
libc.malloc_info(0, ctypes.c_void_p.in_dll(libc, "stdout"))
libc.fflush(None)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="this C library has no mallopt")
@pytest.mark.parametrize(("which", "is_enough"), [("few", lambda n: n <= 2), ("many", lambda n: n > 2)])
def test_threads_share_few_heaps(which, is_enough):
    unset = {name: value for name, value in os.environ.items() if name != "MALLOC_ARENA_MAX"}
    run = subprocess.run(
        [sys.executable, "-c", _HEAPS, which], cwd=ROOT, capture_output=True, text=True, timeout=60, env=unset
    )
    assert run.returncode == 0, run.stderr
    assert is_enough(run.stdout.count("<heap nr=")), run.stdout[:500]


@pytest.mark.parametrize("plan", [["--plan", "json"], ["--plan=json"]])
def test_problems_of_a_plan_that_is_asked_for_as_json_are_json(plan):
    command = [sys.executable, "-m", "slime_like.tinker.server", "--base-model", "/nowhere", *plan]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.returncode == 2
    assert "no HF folder" in json.loads(run.stdout)["problems"][0]
