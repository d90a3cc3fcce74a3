"""Engines that somebody else started: what they serve, whether that is what the trainer needs, and whether they still
live.

Nothing here changes such a server: it is only asked.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from slime_like.config.hf_model import read_hf_config
from slime_like.config.quantisation import QuantScheme, engine_flags, is_served, served_config
from slime_like.errors import EngineError, RunError, WaitTimeout
from slime_like.records import EngineEndpoint
from slime_like.sglang_backend.client import EngineClient, EngineHttpError

#: Where the key is looked for unless --rollout-external-api-key-env says otherwise; used in messages only.
DEFAULT_KEY_VARIABLE = "SLIME_LIKE_ENGINE_API_KEY"

#: What makes two HF configs the same network. A key that one of them leaves out is not compared.
_SHAPE = (
    "hidden_size",
    "num_hidden_layers",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "tie_word_embeddings",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_intermediate_size",
    "kv_lora_rank",
)
_SAME_DTYPE = {"half": "float16", "fp16": "float16", "bf16": "bfloat16", "float": "float32", "fp32": "float32"}
#: Answered by the HTTP process alone: in a millisecond, also while generation is paused and while weights are loaded.
#: /health generates a token unless the server was told otherwise, and answers 503 after 20 s while generation is paused
#: (0.5.23).
_LIVENESS_PATH = "/model_info"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServedAdapters:
    """What a server that was started with --enable-lora has room for. None: no bound, or it does not say."""

    max_rank: int | None
    modules: frozenset[str] | None  # ends of HF names; "all" is every one
    max_loaded: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExternalServer:
    """What a running server says about itself. None or empty: it does not say."""

    url: str
    model_path: str  # a folder or hub name on the server's machine, as it was started with
    dtype: str | None  # "bfloat16", …; "auto" was left to the checkpoint
    context_length: int | None  # tokens of prompt and response together
    tp_size: int
    pp_size: int
    dp_size: int
    num_gpus: int
    version: str
    model_type: str | None = None
    architectures: tuple[str, ...] = ()
    returns_routed_experts: bool = False  # whether a request may ask for them
    adapters: ServedAdapters | None = None  # None: it takes none
    #: how it keeps its weights, in the words of a checkpoint's quantization_config; None: as they are
    quantization: Mapping[str, Any] | None = None
    #: of the model it was started with, where it tells or its folder can be read from here
    hf_config: dict | None = None


def inspect_server(
    url: str, api_key: str | None, timeout_s: float, *, key_variable: str = DEFAULT_KEY_VARIABLE
) -> ExternalServer:
    """Ask a running server what it serves.

    Raises EngineError: it cannot be reached, wants another key (naming `key_variable`, never the key), or is no SGLang
    that generates.
    """
    client = EngineClient(EngineEndpoint(index=0, url=url, api_key=api_key, external=True), timeout_s=timeout_s)
    try:
        model, info = client.model_info(), client.server_info()
        listed = _listed_models(client)
    except (EngineHttpError, WaitTimeout) as error:
        raise EngineError(_why_not(url, api_key, key_variable, error)) from error
    if not isinstance(model, dict) or not isinstance(info, dict) or "model_path" not in model or "tp_size" not in info:
        raise EngineError(
            f"{url} answers, but not as an SGLang server does: no model_path in /model_info, or no tp_size in"
            " /server_info."
        )
    if model.get("is_generation") is False:
        raise EngineError(
            f"the SGLang server at {url} serves {model['model_path']}, which does not generate text (is_generation is"
            " false)."
        )
    sizes = {name: int(info.get(name) or 1) for name in ("tp_size", "pp_size", "dp_size")}
    # With attention data parallelism the copies live on the tensor parallel ranks; otherwise each has ranks of its own.
    copies = 1 if info.get("enable_dp_attention") else sizes["dp_size"]
    # A weight update from disk moves /model_info's model_path to the folder of weights; /server_info keeps the one of
    # the start.
    path = str(info.get("model_path") or model["model_path"])
    return ExternalServer(
        url=url, model_path=path, dtype=_dtype(info.get("dtype")), context_length=_context_length(model, info, listed),
        **sizes,
        num_gpus=sizes["tp_size"] * sizes["pp_size"] * copies, version=str(info.get("version") or "unknown"),
        returns_routed_experts=info.get("enable_return_routed_experts") is True,
        adapters=_adapters(info),
        quantization=served_config(info) or ({"quant_method": name} if (name := info.get("quantization")) else None),
        model_type=model.get("model_type"), architectures=tuple(model.get("architectures") or ()),
        hf_config=_hf_config(path, model, info),
    )  # fmt: skip


def disagreements(
    server: ExternalServer, *, hf_checkpoint: str, dtype: str | None, needed_context: int, routed_experts: bool = False
) -> list[str]:
    """Where a running server cannot serve this trainer: another network, another number format, too short a context.

    Empty: it can.
    Paths, hosts, ports and GPU ids are never compared: they differ between machines. dtype: the trainer's ("bfloat16",
    …), None if it is not known yet. needed_context: tokens of the longest prompt and response. routed_experts: whether
    it will be asked for them. Raises ConfigError if hf_checkpoint has no config.json.
    """
    ours = read_hf_config(hf_checkpoint)
    who = f"the external engine at {server.url}"
    differences = [
        _other_network(who, server, hf_checkpoint, difference) for difference in _network_differences(server, ours)
    ]
    theirs = _served_dtype(server.dtype, ours)
    if dtype is not None and theirs is not None and theirs != _dtype(dtype):
        left_out = " (its --dtype was left out, and SGLang chose it)" if server.dtype == "auto" else ""
        differences.append(
            f"{who} computes in {theirs}{left_out}, the trainer in {_dtype(dtype)}: their log-probs would differ. "
            f"Fix: start the engine with --dtype {_dtype(dtype)}, or change --bf16."
        )
    if server.context_length is not None and server.context_length < needed_context:
        differences.append(
            f"{who} takes {server.context_length} tokens of prompt and response, but {needed_context} are needed:"
            " --rollout-max-prompt-len, --rollout-max-response-len, --rollout-max-context-len. Fix: start the engine"
            f" with --context-length {needed_context}, or ask for less."
        )
    if routed_experts and not server.returns_routed_experts:
        differences.append(
            f"{who} does not report the experts that it chose, which --use-rollout-routing-replay needs. Fix: start it"
            " with --enable-return-routed-experts (on a GPU host), or drop the flag."
        )
    return differences


def adapter_disagreements(server: ExternalServer, *, rank: int, modules: Sequence[str], num_versions: int) -> list[str]:
    """Where a running server cannot serve so many versions of adapters of this rank on these modules. Empty: it can."""
    who = f"the external engine at {server.url}"
    flags = f"--enable-lora --max-lora-rank {rank} --lora-target-modules {' '.join(modules)}"
    if server.adapters is None:
        why = "was started without adapters, which --update-weight-mode adapter sends"
        return [f"{who} {why}. Fix: start it with {flags}, or drop the flag: merged weights are sent then."]
    adapters, problems = server.adapters, []
    if adapters.max_rank is not None and adapters.max_rank < rank:
        problems.append(f"takes adapters of rank {adapters.max_rank} at most, and --lora-rank is {rank}")
    unserved = sorted(set(modules) - adapters.modules) if adapters.modules is not None else []
    if unserved and "all" not in (adapters.modules or ()):
        problems.append(f"was started without adapters on {' '.join(unserved)}")
    if adapters.max_loaded is not None and adapters.max_loaded < num_versions + 1:
        # It would unload one by itself, and load nothing until the last request for that one has ended.
        problems.append(
            f"holds {adapters.max_loaded} adapters at most (--max-loaded-loras), and {num_versions + 1} may be in use"
        )
    return [f"{who} {problem}. Fix: start it with {flags}, and no --max-loaded-loras." for problem in problems]


def quantisation_disagreements(server: ExternalServer, scheme: QuantScheme | None) -> list[str]:
    """Where a running server keeps its weights in another form than they are sent in. Empty: in the same.

    scheme: of --rollout-quantization; None: they are sent as they are, which an engine with quantised weights would
    take, silently cast.
    """
    if (server.quantization is None) if scheme is None else is_served(scheme, server.quantization):
        return []
    kept = "as they are" if server.quantization is None else f"by quantization_config {dict(server.quantization)}"
    if scheme is None:
        problem = (
            f"the external engine at {server.url} keeps its weights {kept}, and would take those that it is sent for"
            " what they are not. Fix: --rollout-quantization, or an engine without quantisation."
        )
        return [problem]
    arguments = engine_flags(scheme, {}).items()
    flags = " ".join(f"--{name.replace('_', '-')} {shlex.quote(text)}" for name, text in arguments)
    problem = (
        f"the external engine at {server.url} keeps its weights {kept}, not as --rollout-quantization {scheme.name}"
        f" sends them. Fix: start it with {flags} (its weights are then made up until the first sync), or another"
        " value."
    )
    return [problem]


def answers(endpoint: EngineEndpoint, timeout_s: float = 2.0) -> bool:
    """Whether an engine that is well, which answers at once, does so."""
    try:
        EngineClient(endpoint, timeout_s=timeout_s).model_info()
    except RunError:
        return False
    return True


class HealthWatch:
    """Asks every engine each `interval_s` seconds, in a thread per engine; `failures` misses in a row mean that it is
    dead.

    An engine that was found dead stays dead, even should it answer again: one that was restarted holds its first
    weights, not ours.
    """

    def __init__(self, endpoints: Sequence[EngineEndpoint], *, interval_s: float = 5.0, failures: int = 3):
        self._interval_s, self._failures = interval_s, failures
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._dead: dict[str, str] = {}  # url -> what to say
        self._threads = [
            threading.Thread(target=self._watch, args=(endpoint,), name=f"watch {endpoint.url}", daemon=True)
            for endpoint in endpoints
        ]
        for thread in self._threads:
            thread.start()

    def check(self) -> None:
        """Raise EngineError if an engine is dead: its URL, since when, the last error."""
        with self._lock:
            if self._dead:
                raise EngineError("\n".join(self._dead.values()))

    def stop(self) -> None:
        """End the watch.

        Harmless when called twice; a request under way is given one interval to end, then left to its own timeout.
        """
        self._stopped.set()
        for thread in self._threads:
            thread.join(timeout=self._interval_s)

    def _watch(self, endpoint: EngineEndpoint) -> None:
        client = EngineClient(endpoint, timeout_s=max(1.0, self._interval_s))
        missed, last_answer, since, took = 0, time.time(), 0.0, 0.0
        while not self._stopped.wait(max(0.0, self._interval_s - took)):
            started = time.monotonic()
            try:
                client.model_info()
            except (EngineError, WaitTimeout) as error:
                since = since if missed else time.time()
                missed += 1
                if missed >= self._failures:
                    with self._lock:
                        self._dead[endpoint.url] = _death(endpoint, since, last_answer, missed, error)
                    return
            else:
                missed, last_answer = 0, time.time()
            took = time.monotonic() - started


def _death(endpoint: EngineEndpoint, since: float, last_answer: float, missed: int, error: Exception) -> str:
    clock = time.strftime("%H:%M:%S", time.localtime(since))
    return (
        f"external engine {endpoint.index} at {endpoint.url} is dead: no answer since {clock} ({missed} requests of"
        f" {_LIVENESS_PATH} failed; the last answer came {time.time() - last_answer:.0f} s ago). Last error: {error}"
    )


def _why_not(url: str, api_key: str | None, key_variable: str, error: EngineHttpError | WaitTimeout) -> str:
    """What is wrong with a server that did not tell what it serves, and the fix."""
    status = getattr(error, "status", None)
    if status in (401, 403):
        what = "refuses the API key in" if api_key else "asks for an API key, but none is in"
        return (
            f"the external engine at {url} {what} the environment variable {key_variable} ({status}). Fix: export"
            f" {key_variable}=<the engine's --api-key>."
        )
    if status is not None:
        return f"{url} answers, but is no SGLang server (or too old a one): {error}"
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        return (
            f"the certificate of the external engine at {url} is not trusted: {error}\n"
            "  Fix: export REQUESTS_CA_BUNDLE=<file with the certificate, or with that of its issuer>."
        )
    hint = (
        " It speaks plain http. Fix: http:// in --rollout-external-engine-addrs."
        if "WRONG_VERSION_NUMBER" in str(error)
        else ""
    )
    return (
        f"the external engine at {url} cannot be reached:"
        f" {error}.{hint or ' Is it started, and can this machine reach that address?'}"
    )


def _listed_models(client: EngineClient) -> dict:
    """/v1/models, where the effective context length stands; empty where it is not served."""
    try:
        answer = client.models()
    except EngineHttpError as error:
        if error.status != 404:
            raise
        return {}
    models = answer.get("data") if isinstance(answer, dict) else None
    return models[0] if models and isinstance(models[0], dict) else {}


def _adapters(info: dict) -> ServedAdapters | None:
    """As /server_info tells it."""
    if not (info.get("enable_lora") or info.get("lora_paths")):
        return None
    rank, modules, loaded = (info.get(name) for name in ("max_lora_rank", "lora_target_modules", "max_loaded_loras"))
    return ServedAdapters(
        max_rank=rank if isinstance(rank, int) else None,
        modules=frozenset(modules) if isinstance(modules, list) else None,
        max_loaded=loaded if isinstance(loaded, int) else None,
    )


def _context_length(model: dict, info: dict, listed: dict) -> int | None:
    for value in (listed.get("max_model_len"), info.get("context_length"), model.get("context_length")):
        if isinstance(value, int) and value > 0:
            return value
    return None


def _hf_config(path: str, model: dict, info: dict) -> dict | None:
    """The config of the served model: as told, or from the folder where it is visible on this machine too."""
    for source in (model, info):
        if isinstance(source.get("hf_config"), dict):
            return source["hf_config"]
    return read_hf_config(path) if os.path.isfile(os.path.join(path, "config.json")) else None


def _network_differences(server: ExternalServer, ours: dict) -> list[str]:
    """`name: theirs, ours` for each part of the network that is known on both sides and differs."""
    pairs = {
        "model_type": (server.model_type, ours.get("model_type")),
        "architectures": (list(server.architectures), ours.get("architectures")),
    }
    for name in _SHAPE:
        pairs[name] = ((server.hf_config or {}).get(name), ours.get(name))
    known = {name: pair for name, pair in pairs.items() if pair[0] not in (None, []) and pair[1] not in (None, [])}
    return [f"{name} {theirs}, not {expected}" for name, (theirs, expected) in known.items() if theirs != expected]


def _other_network(who: str, server: ExternalServer, hf_checkpoint: str, difference: str) -> str:
    return (
        f"{who} serves another model than --hf-checkpoint {hf_checkpoint}: {difference}. It was started with"
        f" --model-path {server.model_path}."
    )


def _dtype(name: object) -> str | None:
    text = str(name).removeprefix("torch.") if name else None
    return _SAME_DTYPE.get(text, text) if text else None


def _served_dtype(dtype: str | None, config: dict) -> str | None:
    """What "auto" comes to: the checkpoint's own, but float16 for one in float32 (sglang 0.5.23,
    configs/model_config.py).
    """
    if dtype != "auto":
        return dtype
    own = _dtype(config.get("dtype") or config.get("torch_dtype") or "float32")
    return "float16" if own == "float32" else own
