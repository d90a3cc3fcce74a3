"""--backend-config: every key of the page is a flag, and what cannot be is told."""

import json

import pytest

from slime_like.errors import ConfigError
from slime_like.tinker.backend_keys import read_keys, typed_value

PLACEMENT, ENGINE, LORA = "trainer.placement.", "generator.inference_engine.", "trainer.policy.model.lora."
MERGE = "trainer.policy.megatron_config.lora_config.merge_lora"


def flags(values: dict, *plain: str) -> list[str]:
    return list(read_keys(json.dumps(values), plain))


def problems(values: dict, *plain: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read_keys(json.dumps(values), plain)
    return caught.value.problems


def test_every_key_of_the_page_is_a_flag():
    values = {
        PLACEMENT + "policy_num_gpus_per_node": 4, PLACEMENT + "policy_num_nodes": 2, ENGINE + "num_engines": 3,
        ENGINE + "tensor_parallel_size": 2, "trainer.micro_forward_batch_size_per_gpu": 7,
        "trainer.micro_train_batch_size_per_gpu": 5, ENGINE + "gpu_memory_utilization": 0.7,
        PLACEMENT + "colocate_all": False, MERGE: False, LORA + "max_loras": 3, LORA + "max_cpu_loras": 9,
    }  # fmt: skip
    argv = flags(values)
    for name, value in {
        "--actor-num-gpus-per-node": 4, "--actor-num-nodes": 2, "--rollout-num-gpus": 6,
        "--rollout-num-gpus-per-engine": 2, "--micro-batch-size": 5, "--log-probs-micro-batch-size": 7,
        "--sglang-mem-fraction-static": 0.7,
        "--max-loras": 3, "--max-cpu-loras": 9,
    }.items():  # fmt: skip
        assert typed_value(argv, name) == [str(value)], name
    assert "--colocate" not in argv
    assert flags({PLACEMENT + "colocate_all": True}) == ["--colocate"]


def test_engines_are_counted_in_gpus_of_the_size_that_is_typed():
    assert flags({ENGINE + "num_engines": 3}) == ["--rollout-num-gpus", "3"]
    argv = flags({ENGINE + "num_engines": 3}, "--rollout-num-gpus-per-engine", "4")
    assert argv == ["--rollout-num-gpus", "12"]


def test_one_size_of_micro_batches_serves_both_and_two_serve_each_its_own():
    train, forward = "trainer.micro_train_batch_size_per_gpu", "trainer.micro_forward_batch_size_per_gpu"
    assert flags({train: 2}) == ["--micro-batch-size", "2"]
    assert flags({forward: 8}) == ["--micro-batch-size", "8"]
    assert flags({forward: 8, train: 2}) == ["--micro-batch-size", "2", "--log-probs-micro-batch-size", "8"]
    assert flags({forward: 8}, "--micro-batch-size", "3") == ["--log-probs-micro-batch-size", "8"]


def test_the_same_said_twice_is_said_once_and_a_contradiction_names_both():
    values = {PLACEMENT + "policy_num_gpus_per_node": 2}
    assert flags(values, "--actor-num-gpus-per-node", "2") == []
    (problem,) = problems(values, "--actor-num-gpus-per-node=4")
    assert PLACEMENT + "policy_num_gpus_per_node" in problem and "--actor-num-gpus-per-node 4" in problem
    assert "--colocate" in problems({PLACEMENT + "colocate_all": True}, "--no-colocate")[0]
    assert "--colocate" in problems({PLACEMENT + "colocate_all": False}, "--colocate")[0]
    (problem,) = problems({ENGINE + "num_engines": 2, ENGINE + "tensor_parallel_size": 2}, "--rollout-num-gpus", "2")
    assert "num_engines" in problem and "tensor_parallel_size" in problem


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({PLACEMENT + "policy_num_gpu_per_node": 2}, "Did you mean 'trainer.placement.policy_num_gpus_per_node'?"),
        ({"num_engines": 2}, "Did you mean 'generator.inference_engine.num_engines'?"),
        ({"zzz": 2}, "unknown key. Known: "),
        ({ENGINE + "num_engines": 0}, "at least 1"),
        ({ENGINE + "num_engines": True}, "at least 1"),
        ({ENGINE + "num_engines": "2"}, "at least 1"),
        ({ENGINE + "gpu_memory_utilization": 1.5}, "below 1"),
        ({PLACEMENT + "colocate_all": "no"}, "true or false"),
        ({MERGE: True}, "none is merged"),
    ],
)
def test_what_cannot_be_is_told(values, message):
    (problem,) = problems(values)
    assert message in problem


def test_every_problem_at_once_and_text_that_is_no_object():
    assert len(problems({"zzz": 1, "yyy": 2, MERGE: True})) == 3
    for text in ("{", "[1]", '"x"'):
        with pytest.raises(ConfigError, match="no JSON"):
            read_keys(text, [])


def test_values_on_a_command_line():
    argv = ["--a", "1", "2", "--b", "--c=3", "--a", "4", "--no-d"]
    assert typed_value(argv, "--a") == ["4"]
    assert typed_value(argv, "--b") == []
    assert typed_value(argv, "--c") == ["3"]
    assert typed_value(argv, "--d") == ["false"]
    assert typed_value(argv, "--e") is None
