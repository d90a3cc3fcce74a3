"""The client library, unmodified, against the app over HTTP; its numbers are those of the bigrams' own formulas.

It is what tests slime_like.tinker.api.routes, slime_like.tinker.api.context,
slime_like.tinker.api.skipped, slime_like.tinker.api.external and slime_like.tinker.store.listings.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import httpx
import numpy as np
import pytest
import tinker
import torch
from safetensors.numpy import load_file
from tinker import types

from slime_like.tinker.api.settings import ApiSettings
from slime_like.tinker.errors import Refused
from slime_like.tinker.records import Kind
from tests.helpers.tinker_app import MODEL, Served, serve
from tests.helpers.tinker_bigrams import BASE, HELD, base_table, log_softmax
from tests.helpers.tinker_service import plain_losses, rows

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

TOKENS, TARGETS, WEIGHTS = [1, 2, 3], [2, 3, 4], [0.0, 1.0, 0.5]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch, serve(tmp_path_factory.mktemp("tinker")) as running:
        patch.setenv("TINKER_TELEMETRY", "0")
        yield running


@pytest.fixture(scope="module")
def client(served: Served):
    with tinker.ServiceClient(base_url=served.url, api_key="tml-local") as of_all:
        yield of_all


def datum(**inputs) -> types.Datum:
    return types.Datum(model_input=types.ModelInput.from_ints(TOKENS), loss_fn_inputs=inputs)


def supervised() -> types.Datum:
    return datum(target_tokens=TARGETS, weights=WEIGHTS)


def trained_table(num_steps: int, learning_rate: float) -> tuple[np.ndarray, list[float]]:
    """W after steps of cross entropy on supervised(), and the loss before each: plain loops in float64."""
    table, losses = base_table(), []
    for _ in range(num_steps):
        chances = np.exp(log_softmax(table))
        losses.append(-sum(w * np.log(chances[a, b]) for a, b, w in zip(TOKENS, TARGETS, WEIGHTS, strict=True)))
        gradient = np.zeros_like(table)
        for a, b, w in zip(TOKENS, TARGETS, WEIGHTS, strict=True):
            gradient[a] += w * chances[a]
            gradient[a, b] -= w
        table = table - learning_rate * gradient
    return table, losses


def test_supervised_steps_have_the_losses_of_the_formulas(client):
    training = client.create_lora_training_client(base_model=BASE, rank=4)
    futures = []
    for _ in range(4):  # pipelined, as the library's users do: the order is that of seq_id
        futures.append(training.forward_backward([supervised()], "cross_entropy"))
        training.optim_step(types.AdamParams(learning_rate=0.5))
    results = [future.result() for future in futures]
    table, losses = trained_table(4, 0.5)
    assert [result.metrics["loss:sum"] for result in results] == pytest.approx(losses, abs=1e-6)
    assert losses[-1] < losses[0]
    forward = training.forward([supervised()], "cross_entropy").result()
    ours = log_softmax(table)[TOKENS, TARGETS]
    np.testing.assert_allclose(forward.loss_fn_outputs[0]["logprobs"].to_numpy(), ours, atol=1e-6)
    info = training.get_info()
    assert (info.is_lora, info.lora_rank, info.model_data.tokenizer_id) == (True, 4, MODEL.tokenizer)


def test_a_pass_in_many_requests_is_one_pass(client, served):
    training = client.create_lora_training_client(base_model=BASE, rank=2)
    before = served.service.num_runs[Kind.FORWARD_BACKWARD]
    many = training.forward_backward([supervised() for _ in range(2500)], "cross_entropy").result()
    assert served.service.num_runs[Kind.FORWARD_BACKWARD] == before + 3  # 1024 datums a request
    assert len(many.loss_fn_outputs) == 2500
    assert many.metrics["loss:sum"] == pytest.approx(2500 * trained_table(1, 0.5)[1][0], rel=1e-6)


def test_a_policy_gradient_reads_log_probs_and_advantages(client):
    training = client.create_lora_training_client(base_model=BASE, rank=2)
    sampled, advantages = np.array([-1.0, -2.0, -3.0], np.float32), np.array([1.0, -1.0, 2.0], np.float32)
    rows = [datum(target_tokens=TARGETS, logprobs=sampled.tolist(), advantages=advantages.tolist())]
    result = training.forward_backward(rows, "importance_sampling").result()
    ratio = np.exp(log_softmax(base_table())[TOKENS, TARGETS] - sampled)
    assert result.metrics["loss:sum"] == pytest.approx(float(-(ratio * advantages).sum()), abs=1e-6)


def test_a_loss_of_the_clients_own(client):
    training = client.create_lora_training_client(base_model=BASE, rank=2)

    def squares(data, logprobs):
        loss = sum((lp * lp).sum() for lp in logprobs)
        return loss, {"squares": float(loss.detach())}

    result = training.forward_backward_custom([supervised()], squares).result()
    logprobs = log_softmax(base_table())[TOKENS, TARGETS]
    assert result.metrics["squares"] == pytest.approx(float((logprobs**2).sum()), abs=1e-5)
    training.optim_step(types.AdamParams(learning_rate=0.1)).result()
    after = training.forward([supervised()], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()
    # d(sum lp^2)/dW[a] = 2 lp (onehot(b) - p[a])
    table = base_table()
    for a, b, lp in zip(TOKENS, TARGETS, logprobs, strict=True):
        table[a] -= 0.1 * 2 * lp * (np.eye(len(table))[b] - np.exp(log_softmax(base_table()[a])))
    np.testing.assert_allclose(after, log_softmax(table)[TOKENS, TARGETS], atol=1e-5)


def test_sparse_targets_of_several_columns(client):

    targets = torch.tensor([[2, 5, 0, 0, 0, 0], [3, 0, 0, 0, 0, 0], [4, 0, 0, 0, 0, 7]])
    weights = (targets > 0).float()
    row = datum(target_tokens=targets, weights=weights)
    assert row.loss_fn_inputs["target_tokens"].sparse_crow_indices is not None
    training = client.create_lora_training_client(base_model=BASE, rank=2)
    result = training.forward([row], "cross_entropy").result()
    ours = log_softmax(base_table())[np.array(TOKENS)[:, None], targets.numpy()]
    np.testing.assert_allclose(result.loss_fn_outputs[0]["logprobs"].to_numpy(), ours, atol=1e-6)
    assert result.metrics["loss:sum"] == pytest.approx(-float((ours * weights.numpy()).sum()), abs=1e-5)


def test_save_load_and_go_on_from_a_state(client):
    training = client.create_lora_training_client(base_model=BASE, rank=8, seed=3, train_mlp=False)
    training.forward_backward([supervised()], "cross_entropy").result()
    training.optim_step(types.AdamParams(learning_rate=0.5)).result()
    path = training.save_state("first").result().path
    assert path == f"tinker://{training.model_id}/weights/first"
    training.forward_backward([supervised()], "cross_entropy").result()
    training.optim_step(types.AdamParams(learning_rate=0.5)).result()
    _, losses = trained_table(3, 0.5)

    def loss(of) -> float:
        return of.forward([supervised()], "cross_entropy").result().metrics["loss:sum"]

    assert loss(training) == pytest.approx(losses[2], abs=1e-6)
    training.load_state(path).result()
    assert loss(training) == pytest.approx(losses[1], abs=1e-6)
    other = client.create_training_client_from_state_with_optimizer(path)
    assert loss(other) == pytest.approx(losses[1], abs=1e-6)
    assert other.get_info().lora_rank == 8
    with pytest.raises(tinker.APIStatusError, match="no optimizer state"):
        sampler_path = training.save_weights_for_sampler("first").result().path
        client.create_training_client_from_state_with_optimizer(sampler_path).get_info()


def test_samples_and_their_log_probs(client):
    training = client.create_lora_training_client(base_model=BASE, rank=2)
    training.forward_backward([supervised()], "cross_entropy").result()
    training.optim_step(types.AdamParams(learning_rate=0.5)).result()
    ours = log_softmax(trained_table(1, 0.5)[0])
    prompt = types.ModelInput.from_ints([1, 2, 3])
    for sampler in (
        training.save_weights_and_get_sampling_client("named"),
        training.save_weights_and_get_sampling_client(),
        client.create_sampling_client(model_path=training.save_weights_for_sampler("kept").result().path),
    ):
        assert sampler.get_base_model() == BASE
        params = types.SamplingParams(max_tokens=6, seed=5, stop=[])
        answer = sampler.sample(
            prompt,
            num_samples=4,
            sampling_params=params,
            include_prompt_logprobs=True,
            topk_prompt_logprobs=3,
        ).result()
        assert len(answer.sequences) == 4 and len({s.sequence_id for s in answer.sequences}) == 4
        for sequence in answer.sequences:
            assert sequence.stop_reason == "length" and len(sequence.tokens) == 6
            np.testing.assert_allclose(sequence.logprobs, ours[[3, *sequence.tokens[:-1]], sequence.tokens], atol=1e-6)
        first, *others = answer.prompt_logprobs
        assert first is None and others == pytest.approx(ours[[1, 2], [2, 3]].tolist(), abs=1e-6)
        assert answer.topk_prompt_logprobs[0] is None
        for token, pairs in zip([1, 2], answer.topk_prompt_logprobs[1:], strict=True):
            assert [pair[0] for pair in pairs] == np.argsort(-ours[token])[:3].tolist()
        assert sampler.compute_logprobs(prompt).result()[1:] == pytest.approx(ours[[1, 2], [2, 3]].tolist(), abs=1e-6)


def test_the_library_logs_that_the_output_layer_is_not_trained(served: Served, caplog):
    with tinker.ServiceClient(base_url=served.url, api_key="tml-local") as service, caplog.at_level("WARNING"):
        training = service.create_lora_training_client(base_model=BASE, rank=2)
        assert training.get_info().is_lora
    assert any("train_unembed=True has no effect" in record.getMessage() for record in caplog.records)


def test_mistakes_of_users_are_told_at_once(client):
    with pytest.raises(tinker.BadRequestError, match=f"'other' is not served for training; {BASE} is"):
        client.create_lora_training_client(base_model="other", rank=2).get_info()
    training = client.create_lora_training_client(base_model=BASE, rank=2)
    row = types.Datum(
        model_input=types.ModelInput.from_ints([1]), loss_fn_inputs={"target_tokens": [99], "weights": [1.0]}
    )
    with pytest.raises(tinker.RequestFailedError, match="beyond the vocabulary") as failed:
        training.forward_backward([row], "cross_entropy").result()
    assert failed.value.category is tinker.types.RequestErrorCategory.User
    began = time.monotonic()
    with pytest.raises(tinker.NotFoundError):
        client.create_sampling_client(model_path=f"tinker://{training.model_id}/sampler_weights/none").get_base_model()
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("real", [False, True], ids=["bigrams", "service"])
def test_what_comes_after_a_refused_step_does_not_wait_for_it(tmp_path, real: bool):
    with (
        serve(tmp_path, real=real) as served,
        tinker.ServiceClient(base_url=served.url, api_key="tml-local") as client,
    ):
        training = client.create_lora_training_client(base_model=BASE, rank=2)
        before = training.forward([supervised()], "cross_entropy").result().metrics
        began = time.monotonic()
        nothing = datum(target_tokens=TARGETS, weights=[0.0, float("nan"), 0.0])
        with pytest.raises(tinker.BadRequestError, match="weights has a value that is not finite"):
            training.forward_backward([nothing], "cross_entropy").result()
        with pytest.raises(tinker.UnprocessableEntityError, match="learning_rate"):
            training.optim_step(types.AdamParams(learning_rate=-1.0)).result()
        with pytest.raises(tinker.UnprocessableEntityError, match="path"):
            training.save_state("../up").result()
        with pytest.raises(tinker.NotFoundError):
            training.load_state("tinker://another:train:0/weights/none").result()
        after = training.forward([supervised()], "cross_entropy").result(timeout=20).metrics
        assert after == before and time.monotonic() - began < 15


def test_the_servers_own_service_gives_the_numbers_of_a_plain_loop(tmp_path):
    seeds = [1, 2, 3]
    with (
        serve(tmp_path, real=True) as served,
        tinker.ServiceClient(base_url=served.url, api_key="tml-local") as client,
    ):
        training = client.create_lora_training_client(base_model=BASE, rank=8, seed=0)
        losses = []
        for seed in seeds:
            data = [
                types.Datum(
                    model_input=types.ModelInput.from_ints(row.tokens.tolist()),
                    loss_fn_inputs={"target_tokens": row.targets.tolist(), "weights": row.inputs["weights"].tolist()},
                )
                for row in rows(seed)
            ]
            step = training.forward_backward(data, "cross_entropy")
            training.optim_step(types.AdamParams(learning_rate=0.05))
            losses.append(step.result().metrics["loss:sum"])
        assert losses == pytest.approx(plain_losses(seeds), abs=1e-9)
        path = training.save_state("end").result().path
        again = client.create_training_client_from_state_with_optimizer(path)
        assert again.get_info().lora_rank == 8
        sampler = training.save_weights_and_get_sampling_client()
        params = types.SamplingParams(max_tokens=3, seed=1)
        answer = sampler.sample(types.ModelInput.from_ints([1, 2]), num_samples=2, sampling_params=params).result()
        assert len(answer.sequences) == 2


def test_too_much_at_once_is_asked_again(client, served):
    training = client.create_lora_training_client(base_model=BASE, rank=2)
    training.get_info()  # it is there
    served.service.refusal = Refused("later", status=429, retry_after_s=0.1)
    relief = threading.Timer(0.4, setattr, (served.service, "refusal", None))
    relief.start()
    future = training.forward([supervised()], "cross_entropy")
    relief.join()
    assert future.result(timeout=30).metrics["loss:sum"] == pytest.approx(trained_table(1, 0.5)[1][0], abs=1e-6)


def test_a_wait_that_was_given_up_is_cancelled(client, served):
    sampler = client.create_sampling_client(base_model=BASE)

    async def give_up() -> None:
        params = types.SamplingParams(max_tokens=1)
        task = asyncio.ensure_future(sampler.sample_async(types.ModelInput.from_ints([HELD]), 1, params))
        await asyncio.sleep(0.8)  # longer than one wait in the server: the answer was "try again"
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    before = served.service.num_cancelled
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        asyncio.run(give_up())
    deadline = time.monotonic() + 20
    while served.service.num_cancelled == before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert served.service.num_cancelled == before + 1


def test_a_request_that_is_sent_twice_is_done_once(served):
    with httpx.Client(base_url=served.url, headers={"X-API-Key": "tml-x", "X-Idempotency-Key": "once"}) as http:
        sessions = {http.post("/api/v1/create_session", json={}).json()["session_id"] for _ in range(2)}
        assert len(sessions) == 1
        body = {"session_id": sessions.pop(), "model_seq_id": 0, "base_model": BASE, "lora_config": {"rank": 2}}
        first, second = (http.post("/api/v1/create_model", json=body).json() for _ in range(2))
        assert first == second
        step = {"model_id": first["model_id"], "seq_id": 1, "adam_params": {"learning_rate": 0.1}}
        before = served.service.num_runs.get(Kind.OPTIM_STEP, 0)
        ids = {http.post("/api/v1/optim_step", json=step).json()["request_id"] for _ in range(3)}
        assert len(ids) == 1 and served.service.num_runs[Kind.OPTIM_STEP] == before + 1


def test_what_a_tenant_has_is_listed_and_changed(client):
    rest = client.create_rest_client()
    training = client.create_lora_training_client(base_model=BASE, rank=4, user_metadata={"why": "a test"})
    state = training.save_state("one").result().path
    weights = training.save_weights_for_sampler("two").result().path
    run = rest.get_training_run(training.model_id).result()
    assert (run.base_model, run.lora_rank, run.user_metadata) == (BASE, 4, {"why": "a test"})
    assert run.last_checkpoint.tinker_path == state and run.last_sampler_checkpoint.tinker_path == weights
    runs = rest.list_training_runs(limit=500).result()
    assert training.model_id in [one.training_run_id for one in runs.training_runs]
    assert runs.cursor.total_count == len(runs.training_runs)
    listed = rest.list_checkpoints(training.model_id).result().checkpoints
    assert {c.checkpoint_id for c in listed} == {"weights/one", "sampler_weights/two"}
    assert weights in [c.tinker_path for c in rest.list_user_checkpoints().result().checkpoints]
    info = rest.get_weights_info_by_tinker_path(weights).result()
    assert (info.base_model, info.lora_rank, info.train_mlp, info.train_unembed) == (BASE, 4, True, False)
    rest.publish_checkpoint_from_tinker_path(weights).result()
    rest.set_checkpoint_ttl_from_tinker_path(weights, 3600).result()
    (changed,) = [c for c in rest.list_checkpoints(training.model_id).result().checkpoints if c.tinker_path == weights]
    assert changed.public and 3500 < changed.expires_at.timestamp() - time.time() < 3700
    rest.unpublish_checkpoint_from_tinker_path(weights).result()
    rest.delete_checkpoint_from_tinker_path(weights).result()
    assert [c.tinker_path for c in rest.list_checkpoints(training.model_id).result().checkpoints] == [state]
    session = training.model_id.partition(":")[0]
    assert session in rest.list_sessions(limit=500).result().sessions
    assert training.model_id in rest.get_session(session).result().training_run_ids
    with pytest.raises(tinker.NotFoundError):
        rest.get_weights_info_by_tinker_path(weights).result()


def test_files_of_weights_by_links(client):
    training = client.create_lora_training_client(base_model=BASE, rank=4)
    path = training.save_weights_external("files").result().path
    assert path == f"tinker://{training.model_id}/external_weights/files"
    rest = client.create_rest_client()
    links = rest.get_external_weights_urls(path).result()
    assert set(links.urls) == {"adapter_config.json", "adapter_model.safetensors"}
    assert httpx.get(links.urls["adapter_config.json"]).json() == {"peft_type": "LORA"}
    assert (np.frombuffer(httpx.get(links.urls["adapter_model.safetensors"]).content, np.uint8) > 0).any()
    rest.delete_checkpoint_from_tinker_path(path).result()
    with pytest.raises(tinker.NotFoundError):
        rest.get_external_weights_urls(path).result()
    with pytest.raises(tinker.BadRequestError, match="does not encrypt"):
        training.save_weights_external("more", age_encryption_recipients=["age1"]).result()


@pytest.mark.slow
def test_the_librarys_own_command_downloads_a_state(client, served, tmp_path):
    training = client.create_lora_training_client(base_model=BASE, rank=4)
    path = training.save_state("kept").result().path
    command = [str(Path(sys.executable).with_name("tinker")), "checkpoint", "download", path, "-o", str(tmp_path)]
    environment = {**os.environ, "TINKER_BASE_URL": served.url, "TINKER_API_KEY": "tml-local"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (adapter,) = tmp_path.rglob("adapter_model.safetensors")
    assert (load_file(adapter)["table"] == base_table()).all()


def test_a_session_that_has_ended_takes_nothing(served):
    with tinker.ServiceClient(base_url=served.url, api_key="tml-local") as client:
        training = client.create_lora_training_client(base_model=BASE, rank=2)
        session = training.model_id.partition(":")[0]
    with httpx.Client(base_url=served.url, headers={"X-API-Key": "tml-x"}) as http:
        assert http.post("/api/v1/session_heartbeat", json={"session_id": session}).status_code == 410
        step = {"model_id": training.model_id, "seq_id": 9, "adam_params": {}}
        answer = http.post("/api/v1/optim_step", json=step)
        assert answer.status_code == 410 and "a new ServiceClient" in answer.json()["error"]


def test_a_large_answer_is_announced_first(tmp_path):
    settings = ApiSettings(models=(MODEL,), announce_bytes=1000)
    with serve(tmp_path, settings) as served, tinker.ServiceClient(base_url=served.url, api_key="tml-l") as client:
        training = client.create_lora_training_client(base_model=BASE, rank=2)
        result = training.forward([supervised() for _ in range(200)], "cross_entropy").result()
        assert len(result.loss_fn_outputs) == 200
