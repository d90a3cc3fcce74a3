"""PPO's two models in many layouts: values, value loss, token advantages and gradients are what HF and autograd say."""
# Covers slime_like.megatron_backend.step.critic too, which it does not import itself.

import dataclasses
import os

import numpy as np
import pytest
import torch

from tests.helpers.hf_truth import load_model, score
from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.train_world import free_ports, make_config, make_samples, recipe_of, run_ranks

pytestmark = pytest.mark.multiprocess

GAMMA, LAMBD, CLIP = 0.9, 0.8, 0.2
LOSS = {"advantage_estimator": "ppo", "gamma": GAMMA, "lambd": LAMBD, "value_clip": CLIP, "normalize_advantages": True}
DYNAMIC = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 40, "balance_data": True}
TENSOR = {"tensor_model_parallel_size": 2}
PIPELINE = {"pipeline_model_parallel_size": 2}
CASES = {
    "one rank": (1, {}, {}),
    "one rank, dynamic": (1, {}, DYNAMIC),
    "tp2": (2, TENSOR, {}),
    "tp2 sp dynamic": (2, TENSOR | {"sequence_parallel": True}, DYNAMIC),
    "pp2": (2, PIPELINE, DYNAMIC),
    "dp2": (2, {}, DYNAMIC),
    "cp2": (2, {"context_parallel_size": 2}, DYNAMIC),
    "cp4": (4, {"context_parallel_size": 4}, DYNAMIC),
    "cp2 tp2 sp": (4, TENSOR | {"context_parallel_size": 2, "sequence_parallel": True}, DYNAMIC),
    "padded, tp2 sp": (2, TENSOR | {"sequence_parallel": True}, {"qkv_format": "bshd", "micro_batch_size": 3}),
    "interleaved pp2 dp2, overlap": (
        4,
        PIPELINE
        | {"num_virtual_stages_per_pipeline_rank": 2, "overlap_grad_reduce": True, "overlap_param_gather": True},
        DYNAMIC,
    ),
    "tp2 pp2 sp": (4, TENSOR | PIPELINE | {"sequence_parallel": True}, DYNAMIC),
}


def head_weight(size: int = 48) -> torch.Tensor:
    return 0.3 * torch.randn(1, size, generator=torch.Generator().manual_seed(5))


def rollout() -> list:
    """Samples with rewards; the last one has nothing to train on."""
    rng = np.random.default_rng(3)
    samples = [dataclasses.replace(sample, reward=float(rng.normal())) for sample in make_samples(8)]
    return [*samples[:-1], dataclasses.replace(samples[-1], loss_mask=np.zeros_like(samples[-1].loss_mask))]


def with_values(samples, values):
    """Values as a critic of some steps ago may have given them, so that some bounds are active."""
    rng = np.random.default_rng(4)
    return [
        dataclasses.replace(s, values=(v + rng.normal(0, 0.3, len(v))).astype(np.float32))
        for s, v in zip(samples, values, strict=True)
    ]


def worker_of(place, port, ranks, config):
    from slime_like.megatron_backend.worker import TrainWorker

    worker = TrainWorker(config, **(place | {"world_size": ranks, "master_port": port}))
    return worker, worker.start()


def run_cases(place, folder, ports):
    """case -> what this rank found; every number of a critic and of a policy."""
    results, ports = {}, list(ports)
    for name, (ranks, parallel, batch) in CASES.items():
        first, second = ports.pop(0), ports.pop(0)
        if place["rank"] >= ranks:
            continue
        config = make_config(
            folder,
            num_ranks=ranks,
            parallel=parallel,
            batch=batch,
            loss=LOSS,
            optimizer={"clip_grad": 0.0, "critic_lr": 3e-3},
        )
        critic, _ = worker_of(place, first, ranks, dataclasses.replace(config, role="critic"))
        samples = rollout()
        fresh = recipe_of(critic).values(samples)
        if hasattr(critic.stage[-1], "output_layer"):
            critic.stage[-1].output_layer.weight.data.copy_(head_weight())
        values = recipe_of(critic).values(samples)
        brought = with_values(samples, values)
        report = recipe_of(critic).train(0, brought)
        after = recipe_of(critic).values(samples)
        critic.close()
        actor, _ = worker_of(place, second, ranks, config)
        policy = recipe_of(actor).train(0, brought).metrics
        actor.close()
        results[name] = {
            "fresh": fresh,
            "values": values,
            "report": report,
            "after": after,
            "policy": policy,
            "brought": brought,
        }
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(str(tmp_path_factory.mktemp("models") / "qwen2"), "qwen2", tied=True)


@pytest.fixture(scope="module")
def outcomes(folder):
    return run_ranks(run_cases, 4, folder, free_ports(2 * len(CASES)), timeout_s=200)


def hf_values(model, head, tokens):
    hidden = model.model(torch.as_tensor(tokens.astype(np.int64))[None]).last_hidden_state[0]
    return torch.cat([torch.zeros(1), (hidden[:-1] @ head.T).squeeze(-1)])


def trained(sample):
    return np.flatnonzero(sample.loss_mask[1:]) + 1


def advantages_of(sample):
    """GAE as the paper's double sum, over trained tokens, in Python's floats: [number of trained tokens]."""
    values = [float(sample.values[t]) for t in trained(sample)] + [0.0]
    count = len(values) - 1
    delta = [(sample.reward if k == count - 1 else 0.0) + GAMMA * values[k + 1] - values[k] for k in range(count)]
    return np.array([sum((GAMMA * LAMBD) ** (j - k) * delta[j] for j in range(k, count)) for k in range(count)])


def norm_of(parameters):
    return torch.sqrt(sum((p.grad.double() ** 2).sum() for p in parameters if p.grad is not None)).item()


@pytest.fixture(scope="module")
def truth(folder):
    model, head, samples = load_model(folder), head_weight().requires_grad_(), rollout()
    rows = [hf_values(model, head, s.tokens) for s in samples]
    brought = with_values(samples, [row.detach().numpy() for row in rows])
    loss, all_returns, errors = 0.0, [], []
    for sample, row in zip(brought, rows, strict=True):
        at = trained(sample)
        if not len(at):
            continue
        old = torch.as_tensor(sample.values[at])
        returns = torch.as_tensor(advantages_of(sample)).float() + old
        bounded = torch.min(torch.max(row[at], old - CLIP), old + CLIP)
        loss = loss + 0.5 * torch.max((row[at] - returns) ** 2, (bounded - returns) ** 2).mean() / len(samples)
        all_returns.append(returns.numpy())
        errors.append((returns - row[at]).detach().numpy())
    loss.backward()
    returns, errors = np.concatenate(all_returns).astype(np.float64), np.concatenate(errors).astype(np.float64)
    expected = {
        "values": [row.detach().numpy() for row in rows],
        "value_loss": loss.item(),
        "grad_norm": norm_of([head, *model.parameters()]),
    }
    expected["explained"] = 1 - errors.var() / returns.var()
    policy = load_model(folder)
    advantages = [advantages_of(sample) for sample in brought]
    whole = np.concatenate(advantages)
    total = 0.0
    for sample, row in zip(brought, advantages, strict=True):
        if len(row):
            white = torch.as_tensor((row - whole.mean()) / np.sqrt(whole.var(ddof=1) + 1e-8)).float()
            log_probs = score(policy, sample.tokens, 1.0)[0][trained(sample) - 1]
            total = total - ((log_probs - log_probs.detach()).exp() * white).mean() / len(samples)
    total.backward()
    return expected | {"pg_loss": total.item(), "policy_norm": norm_of(policy.parameters())}


each_case = pytest.mark.parametrize("name", CASES)


@each_case
def test_a_fresh_critic_expects_nothing(outcomes, name):
    assert not any(row.any() for row in outcomes[0][name]["fresh"])


@each_case
def test_values_are_hfs_hidden_states_times_the_head(outcomes, truth, name):
    for result in outcomes[: CASES[name][0]]:
        for ours, theirs in zip(result[name]["values"], truth["values"], strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=0)


@each_case
def test_value_loss_and_gradient_norm_are_autograds(outcomes, truth, name):
    metrics = outcomes[0][name]["report"].metrics
    assert metrics["train/value_loss"] == pytest.approx(truth["value_loss"], rel=1e-5)
    assert metrics["train/critic_grad_norm"] == pytest.approx(truth["grad_norm"], rel=1e-5)
    assert metrics["train/value_explained_variance"] == pytest.approx(truth["explained"], rel=1e-4, abs=1e-5)
    assert 0 < metrics["train/value_clip_ratio"] < 1
    assert metrics["train/critic_lr"] == 3e-3


@each_case
def test_policy_learns_from_whitened_token_advantages(outcomes, truth, name):
    metrics = outcomes[0][name]["policy"]
    assert metrics["train/pg_loss"] == pytest.approx(truth["pg_loss"], rel=1e-4, abs=1e-6)
    assert metrics["train/grad_norm"] == pytest.approx(truth["policy_norm"], rel=1e-5)


@each_case
def test_every_rank_reports_the_same(outcomes, name):
    first = outcomes[0][name]
    for other in outcomes[1 : CASES[name][0]]:
        assert other[name]["report"] == first["report"]
        for mine, theirs in zip(other[name]["after"], first["after"], strict=True):
            np.testing.assert_array_equal(mine, theirs)


@each_case
def test_a_step_moves_every_layout_to_the_same_values(outcomes, name):
    first, ours = outcomes[0]["one rank"], outcomes[0][name]
    moved = max(np.abs(a - b).max() for a, b in zip(first["after"], first["values"], strict=True))
    assert moved > 0.01
    for mine, theirs in zip(ours["after"], first["after"], strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-2 * moved, rtol=0)


def checkpoints(place, folder, other, root, ports):
    """Save and resume of a critic, and where a fresh one starts, on two ranks."""
    from slime_like.errors import CheckpointError

    ports, samples, results = list(ports), rollout(), {}

    def critic_of(parallel, **checkpoint):
        config = make_config(folder, num_ranks=2, parallel=parallel, loss=LOSS, checkpoint=checkpoint)
        return worker_of(place, ports.pop(0), 2, dataclasses.replace(config, role="critic"))

    saves = os.path.join(root, "saves")
    critic, _ = critic_of(TENSOR, save=saves)
    brought = with_values(samples, recipe_of(critic).values(samples))
    recipe_of(critic).train(0, brought)
    results["path"], results["saved"] = recipe_of(critic).save(1, {}), recipe_of(critic).values(samples)
    results["straight"] = recipe_of(critic).train(1, brought).metrics
    critic.close()
    for name, parallel in (("tensor", TENSOR), ("pipeline", PIPELINE), ("data", {})):
        critic, start = critic_of(parallel, load=saves)
        results[name] = (
            start["num_rollouts_done"],
            recipe_of(critic).values(samples),
            recipe_of(critic).train(1, brought).metrics,
        )
        critic.close()
    config = make_config(
        folder, num_ranks=2, parallel=PIPELINE, loss=LOSS, checkpoint={"save": os.path.join(root, "actor")}
    )
    actor, _ = worker_of(place, ports.pop(0), 2, config)
    recipe_of(actor).save(1, {})
    actor.close()
    # Fresh critics: of a policy's Megatron checkpoint, of an HF folder, of another critic.
    starts = {
        "from policy": {"load": os.path.join(root, "actor")},
        "from hf": {"critic_load": other},
        "from critic": {"critic_load": saves + "/critic"},
    }
    for name, options in starts.items():
        critic, start = critic_of({}, **options)
        critic.stage[-1].output_layer.weight.data.copy_(head_weight()) if name != "from critic" else None
        results[name] = (start["num_rollouts_done"], recipe_of(critic).values(samples))
        critic.close()
    try:
        worker_of(
            place, ports.pop(0), 2, make_config(folder, num_ranks=2, loss=LOSS, checkpoint={"load": saves + "/critic"})
        )
    except CheckpointError as error:
        results["refused"] = str(error)
    from slime_like.megatron_backend.initialize import shut_down

    shut_down()
    return results


@pytest.fixture(scope="module")
def saved(tmp_path_factory, folder):
    root = str(tmp_path_factory.mktemp("checkpoints"))
    other = make_tiny_model(os.path.join(root, "other"), "qwen2", tied=True, seed=1)
    return run_ranks(checkpoints, 2, folder, other, root, free_ports(12), timeout_s=150)[0] | {"other": other}


@pytest.mark.parametrize("layout", ["tensor", "pipeline", "data"])
def test_a_critic_resumes_under_any_layout(saved, layout):
    done, values, metrics = saved[layout]
    assert done == 1 and saved["path"].endswith("saves/critic/iter_0000001")
    for ours, theirs in zip(values, saved["saved"], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=0)
    for name, value in saved["straight"].items():
        assert metrics[name] == pytest.approx(value, rel=2e-4, abs=1e-6), name


def test_a_fresh_critic_takes_the_layers_of_what_it_is_given(saved, truth):
    head, samples = head_weight(), rollout()
    with torch.no_grad():
        expected = {
            "from policy": truth["values"],
            "from hf": [hf_values(load_model(saved["other"]), head, s.tokens).numpy() for s in samples],
        }
    expected["from critic"] = saved["saved"]
    for name, rows in expected.items():
        done, values = saved[name]
        assert done == 0
        for ours, theirs in zip(values, rows, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=0, err_msg=name)


def test_a_critic_is_no_policy(saved):
    assert "is a critic's and cannot continue as a policy" in saved["refused"]
