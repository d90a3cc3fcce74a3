"""Tenants with adapters on experts, or on the output layer, against train.py's trainer with the same adapters, which
test_lora.py compares with PEFT.
"""

import numpy as np
import pytest

from slime_like.config.lora import LoraConfig
from slime_like.megatron_backend.step.optimizer import AdamParams
from slime_like.records import BASE
from tests.helpers.parity import gradients_as
from tests.helpers.tenants import loss_rows, one_pass, trainer_of_tenants, whole_numbers
from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.train_world import free_ports, make_config, make_samples, run_ranks

pytestmark = pytest.mark.multiprocess

DYNAMIC = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 40, "balance_data": True}
LAYOUTS = {
    "ep2": {"expert_model_parallel_size": 2},
    "tp2 with sequence parallelism": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
}
#: tenant -> flags of its adapters
TENANTS = {
    "experts": {"lora_rank": 4, "lora_init": "false"},
    "output layer": {"lora_rank": 3, "lora_init": "false", "lora_target_modules": ["lm_head", "q_proj"]},
}
STEP, SEED = AdamParams(lr=1e-2), 7


def by_train_py(place, base, parallel, flags, port):
    """Log-probs, gradients of the summed cross entropy, and adapters after a step."""
    from slime_like.megatron_backend.lora.peft_files import adapter_tensors
    from slime_like.megatron_backend.step.loss_spec import LossSpec
    from slime_like.megatron_backend.worker import TrainWorker

    options = {"lora": flags, "batch": DYNAMIC, "optimizer": {"clip_grad": 0.0}}
    config = make_config(base, num_ranks=2, parallel=parallel, **options)
    worker = TrainWorker(config, **(place | {"master_port": port}))
    worker.start()
    samples, loss = make_samples(8), LossSpec(name="cross_entropy")

    def adapters():
        return {name: tensor.float().numpy().copy() for name, tensor in adapter_tensors(worker.stage).items()}

    log_probs = worker.forward(samples, weights=BASE).rows("log_probs")
    worker.forward_backward(samples, loss, weights=BASE)
    gradients = gradients_as(worker, adapters)
    worker._clear_gradients()
    worker.forward_backward(samples, loss, weights=BASE)
    norm = worker.optim_step(STEP, weights=BASE)["train/grad_norm"]
    answer = [row[1:] for row in log_probs], gradients, norm, adapters()
    seed = config.observability.seed
    worker.close()
    return answer, seed


def job(place, base, parallel, ports, folder):
    """What train.py's trainer and a trainer of tenants say of each tenant."""
    theirs, ours = {}, {}
    for (name, flags), port in zip(TENANTS.items(), ports, strict=False):
        theirs[name], seed = by_train_py(place, base, parallel, flags, port)
    worker = trainer_of_tenants(place, base, parallel, num_ranks=2, port=ports[-1])
    rows = loss_rows(make_samples(8))
    for name, flags in TENANTS.items():
        worker.add_tenant(name, LoraConfig(**flags), seed)
    answers = worker.run_passes([one_pass(name, rows) for name in TENANTS], together=True)
    for name, answer in zip(TENANTS, answers, strict=True):
        gradients = whole_numbers(worker, name, "gradient")
        norm = worker.tenant_step(name, STEP, 0.0)["train/grad_norm"]
        ours[name] = answer.log_probs, gradients, norm, whole_numbers(worker, name)
        worker.save_tenant(name, f"{folder}/{name}", True)
    loaded = {}
    for name, flags in TENANTS.items():
        moments = [x.clone() for x in worker._tenants._tenants[name].memory.moments]
        worker.drop_tenant(name)
        worker.add_tenant(name, LoraConfig(**flags), SEED)
        worker.load_tenant(name, f"{folder}/{name}", True)
        memory = worker._tenants._tenants[name].memory
        same = [bool((a == b).all()) for a, b in zip(memory.moments, moments, strict=True)]
        loaded[name] = (whole_numbers(worker, name), same, memory.num_steps)
    worker.close()
    return theirs, ours, loaded


@pytest.mark.long_run
@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_and_output_layers_are_trained_as_by_train_py(tmp_path, layout):
    base = make_tiny_model(str(tmp_path / "model"), "qwen3_moe", num_layers=2)
    ports = free_ports(len(TENANTS) + 1)
    for theirs, ours, loaded in run_ranks(job, 2, base, LAYOUTS[layout], ports, str(tmp_path), timeout_s=150):
        for name in TENANTS:
            for mine, expected in zip(ours[name][0], theirs[name][0], strict=True):
                np.testing.assert_allclose(mine, expected, atol=1e-5, rtol=0)
            assert ours[name][2] == pytest.approx(theirs[name][2], rel=1e-5)
            assert set(ours[name][1]) == set(theirs[name][1])
            most = max(float(np.abs(gradient).max()) for gradient in theirs[name][1].values())
            for key, gradient in theirs[name][1].items():
                np.testing.assert_allclose(ours[name][1][key], gradient, atol=2e-5 * most, rtol=0, err_msg=key)
            for key, matrix in theirs[name][3].items():
                clear = np.abs(theirs[name][1][key]) > 1e-3 * most
                np.testing.assert_allclose(ours[name][3][key][clear], matrix[clear], atol=1e-4, rtol=0, err_msg=key)
            weights, same, num_steps = loaded[name]
            assert same == [True, True] and num_steps == 1
            for key, matrix in ours[name][3].items():
                np.testing.assert_array_equal(weights[key], matrix, err_msg=key)
        assert any(".experts." in key for key in ours["experts"][1])
        assert any("lm_head" in key for key in ours["output layer"][1])
