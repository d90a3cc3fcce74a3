"""`EngineClient`: the control requests of one SGLang server over HTTP; the same class for launched and external
engines.

Generation during rollouts goes through the router and is asynchronous; `generate` here is for probes.

Retry policy: a control request is sent once, since a second one could change an engine twice, and its failure is
raised; only flush_cache asks again, while requests are being wound down. Requests of a rollout are tried again in
rollout/asking.py.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import ssl
import time
import weakref
from collections.abc import Iterator
from typing import Any

import httpx

from slime_like.errors import EngineError, WaitTimeout
from slime_like.records import EngineEndpoint
from slime_like.sglang_backend.bodies import Body
from slime_like.utils.net import certificates, wait_until

_BODY_HEAD_CHARS = 500
_CONNECT_TIMEOUT_S = 10.0
#: How long an idle connection is used again: uvicorn closes them after five seconds.
_KEEP_S = 2.0


class EngineHttpError(EngineError):
    """An engine answered with an error status; `status` is None when it did not answer at all."""

    def __init__(self, message: str, status: int | None = None):
        self.message, self.status = message, status
        super().__init__(message)

    def __reduce__(self):
        return (EngineHttpError, (self.message, self.status))


class EngineClient:
    """One engine's control requests.

    Every method raises EngineError naming url, request, status and the head of the answer.
    Threads may share one client: connections are kept between requests, never shared by two that run.
    timeout_s: deadline of a request that names none; keep_s: how long an idle connection is used again. In seconds.
    """

    def __init__(self, endpoint: EngineEndpoint, timeout_s: float = 60.0, *, keep_s: float = _KEEP_S):
        self.endpoint = endpoint
        self.timeout_s = timeout_s
        self._keep_s = keep_s
        self._idle = collections.deque([_http_client(endpoint, keep_s)])  # its append and pop need no lock
        weakref.finalize(self, lambda idle: list(map(httpx.Client.close, idle)), self._idle)  # connections go with us
        self._has_update_session: bool | None = None

    @property
    def url(self) -> str:
        """The server's address."""
        return self.endpoint.url

    # Liveness and facts

    def health(self, timeout_s: float | None = None) -> bool:
        """Whether the server answers and says that it is healthy. Never raises."""
        try:
            self._request("GET", "/health", timeout_s=timeout_s)
        except (EngineError, WaitTimeout):
            return False
        return True

    def server_info(self, timeout_s: float | None = None) -> dict:
        """What the server was started with (`tp_size`, `version`, …); the scheduler is asked for its part."""
        return self._first_found("GET", ("/server_info", "/get_server_info"), timeout_s)

    def model_info(self) -> dict:
        """`model_path`, `weight_version`, …"""
        return self._first_found("GET", ("/model_info", "/get_model_info"))

    def models(self) -> dict:
        """/v1/models: under "data", each served model's `id` and `max_model_len`."""
        return self._request("GET", "/v1/models")

    def weight_version(self) -> str:
        """The version that the server reports; "default" until one was set."""
        info = self.model_info()
        if "weight_version" not in info:
            raise EngineError(
                f"engine {self.endpoint.index} at {self.url}: /model_info reports no weight_version; this SGLang is too"
                " old for weight sync"
            )
        return str(info["weight_version"])

    # Generation

    def generate(self, input_ids: list[int] | list[list[int]], sampling_params: dict, **more: Any) -> Any:
        """POST /generate; returns SGLang's answer (a list of them for a list of prompts)."""
        return self._request("POST", "/generate", {"input_ids": input_ids, "sampling_params": sampling_params, **more})

    def prompt_log_probs(
        self, prompts: list[list[int]], timeout_s: float | None = None, adapter: str | None = None
    ) -> list[list[float]]:
        """log p(tokens[t] | tokens[<t]) for t = 1 … T-1 of each prompt, at temperature 1, computed anew: no cached
        prefix is used. adapter: the name of those that count.
        """
        # Greedy, which SGLang computes at temperature 1: sampling would take a random number from those of the next
        # rollout.
        body = {
            "input_ids": prompts,
            "sampling_params": {"temperature": 0.0, "max_new_tokens": 1},
            "return_logprob": True,
            "logprob_start_len": 0,
        } | ({"lora_path": adapter} if adapter else {})
        answers = self._request("POST", "/generate", body, timeout_s)
        return [[item[0] for item in answer["meta_info"]["input_token_logprobs"][1:]] for answer in answers]

    def abort_all(self) -> None:
        """Abort every request; each returns what it has with finish reason "abort"."""
        self._request("POST", "/abort_request", {"rid": "", "abort_all": True})

    def pause_generation(self, mode: str) -> None:
        """Stop generating.

        "abort" ends running requests, "retract" keeps them and recomputes them later, "in_place" keeps their cache too.
        """
        self._request("POST", "/pause_generation", {"mode": mode})

    def continue_generation(self) -> None:
        """Generate again after a pause; harmless without one, and where SGLang knows no pause."""
        self._optional("/continue_generation")

    def flush_cache(self, deadline_s: float | None = None) -> None:
        """Forget cached prefixes. Tries again while requests are still being wound down.

        Raises WaitTimeout at the deadline.
        """
        deadline_s = self.timeout_s if deadline_s is None else deadline_s
        whom = f"engine {self.endpoint.index} at {self.url}"
        wait_until(
            lambda: self._flush_refusal(deadline_s),
            deadline_s=deadline_s,
            who="trainer",
            whom=whom,
            phase="flush cache",
        )

    def try_flush_cache(self) -> bool:
        """Forget cached prefixes, unless requests are running: then False."""
        return self._flush_refusal(self.timeout_s) is None

    def _flush_refusal(self, timeout_s: float) -> str | None:
        try:
            self._request("POST", "/flush_cache", {}, timeout_s=timeout_s)
        except EngineHttpError as error:
            if error.status != 400:
                raise
            return str(error)
        return None

    # Weights

    def begin_weight_update(self) -> None:
        """Open a weight update session, where this SGLang has them (0.5.23 does, and refuses weights without one).

        A session that a failed sync left open is closed first: nobody else will.
        """
        try:
            self._has_update_session = self._optional("/begin_weight_update")
        except EngineHttpError as error:
            if "already open" not in str(error):
                raise
            self._checked("/end_weight_update", {})
            self._has_update_session = self._optional("/begin_weight_update")

    def end_weight_update(self, timeout_s: float | None = None) -> None:
        """Close the session that `begin_weight_update` opened, if it opened one."""
        if self._has_update_session:
            self._checked("/end_weight_update", {}, timeout_s)
        self._has_update_session = None

    def close_weight_update(self) -> None:
        """Close the session that is open, whoever opened it; harmless where none is, or this SGLang has none."""
        try:
            self._checked("/end_weight_update", {})
        except EngineHttpError as error:
            if error.status != 404 and "begin_weight_update" not in str(error).partition(" answered ")[2]:
                raise
        self._has_update_session = None

    def num_requests(self) -> int:
        """Requests that run or wait in the server. Raises EngineError where it does not tell (/v1/loads)."""
        answer = self._request("GET", "/v1/loads")
        try:
            return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in answer["loads"])
        except (KeyError, TypeError) as error:
            what = f"engine {self.endpoint.index}: GET {self.url}/v1/loads"
            raise EngineError(
                f"{what} does not tell how many requests there are: {str(answer)[:_BODY_HEAD_CHARS]}"
            ) from error

    def update_weight_version(self, version: str, timeout_s: float | None = None) -> None:
        """Name the weights that the server holds now."""
        self._checked("/update_weight_version", {"new_version": version, "abort_all_requests": False}, timeout_s)

    def update_weights_from_tensor(
        self, serialized: list[str], *, load_format: str | None, timeout_s: float | None = None
    ) -> None:
        """Load tensors. serialized: one base64 text per tensor parallel rank. The caller flushes the cache."""
        body = {"serialized_named_tensors": serialized, "load_format": load_format, "flush_cache": False}
        self._checked("/update_weights_from_tensor", body, timeout_s)

    def update_weights_from_disk(self, model_path: str, timeout_s: float | None = None) -> None:
        """Load an HF folder that the server can see. The caller flushes the cache."""
        self._checked(
            "/update_weights_from_disk",
            {"model_path": model_path, "load_format": "safetensors", "flush_cache": False},
            timeout_s,
        )

    def init_weights_update_group(
        self,
        *,
        address: str,
        port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str,
        timeout_s: float,
    ) -> None:
        """Join a process group, whose rank 0 listens at address:port; returns when all of its ranks have joined."""
        body = {"master_address": address, "master_port": port, "rank_offset": rank_offset, "world_size": world_size}
        self._checked("/init_weights_update_group", {**body, "group_name": group_name, "backend": backend}, timeout_s)

    def update_weights_from_distributed(
        self,
        *,
        names: list[str],
        dtypes: list[str],
        shapes: list[list[int]],
        group_name: str,
        load_format: str | None,
        timeout_s: float,
    ) -> None:
        """Receive one broadcast of rank 0 and load it. The caller flushes the cache."""
        body = {"names": names, "dtypes": dtypes, "shapes": shapes, "group_name": group_name}
        more = {"load_format": load_format, "flush_cache": False}
        self._checked("/update_weights_from_distributed", body | more, timeout_s)

    def destroy_weights_update_group(self, group_name: str, timeout_s: float | None = None) -> None:
        """Leave a process group."""
        self._checked("/destroy_weights_update_group", {"group_name": group_name}, timeout_s)

    def weights_checksum(self) -> Any:
        """A checksum of the weights that the server holds, per rank; equal for equal weights and layout."""
        answer = self._checked("/weights_checker", {"action": "checksum"})
        return answer.get("per_engine_checksum") or answer.get("ranks")

    def parameter_names(self, timeout_s: float | None = None) -> list[str]:
        """Names of what the server's first rank holds, in its own layout; the server hashes all of it to answer."""
        answer = self._checked("/weights_checker", {"action": "checksum"}, timeout_s)
        return list(answer["ranks"][0]["checksums"])

    def buffer_checksums(self, name: str, timeout_s: float | None = None) -> dict[int, str]:
        """Tensor parallel rank -> checksum (16 hex digits) of one of the model's top-level buffers.

        The weights themselves are not read.
        """
        # Everything else is below one of these names, so that the checker skips it.
        answer = self._checked(
            "/weights_checker", {"action": "checksum", "skip_tensor_list": ["model.", "lm_head."]}, timeout_s
        )
        checksums = {}
        for rank in answer.get("ranks") or []:
            place = rank["parallelism_info"]  # a list, target model first, since SGLang checks draft models too
            checksums[(place[0] if isinstance(place, list) else place)["tp_rank"]] = rank["checksums"].get(name, "")
        return checksums

    # Memory

    def release_memory_occupation(self, tags: list[str]) -> None:
        """Give memory back: "kv_cache", "weights". The server must be idle.

        Without CUDA it is accepted and frees nothing.
        """
        self._request("POST", "/release_memory_occupation", {"tags": tags})

    def resume_memory_occupation(self, tags: list[str]) -> None:
        """Take memory again; weights come back without their contents."""
        self._request("POST", "/resume_memory_occupation", {"tags": tags})

    # How it is sent

    def _checked(self, path: str, body: dict | Body, timeout_s: float | None = None) -> dict:
        """POST; an answer that says `"success": false` is an error too."""
        answer = self._request("POST", path, body, timeout_s=timeout_s)
        if isinstance(answer, dict) and answer.get("success") is False:
            why = answer.get("message") or answer.get("error_message")  # the latter of adapters
            raise EngineHttpError(f"engine {self.endpoint.index}: POST {self.url}{path} refused: {why}", 200)
        return answer if isinstance(answer, dict) else {}

    def _optional(self, path: str) -> bool:
        """POST; False where the server does not know the path."""
        try:
            self._checked(path, {})
        except EngineHttpError as error:
            if error.status == 404:
                return False
            raise
        return True

    def _first_found(self, method: str, paths: tuple[str, ...], timeout_s: float | None = None) -> dict:
        """The answer of the first path that this SGLang knows: names have changed between versions."""
        for path in paths[:-1]:
            try:
                return self._request(method, path, timeout_s=timeout_s)
            except EngineHttpError as error:
                if error.status != 404:
                    raise
        return self._request(method, paths[-1], timeout_s=timeout_s)

    @contextlib.contextmanager
    def _http(self) -> Iterator[httpx.Client]:
        """A client that no other thread uses meanwhile: shared by 64, httpx 0.28 once missed an answer."""
        try:
            http = self._idle.pop()
        except IndexError:
            http = _http_client(self.endpoint, self._keep_s)
        try:
            yield http
        finally:
            self._idle.append(http)

    def _request(self, method: str, path: str, body: dict | Body | None = None, timeout_s: float | None = None) -> Any:
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        start = time.monotonic()
        what = f"engine {self.endpoint.index}: {method} {self.url}{path}"
        timeout = httpx.Timeout(timeout_s, connect=min(_CONNECT_TIMEOUT_S, timeout_s))
        try:
            with self._http() as http:
                content = Body(body) if isinstance(body, dict) else body
                headers = None if content is None else {"Content-Length": str(len(content))}
                response = http.request(method, self.url + path, content=content, headers=headers, timeout=timeout)
        except httpx.TimeoutException as error:
            whom, phase = f"engine {self.endpoint.index} at {self.url}", f"{method} {path}"
            seconds = time.monotonic() - start
            raise WaitTimeout(
                who="client", whom=whom, phase=phase, seconds=seconds, last=type(error).__name__
            ) from error
        except httpx.LocalProtocolError:  # its text has the header that is wrong, which is the key
            raise EngineHttpError(f"{what} cannot be sent. Fix: an API key of one line.") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise EngineHttpError(f"{what} failed: {error}") from error
        if not response.is_success:
            hint = " (is the API key right?)" if response.status_code == 401 else ""
            raise EngineHttpError(
                f"{what} answered {response.status_code}{hint}: {response.text[:_BODY_HEAD_CHARS]}",
                response.status_code,
            )
        try:
            return response.json()
        except ValueError:
            return response.text


def _http_client(endpoint: EngineEndpoint, keep_s: float) -> httpx.Client:
    """Without the environment's proxies: an engine is always reached directly."""
    over_https = endpoint.url.lower().startswith("https:")
    key = {b"Authorization": f"Bearer {endpoint.api_key}".encode("latin-1")} if endpoint.api_key else {}
    return httpx.Client(
        headers={b"Content-Type": b"application/json"} | key,
        trust_env=False,
        verify=_trust(certificates()) if over_https else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),  # trusts nobody
        limits=httpx.Limits(keepalive_expiry=keep_s),
    )


@functools.cache
def _trust(certificates_path: str | None) -> ssl.SSLContext:
    """Whom https trusts: the certificates in a file or folder, else the usual ones. Read once: that takes 20 ms."""
    if certificates_path is None:
        return httpx.create_ssl_context(trust_env=False)
    try:
        if os.path.isdir(certificates_path):
            return ssl.create_default_context(capath=certificates_path)
        return ssl.create_default_context(cafile=certificates_path)
    except OSError as error:
        hint = "Fix: REQUESTS_CA_BUNDLE, else SSL_CERT_FILE, names a file of them, or a folder."
        raise EngineError(f"the certificates in {certificates_path} cannot be used: {error}. {hint}") from error
