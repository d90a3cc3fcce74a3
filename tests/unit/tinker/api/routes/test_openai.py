"""OpenAI's client, unmodified, on the same samplers (slime_like.tinker.api.chat_bodies)."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
import tinker
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast

from slime_like.tinker.api.settings import ApiSettings, ServedModel
from tests.helpers.tinker_app import Served, serve
from tests.helpers.tinker_bigrams import BASE, END, VOCABULARY, base_table, log_softmax

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}{% if add_generation_prompt %}w9{% endif %}"


def save_tokenizer(folder: Path) -> None:
    """w0 … w31, by white space; w0 ends."""
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w1"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w0", chat_template=TEMPLATE).save_pretrained(folder)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("openai")
    save_tokenizer(folder / "tokenizer")
    model = ServedModel(name=BASE, context_length=64, tokenizer=str(folder / "tokenizer"))
    with serve(folder, ApiSettings(models=(model,), answer_s=2)) as running:
        yield running


@pytest.fixture
def client(served: Served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="tml-local", max_retries=0, timeout=20) as one:
        yield one


def likeliest(start: int, count: int, table: np.ndarray | None = None) -> list[int]:
    """Token by token from log p, until the end."""
    log_probs = log_softmax(base_table() if table is None else table)
    tokens: list[int] = []
    while len(tokens) < count and END not in tokens:
        tokens.append(int(log_probs[tokens[-1] if tokens else start].argmax()))
    return tokens


def text(tokens: list[int]) -> str:
    return " ".join(f"w{token}" for token in tokens if token != END)


ASKED = [{"role": "user", "content": "w3 w4"}]


def test_an_answer_to_messages(client):
    answer = client.chat.completions.create(
        model=BASE, messages=ASKED, temperature=0, max_tokens=5, logprobs=True, top_logprobs=2
    )
    expected = likeliest(9, 5)  # the template ends with w9
    (choice,) = answer.choices
    assert choice.message.content == text(expected)
    assert choice.finish_reason == ("stop" if END in expected else "length")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, len(expected))
    log_probs = log_softmax(base_table())
    for before, token, entry in zip([9, *expected], expected, choice.logprobs.content, strict=False):
        assert entry.token == f"w{token}" and entry.logprob == pytest.approx(log_probs[before, token], abs=1e-6)
        assert [top.token for top in entry.top_logprobs] == [f"w{i}" for i in np.argsort(-log_probs[before])[:2]]


def test_several_answers_and_a_stop_text(client):
    answer = client.chat.completions.create(model=BASE, messages=ASKED, n=3, seed=1, max_tokens=4)
    assert len(answer.choices) == 3 and [choice.index for choice in answer.choices] == [0, 1, 2]
    whole = text(likeliest(9, 5))
    stop = whole.split()[2]
    cut = client.chat.completions.create(model=BASE, messages=ASKED, temperature=0, max_tokens=5, stop=stop)
    assert cut.choices[0].message.content == whole.partition(stop)[0]


def test_a_stream_has_the_same_text(client):
    options = {"model": BASE, "messages": ASKED, "temperature": 0, "max_tokens": 5}
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    deltas = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(choice.delta.content or "" for choice in deltas) == whole.choices[0].message.content
    assert deltas[0].delta.role == "assistant" and deltas[-1].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].usage == whole.usage


def test_completions_of_texts_and_of_tokens(client):
    by_text = client.completions.create(model=BASE, prompt=["w5 w6", "w7"], temperature=0, max_tokens=3, logprobs=1)
    assert [choice.text for choice in by_text.choices] == [text(likeliest(6, 3)), text(likeliest(7, 3))]
    assert by_text.choices[0].logprobs.tokens == [f"w{token}" for token in likeliest(6, 3)]
    by_tokens = client.completions.create(model=BASE, prompt=[5, 6], temperature=0, max_tokens=3)
    assert by_tokens.choices[0].text == by_text.choices[0].text
    streamed = client.completions.create(model=BASE, prompt=[5, 6], temperature=0, max_tokens=3, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == by_text.choices[0].text


def test_trained_weights_by_their_path(client, served, monkeypatch):
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    row = tinker.Datum(
        model_input=tinker.ModelInput.from_ints([9]), loss_fn_inputs={"target_tokens": [20], "weights": [1.0]}
    )
    with tinker.ServiceClient(base_url=served.url, api_key="tml-local") as service:
        training = service.create_lora_training_client(base_model=BASE, rank=2)
        training.forward_backward([row], "cross_entropy").result()
        training.optim_step(tinker.AdamParams(learning_rate=50.0)).result()
        path = training.save_weights_for_sampler("chat").result().path
    answer = client.chat.completions.create(model=path, messages=ASKED, temperature=0, max_tokens=1)
    assert answer.choices[0].message.content == "w20" != text(likeliest(9, 1))
    assert {BASE, path} <= {model.id for model in client.models.list()}
    state = path.replace("sampler_weights", "weights")
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model=state, messages=ASKED)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"model": "other"}, "'other' is not served for sampling; bigrams is"),
        ({"messages": []}, "messages"),
        ({"temperature": -1.0}, "temperature: a number from 0 to 100"),
        ({"n": 0}, "n: a whole number from 1"),
        ({"response_format": {"type": "json_object"}}, "response_format is not done here"),
        ({"frequency_penalty": 0.5}, "frequency_penalty is not done here"),
        ({"stop": ["a"] * 17}, "at most 16 texts"),
        ({"tool_choice": "required"}, "only auto and none"),
    ],
)
def test_what_is_not_done_is_said(client, more: dict, message: str):
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**({"model": BASE, "messages": ASKED} | more))
    assert message in refused.value.message


@pytest.mark.slow
def test_a_client_that_leaves_or_waits_too_long_is_cancelled(client, served):
    before = served.service.num_cancelled
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.5).completions.create(model=BASE, prompt=[31], max_tokens=1)
    deadline = time.monotonic() + 10
    while served.service.num_cancelled == before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert served.service.num_cancelled == before + 1
    with pytest.raises(openai.InternalServerError, match="no answer within 2 s: held by the test"):
        client.completions.create(model=BASE, prompt=[31], max_tokens=1)
    assert served.service.num_cancelled == before + 2


def test_a_session_is_shared_until_it_ends(client, served):
    def sessions() -> list[str]:
        return httpx.get(f"{served.url}/api/v1/sessions?limit=100").json()["sessions"]

    def ask() -> None:
        client.completions.create(model=BASE, prompt=[3], max_tokens=1, temperature=0)

    ask()
    before = sessions()
    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sessions() == before
    for session in before:
        httpx.post(f"{served.url}/api/v1/sessions/{session}/finish", json={})
    ask()
    assert len(sessions()) == len(before) + 1
