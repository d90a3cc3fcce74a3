"""External engines: what they are asked, what must agree, what is said when one is not there or dies."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import socket
import subprocess
import time

import pytest
from sglang_backend.fake_http import serve

from slime_like.config.quantisation import SCHEMES, engine_flags
from slime_like.errors import EngineError
from slime_like.records import EngineEndpoint
from slime_like.sglang_backend.external_server import (
    ExternalServer,
    HealthWatch,
    disagreements,
    inspect_server,
    quantisation_disagreements,
)
from slime_like.utils.net import free_port

CONFIG = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 64,
    "vocab_size": 320,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
MODEL = {
    "model_path": "/far/away/model",
    "is_generation": True,
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "weight_version": "default",
}
INFO = {"model_path": "/far/away/model", "tp_size": 2, "pp_size": 2, "dp_size": 1, "dtype": "bfloat16",
    "context_length": None, "version": "0.5.23",
        "host": "0.0.0.0", "port": 1, "base_gpu_id": 3, "api_key": "must-not-be-kept"}  # fmt: skip
ANSWERS = {
    "/model_info": (200, MODEL),
    "/server_info": (200, INFO),
    "/v1/models": (200, {"data": [{"id": "m", "max_model_len": 4096}]}),
}


def checkpoint(folder, **changes):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    return str(folder)


def server_of(url="http://far:1", **changes) -> ExternalServer:
    usual = {
        "model_path": "/far/away/model",
        "dtype": "bfloat16",
        "context_length": 4096,
        "tp_size": 1,
        "pp_size": 1,
        "dp_size": 1,
        "num_gpus": 1,
    }
    return ExternalServer(
        url=url,
        **(usual | {"version": "0.5.23", "model_type": "qwen3", "architectures": ("Qwen3ForCausalLM",)} | changes),
    )


# What a server is asked


def test_facts_of_a_server():
    with serve(ANSWERS) as fake:
        server = inspect_server(fake.url, None, 5)
        assert (server.url, server.model_path, server.dtype, server.version) == (
            fake.url,
            "/far/away/model",
            "bfloat16",
            "0.5.23",
        )
        assert (server.tp_size, server.pp_size, server.dp_size, server.num_gpus, server.context_length) == (
            2,
            2,
            1,
            4,
            4096,
        )
        assert "must-not-be-kept" not in repr(server)
        assert {method for method, _, _ in fake.calls} == {"GET"}, "a server is only asked"


@pytest.mark.parametrize(
    ("more", "gpus"), [({"dp_size": 2}, 8), ({"dp_size": 2, "enable_dp_attention": True}, 4), ({"pp_size": None}, 2)]
)
def test_gpus_of_a_server(more, gpus):
    with serve(ANSWERS | {"/server_info": (200, INFO | more)}) as fake:
        assert inspect_server(fake.url, None, 5).num_gpus == gpus


def test_older_names_of_paths_and_no_list_of_models():
    with serve({"/get_model_info": (200, MODEL), "/get_server_info": (200, INFO | {"context_length": 2048})}) as fake:
        server = inspect_server(fake.url, None, 5)
        assert (server.tp_size, server.context_length) == (2, 2048)


def test_model_path_is_the_one_of_the_start():
    """A weight update from disk moves /model_info's path to a folder of weights."""
    with serve(ANSWERS | {"/model_info": (200, MODEL | {"model_path": "/run/weights/version-00000007"})}) as fake:
        assert inspect_server(fake.url, None, 5).model_path == "/far/away/model"


def test_nobody_there():
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(EngineError, match=f"external engine at {url} cannot be reached: .*refused.*Is it started"):
        inspect_server(url, None, 5)


def test_one_that_never_answers():
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        started = time.monotonic()
        with pytest.raises(EngineError, match="cannot be reached: client waited 0 s .* during GET /model_info"):
            inspect_server(f"http://127.0.0.1:{deaf.getsockname()[1]}", None, 0.3)
        assert time.monotonic() - started < 3


@pytest.mark.parametrize(
    ("key", "words"), [("secret-wrong", "refuses the API key in"), (None, "asks for an API key, but none is in")]
)
def test_wrong_key_names_the_variable_and_not_the_key(key, words):
    with serve(ANSWERS, api_key="right") as fake:
        with pytest.raises(
            EngineError, match=words + " the environment variable MY_KEY .401.. Fix: export MY_KEY="
        ) as caught:
            inspect_server(fake.url, key, 5, key_variable="MY_KEY")
        assert "secret-wrong" not in str(caught.value)
        assert inspect_server(fake.url, "right", 5).tp_size == 2


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ({}, "is no SGLang server"),
        ({"/model_info": (200, "<html>"), "/server_info": (200, "<html>")}, "not as an SGLang server does"),
        ({"/model_info": (200, {}), "/server_info": (200, {})}, "not as an SGLang server does"),
        ({"/model_info": (503, "starting")}, "is no SGLang server .*503"),
        (ANSWERS | {"/model_info": (200, MODEL | {"is_generation": False})}, "does not generate"),
    ],
)
def test_something_else_listens_there(answers, words):
    with serve(answers) as fake, pytest.raises(EngineError, match=words) as caught:
        inspect_server(fake.url, None, 5)
    assert fake.url in str(caught.value)


def test_ipv6():
    with serve(ANSWERS, host="::1") as fake:
        assert re.fullmatch(r"http://\[::1\]:\d+", fake.url)
        assert inspect_server(fake.url, None, 5).url == fake.url


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A self-signed certificate for 127.0.0.1 with its key, in one PEM file."""
    if not shutil.which("openssl"):
        pytest.skip("needs the openssl command to make a certificate")
    folder = tmp_path_factory.mktemp("tls")
    key, cert = folder / "key.pem", folder / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
        "-days", "2", "-subj", "/CN=test",
               "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", cert]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, timeout=30)
    both = folder / "both.pem"
    both.write_text(key.read_text() + cert.read_text())
    return both


def test_https_is_verified_and_a_certificate_can_be_trusted(certificate, monkeypatch):
    for name in ("REQUESTS_CA_BUNDLE", "SSL_CERT_FILE"):
        monkeypatch.delenv(name, raising=False)
    with serve(ANSWERS, api_key="right", certificate=certificate) as fake:
        with pytest.raises(
            EngineError,
            match="(?s)certificate of the external engine at https://.* is not trusted.*export REQUESTS_CA_BUNDLE=",
        ):
            inspect_server(fake.url, "right", 5)
        assert fake.calls == [], "no key is shown to a server that is not trusted"
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(certificate.parent / "cert.pem"))
        assert inspect_server(fake.url, "right", 5).url.startswith("https://127.0.0.1:")


def test_https_asked_of_a_plain_server():
    with serve(ANSWERS) as fake, pytest.raises(EngineError, match="It speaks plain http. Fix: http://"):
        inspect_server(fake.url.replace("http:", "https:"), None, 5)


# What must agree


def test_the_same_model_in_another_folder_on_another_machine_agrees(tmp_path):
    assert (
        disagreements(server_of(), hf_checkpoint=checkpoint(tmp_path / "here"), dtype="bfloat16", needed_context=4096)
        == []
    )


def test_what_a_server_does_not_tell_is_not_held_against_it(tmp_path):
    silent = server_of(model_type=None, architectures=(), dtype=None, context_length=None)
    assert (
        disagreements(silent, hf_checkpoint=checkpoint(tmp_path / "here"), dtype="bfloat16", needed_context=10**6) == []
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "llama"}, "model_type llama, not qwen3"),
        ({"architectures": ("LlamaForCausalLM",)}, "architectures .'LlamaForCausalLM'., not .'Qwen3ForCausalLM'."),
        (
            {"hf_config": CONFIG | {"hidden_size": 128}},
            "hidden_size 128, not 64. It was started with --model-path /far/away/model",
        ),
        ({"hf_config": CONFIG | {"tie_word_embeddings": False}}, "tie_word_embeddings False, not True"),
        ({"dtype": "float16"}, "computes in float16, the trainer in bfloat16.*--dtype bfloat16"),
        ({"context_length": 1023}, "takes 1023 tokens.*1024 are needed.*--context-length 1024"),
    ],
)
def test_what_must_agree(tmp_path, changes, words):
    (only,) = disagreements(
        server_of(**changes), hf_checkpoint=checkpoint(tmp_path / "here"), dtype="bfloat16", needed_context=1024
    )
    assert "http://far:1" in only
    assert re.search(words, only), only


def test_every_disagreement_is_listed(tmp_path):
    problems = disagreements(
        server_of(model_type="llama", dtype="float32", context_length=8),
        hf_checkpoint=checkpoint(tmp_path / "here"),
        dtype="bfloat16",
        needed_context=9,
    )
    assert len(problems) == 3


@pytest.mark.parametrize(
    ("checkpoint_dtype", "trainer", "agrees"),
    [("bfloat16", "bfloat16", True), ("float32", "float32", False), ("float16", None, True)],
)
def test_number_format_that_was_left_to_the_checkpoint(tmp_path, checkpoint_dtype, trainer, agrees):
    folder = checkpoint(tmp_path / "here", dtype=checkpoint_dtype)
    assert (
        disagreements(server_of(dtype="auto"), hf_checkpoint=folder, dtype=trainer, needed_context=1) == []
    ) is agrees


def test_folder_that_is_visible_here_tells_the_size(tmp_path):
    theirs, ours = checkpoint(tmp_path / "theirs", hidden_size=128), checkpoint(tmp_path / "ours")
    with serve(ANSWERS | {"/server_info": (200, INFO | {"model_path": theirs})}) as fake:
        server = inspect_server(fake.url, None, 5)
    (only,) = disagreements(server, hf_checkpoint=ours, dtype=None, needed_context=1)
    assert "hidden_size 128, not 64" in only and theirs in only and ours in only


# Whether it lives


@contextlib.contextmanager
def watch(*urls, interval_s=0.05, failures=3):
    health = HealthWatch(
        [EngineEndpoint(index=i, url=url, external=True) for i, url in enumerate(urls)],
        interval_s=interval_s,
        failures=failures,
    )
    try:
        yield health
    finally:
        health.stop()


def wait_dead(watched: HealthWatch, seconds: float = 10) -> str:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            watched.check()
        except EngineError as error:
            return str(error)
        time.sleep(0.01)
    raise AssertionError(f"not found dead within {seconds} s")


def test_dead_engine_is_named_and_stays_dead():
    with serve(ANSWERS) as alive, serve(dict(ANSWERS)) as dying, watch(alive.url, dying.url) as watched:
        time.sleep(0.3)
        watched.check()
        dying.answers["/model_info"] = (500, "it broke")
        text = wait_dead(watched)
        assert re.search(
            rf"external engine 1 at {dying.url} is dead: no answer since \d\d:\d\d:\d\d .3 requests.*answered 500: it"
            r" broke",
            text,
        )
        assert alive.url not in text
        dying.answers["/model_info"] = (200, MODEL)
        time.sleep(0.2)
        with pytest.raises(EngineError, match=dying.url):
            watched.check()


def test_a_short_gap_is_forgiven():
    answers = iter([500, 500, 200] * 10**6)
    with (
        serve({"/model_info": lambda body: (next(answers), MODEL)}) as fake,
        watch(fake.url, interval_s=0.02) as watched,
    ):
        while len(fake.calls) < 12:
            time.sleep(0.02)
        watched.check()


def test_generation_that_is_paused_is_not_death():
    """Only the path that answers while paused is asked; /health does not."""
    with serve(ANSWERS | {"/health": (503, "paused")}) as fake, watch(fake.url) as watched:
        time.sleep(0.5)
        watched.check()
        assert set(fake.paths) == {"/model_info"}


def test_watch_ends():
    with serve(ANSWERS) as fake, watch(fake.url) as watched:
        watched.stop()
        count = len(fake.calls)
        time.sleep(0.2)
        assert len(fake.calls) == count


def test_routed_experts_are_told_only_by_a_server_started_for_it(tmp_path):
    folder = checkpoint(tmp_path / "here")
    with (
        serve(ANSWERS) as silent,
        serve(ANSWERS | {"/server_info": (200, INFO | {"enable_return_routed_experts": True})}) as telling,
    ):
        servers = [inspect_server(fake.url, None, 5) for fake in (silent, telling)]
    problems = [
        disagreements(s, hf_checkpoint=folder, dtype="bfloat16", needed_context=1, routed_experts=True) for s in servers
    ]
    assert len(problems[0]) == 1 and "--enable-return-routed-experts" in problems[0][0]
    assert problems[1] == []
    assert disagreements(servers[0], hf_checkpoint=folder, dtype="bfloat16", needed_context=1) == []


INT8, FP8 = SCHEMES["int8"], SCHEMES["fp8"]


@pytest.mark.parametrize(
    ("info", "scheme", "expected"),
    [
        ({}, None, None),
        ({}, INT8, "keeps its weights as they are, not as --rollout-quantization int8 sends them"),
        (engine_flags(INT8, {}), INT8, None),
        (engine_flags(INT8, {}), FP8, "--rollout-quantization fp8 sends them. Fix: start it with --load-format dummy"),
        (engine_flags(FP8, {}), SCHEMES["fp8-per-tensor"], None),
        (engine_flags(FP8, {}), None, "would take those that it is sent for what they are not"),
        ({"quantization": "fp8"}, None, "would take those that it is sent for what they are not"),
        ({"quantization": "fp8"}, FP8, "{'quant_method': 'fp8'}, not as"),  # one number a matrix
    ],
)
def test_weights_in_another_form_than_they_are_sent_in(info, scheme, expected):
    with serve(ANSWERS | {"/server_info": (200, INFO | info)}) as fake:
        problems = quantisation_disagreements(inspect_server(fake.url, None, 5), scheme)
    assert len(problems) == (expected is not None)
    if expected is not None:
        assert expected in problems[0] and fake.url in problems[0]
