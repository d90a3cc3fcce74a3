"""The server's command line: its own flags, the keys of --backend-config, and every flag of train.py that has a meaning
without a loop of one's own.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence

from slime_like.config.base import add_flags, flag, make_parser
from slime_like.config.bounds import LONGEST_WAIT_S
from slime_like.config.lora import LoraConfig
from slime_like.config.run import RunConfig
from slime_like.config.tree import TENANTS
from slime_like.errors import ConfigError
from slime_like.job.command_line import parse_args
from slime_like.planning.hardware import GIB
from slime_like.planning.memory.adapters import TenantRoom, whole_model_bytes
from slime_like.planning.placement import PlacementPlan, cannot_run_yet
from slime_like.planning.report.render import PlanReport, make_report
from slime_like.sglang_backend.launcher import host_has_cuda
from slime_like.tinker.backend_keys import read_keys, typed_value
from slime_like.tinker.backends.trainer import adapted_modules
from slime_like.utils.net import is_loopback

#: SGLang's argument with which a request's seed holds.
_SEEDS = "enable_deterministic_inference"
#: Groups of train.py's flags that are about a loop of its own -> those that have a meaning here.
_LOOPS_OWN: dict[str, set[str]] = {
    "data": {"num_rollout", "rollout_seed"},
    "rollout": {"rollout_batch_size", "n_samples_per_prompt", "rollout_max_context_len", "rollout_request_timeout_s"},
    "asynchrony": set(),
    "agents": set(),
    "serving": set(),
    "reward": {"rm_type"},
    "eval": set(),
    "loss": set(),
    "lora": set(),
    "sync": set(),
}
#: --tenant-micro-batches in words.
_MICRO_BATCHES = {
    "own": "each of one model's rows; its numbers are those that it has alone, to the bit",
    "shared": "of several models' rows where they are ready together; their numbers round otherwise than alone",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """A server for clients that train over HTTP; beside these: --plan, train.py's flags of model, layout, placement"""

    base_model: str = flag(help="HF folder of the model that clients train.", metavar="FOLDER")
    base_model_name: str | None = flag(None, help="What clients call it. Default: --base-model as it is typed.")
    backend: str = flag("megatron", choices=("megatron",), help="What trains.")
    backend_config: str = flag(
        "{}", metavar="JSON", help="Object of dotted keys and values. docs/tinker.md lists them."
    )
    host: str = flag("127.0.0.1", help="Address to listen at; another than the loopback one needs --tls-certificate.")
    port: int = flag(8000, help="Port to listen at; 0: a free one.", least=0, most=65535)
    tls_certificate: str | None = flag(None, help="PEM file: serve https. Needs --tls-key.")
    tls_key: str | None = flag(None, help="PEM file of the certificate's key.")
    insecure_http: bool = flag(
        False, help="Listen at other addresses without TLS: keys and data can be read on the way."
    )
    db: str | None = flag(
        None, metavar="URL", help="sqlite:///FILE or postgresql://… Default: server.db in --state-folder."
    )
    state_folder: str = flag("tinker-state", help="What must outlive the process: snapshots, the database.")
    weights_folder: str | None = flag(
        None, help="Folder or fsspec URL of what clients save. Default: weights in --state-folder."
    )
    max_lora_rank: int = flag(32, help="Largest rank of an adapter; engines keep room for it.", least=1)
    default_lora_alpha: float = flag(
        32.0, help="Alpha of adapters whose client gives none; the SDK never does.", above=0
    )
    max_loras: int = flag(8, help="Adapters in one batch of an engine.", least=1)
    max_cpu_loras: int = flag(
        32,
        help="Adapters that an engine holds; others are loaded again when they are asked for.",
        least=1,
    )
    max_adapters_resident: int = flag(8, help="Adapters on the trainer's device; others wait on the host.", least=1)
    max_models: int = flag(64, help="Models in the trainer; others wait on disk, and come back.", least=1)
    max_samples_running: int = flag(256, help="Sequences that the engines generate at a time.", least=1)
    max_samples_a_tenant: int = flag(128, help="The same of one tenant.", least=1)
    batch_tokens: int = flag(
        65_536, help="Tokens of several models' passes that are handed to the trainer together.", least=1
    )
    max_whole_models: int = flag(
        1,
        help="Of --max-models, those whose client trains all parameters: each takes 16 bytes of host memory a parameter"
        " while it waits for its turn on the device; others wait on disk, and come back.",
        least=1,
    )
    max_ephemeral_samplers: int = flag(
        8,
        help="Unnamed samplers of a model that are kept, the latest ones; older ones end when nothing uses them.",
        least=1,
    )
    max_requests_a_tenant: int = flag(
        4096,
        help="Calls of a tenant under way, unless its key was given other limits; more are answered with 429.",
        least=1,
    )
    max_tokens_a_tenant: int = flag(16_777_216, help="Tokens of these calls.", least=1)
    sampling_weight: float = flag(
        1.0, help="Seconds that samples get of shared GPUs for one of training, where both have work.", above=0
    )
    turn_s: float = flag(
        2.0,
        help="How long training, or sampling, keeps shared GPUs while the other waits.",
        above=0,
        most=LONGEST_WAIT_S,
    )
    tenant_micro_batches: str = flag(
        "own",
        choices=("own", "shared"),
        help="Whether rows of several models may be in one micro-batch of the trainer: shared is faster where clients"
        " send few rows, and rounds otherwise; with own a model's numbers are those that it has alone, to the bit.",
    )
    snapshot_every_steps: int = flag(
        8,
        help="Optimizer steps of a model between its snapshots, for a trainer that dies.",
        least=1,
    )
    session_timeout_s: float = flag(
        120.0, help="A client without a heartbeat for so long is released.", above=0, most=LONGEST_WAIT_S
    )

    @property
    def name(self) -> str:
        """What clients call the model."""
        return self.base_model_name or self.base_model

    @property
    def weights(self) -> str:
        """Where what clients save lies."""
        return self.weights_folder or os.path.join(os.path.abspath(self.state_folder), "weights")

    @property
    def database(self) -> str:
        """The database's URL."""
        return self.db or f"sqlite:///{os.path.join(os.path.abspath(self.state_folder), 'server.db')}"

    def problems(self) -> list[str]:
        """What is impossible about the server's own flags."""
        problems = []
        if not os.path.isfile(os.path.join(self.base_model, "config.json")):
            problems.append(f"--base-model {self.base_model}: no HF folder is there (config.json, weights, tokenizer).")
        if self.max_cpu_loras < self.max_loras:
            problems.append(
                f"--max-cpu-loras {self.max_cpu_loras} is less than --max-loras {self.max_loras}: an engine holds all"
                " adapters of a batch."
            )
        if (self.tls_certificate is None) != (self.tls_key is None):
            problems.append("--tls-certificate and --tls-key need each other.")
        problems += [
            f"--{name.replace('_', '-')} {path}: no such file."
            for name in ("tls_certificate", "tls_key")
            if (path := getattr(self, name)) and not os.path.isfile(path)
        ]
        if not is_loopback(self.host) and not self.tls_certificate and not self.insecure_http:
            problems.append(
                f"--host {self.host} can be reached from other machines, and clients' keys would travel in clear text."
                " Fix: --tls-certificate and --tls-key; or --insecure-http, behind a proxy that has them."
            )
        return problems


@dataclasses.dataclass(frozen=True)
class ServerCommand:
    """What was asked for. plan: None, "text" or "json"."""

    server: ServerConfig
    config: RunConfig
    report: PlanReport
    plan: str | None
    notes: tuple[str, ...]

    @property
    def takes_seeds(self) -> bool:
        """Whether a sample's seed holds."""
        return _SEEDS in self.config.engine.sglang

    @property
    def context_length(self) -> int:
        """Most tokens of a prompt and its answer."""
        return self.config.rollout.rollout_max_context_len or self.config.model.context_tokens

    def text(self) -> str:
        """The plan, for people."""
        return "\n\n".join([self.report.text(), self._limits_text(), *self.notes])

    def _limits_text(self) -> str:
        server, engines = self.server, len(self.report.plan.engines)
        return (
            f"clients: http{'s' if server.tls_certificate else ''}://{server.host}:{server.port} as"
            f" {server.name}; up to {self.context_length} tokens; database {server.database}; saved in"
            f" {server.weights}\n"
            f"adapters: of rank 1 to {server.max_lora_rank}; {server.max_adapters_resident} on the trainer's device,"
            f" {server.max_models} in the trainer; in each of {engines} engines {server.max_cpu_loras},"
            f" {server.max_loras} in one batch; they travel as folders\n"
            "a client with all parameters, of which the trainer has one at a time: on each of its GPUs"
            f" {whole_model_bytes(self.config) / GIB:.1f} GiB more, which the plan does not count\n"
            f"micro-batches of the trainer: {_MICRO_BATCHES[server.tenant_micro_batches]}"
        )

    def to_json(self) -> str:
        """The plan as one object."""
        return json.dumps(self.report.to_dict() | {"server": dataclasses.asdict(self.server)}, indent=1)


def read_command(argv: Sequence[str]) -> ServerCommand:
    """Parse and check a command line. Raises ConfigError with every problem."""
    server, plain = _server_flags(argv)
    own, passed = _own_keys(read_keys(server.backend_config, _both(server, plain, argv)))
    server = dataclasses.replace(server, **own)  # type: ignore[arg-type]  # names and types are those of the fields
    if problems := server.problems() + _typed_problems(plain):
        raise ConfigError(problems)
    command = parse_args([*_implied(server, [*plain, *passed]), *plain, *passed], has_data=False)
    config = command.config
    problems = _of_no_use(config) + _turns_problems(server, config)
    if problems:
        raise ConfigError(problems)
    config = _with_adapters(config, server)
    report = _report(config, server, planning=command.plan is not None)
    if command.plan is None:
        problems = [*report.problems, *config.not_yet(), *cannot_run_yet(report.plan)]
        if problems:
            raise ConfigError(problems)
    return ServerCommand(server=server, config=config, report=report, plan=command.plan, notes=tuple(command.notes))


def tenants_plan(plan: PlacementPlan) -> PlacementPlan:
    """The plan with the policy's role as tenants share it, and no weight sync: adapters travel as folders."""
    names = {"actor": TENANTS}
    bundles = tuple(
        dataclasses.replace(bundle, roles={names.get(name, name): share for name, share in bundle.roles.items()})
        for bundle in plan.bundles
    )
    roles = {names.get(name, name): role for name, role in plan.roles.items()}
    return dataclasses.replace(plan, bundles=bundles, roles=roles, transport=None)


def _server_flags(argv: Sequence[str]) -> tuple[ServerConfig, list[str]]:
    parser = make_parser(__doc__ or "")
    parser.prog = "python -m slime_like.tinker.server"
    add_flags(parser, ServerConfig)
    namespace, plain = parser.parse_known_args(list(argv))
    if parser.problems:
        raise ConfigError(parser.problems)
    return ServerConfig(**vars(namespace)), plain


def _both(server: ServerConfig, plain: Sequence[str], argv: Sequence[str]) -> list[str]:
    """train.py's flags and those of the server that a key may contradict, as they were typed."""
    typed = list(plain)
    for name in ("--max-loras", "--max-cpu-loras"):
        value = typed_value(argv, name)
        typed += [name, *value] if value is not None else []
    return typed


def _own_keys(argv: Sequence[str]) -> tuple[dict[str, int], list[str]]:
    """Flags of the server among those that keys stand for, and the others."""
    own: dict[str, int] = {}
    rest: list[str] = []
    texts = iter(argv)
    for text in texts:
        if text in ("--max-loras", "--max-cpu-loras"):
            own[text[2:].replace("-", "_")] = int(next(texts))
        else:
            rest.append(text)
    return own, rest


def _typed_problems(plain: Sequence[str]) -> list[str]:
    """Flags of train.py that say what one of the server's says."""
    instead = {
        "--hf-checkpoint": "--base-model",
        "--lora-rank": "clients' own lora_rank, and --max-lora-rank",
        "--lora-alpha": "--default-lora-alpha",
        "--sglang-enable-lora": "nothing: adapters are always served",
        "--sglang-max-lora-rank": "--max-lora-rank",
        "--sglang-max-loras-per-batch": "--max-loras",
        "--sglang-max-loaded-loras": "--max-cpu-loras",
        "--sglang-lora-target-modules": "nothing: every linear layer but the output's can have an adapter",
        "--rm-type": "nothing: clients score their samples",
        "--num-rollout": "nothing: clients say what is done",
        "--debug-train-only": "nothing: a server samples too",
        "--debug-rollout-only": "nothing: a server trains too",
        "--offload": "nothing: trainer and engines stay on their GPUs",
        "--offload-rollout": "nothing: trainer and engines stay on their GPUs",
        "--offload-train": "nothing: trainer and engines stay on their GPUs",
        "--rollout-external": "nothing: engines of other people cannot be told of adapters",
    }
    return [
        f"{name} is not for the server. Use {use}."
        for name, use in instead.items()
        if typed_value(plain, name) is not None
    ]


def _implied(server: ServerConfig, typed: Sequence[str]) -> list[str]:
    """What a run is told and a server is not: where it is not typed, as the page's defaults have it."""
    implied: list[str] = ["--hf-checkpoint", server.base_model]

    def unless(flag_name: str, *values: str) -> None:
        if typed_value(typed, flag_name) is None:
            implied.extend([flag_name, *values])

    unless("--num-rollout", "1")
    unless("--n-samples-per-prompt", "2")
    unless("--rm-type", "exact")  # nothing is scored here, and parse_args asks for it
    unless("--actor-num-gpus-per-node", "1")
    if typed_value(typed, "--colocate") == []:
        # Both stay where they are: clients train and sample at any moment.
        implied += ["--no-offload-rollout", "--no-offload-train"]
    else:
        unless("--rollout-num-gpus", (typed_value(typed, "--rollout-num-gpus-per-engine") or ["1"])[0])
    if typed_value(typed, "--micro-batch-size") is None:
        if typed_value(typed, "--use-dynamic-batch-size") is None:
            implied.append("--use-dynamic-batch-size")
        unless("--max-tokens-per-gpu", "8192")
    # Whatever the sizes are, a rollout that divides by them: clients' rows need not.
    sizes = [
        typed_value(typed, name) for name in ("--actor-num-gpus-per-node", "--actor-num-nodes", "--micro-batch-size")
    ]
    product = 1
    for size in sizes:
        product *= int(size[0]) if size and size[0].isdecimal() else 1
    unless("--rollout-batch-size", str(product))
    return implied


def _turns_problems(server: ServerConfig, config: RunConfig) -> list[str]:
    return [
        f"--{name.replace('_', '-')} {getattr(server, name):g} does nothing: trainer and engines have GPUs of"
        " their own, so neither waits for the other. Fix: leave it out, or --colocate."
        for name in ("sampling_weight", "turn_s")
        if not config.placement.colocate and getattr(server, name) != getattr(ServerConfig, name)
    ]


def _of_no_use(config: RunConfig) -> list[str]:
    """Flags about a loop that only train.py has."""
    problems = []
    for group_name, meaningful in _LOOPS_OWN.items():
        group = getattr(config, group_name)
        plain = type(group)()
        problems += [
            f"--{field.name.replace('_', '-')} does nothing here: clients bring their own loop. Fix: leave it out."
            for field in dataclasses.fields(group)
            if "help" in field.metadata
            and field.name not in meaningful
            and getattr(group, field.name) != getattr(plain, field.name)
        ]
    return problems


def _with_adapters(config: RunConfig, server: ServerConfig) -> RunConfig:
    """The config of the trainer's ranks and of engines that serve adapters."""
    adapters = {
        "enable_lora": True,
        "max_lora_rank": str(server.max_lora_rank),
        "lora_target_modules": adapted_modules(config.model),
        # SGLang counts the base as one of them.
        "max_loras_per_batch": str(server.max_loras + 1),
        "max_loaded_loras": str(server.max_cpu_loras + 1),
    }
    if not host_has_cuda():
        adapters[_SEEDS] = True  # costs nothing there
    engine = dataclasses.replace(config.engine, sglang=config.engine.sglang | adapters)
    return dataclasses.replace(config, engine=engine, role=TENANTS)


def tenant_room(config: RunConfig, server: ServerConfig) -> TenantRoom:
    """What the trainer keeps room for: adapters of the largest rank."""
    lora = LoraConfig(
        lora_rank=server.max_lora_rank, lora_target_modules=adapted_modules(config.model),
        lora_exclude_modules=[r".*\.experts\..*"] if config.model.num_experts else None,
    )  # fmt: skip
    return TenantRoom(lora=lora, resident=server.max_adapters_resident, held=server.max_models)


def _report(config: RunConfig, server: ServerConfig, *, planning: bool) -> PlanReport:
    """The plan, its memory as if all that fit were adapters of the largest rank."""
    room = tenant_room(config, server)
    report = make_report(dataclasses.replace(config, role="actor"), planning=planning, tenants=room)
    return dataclasses.replace(report, plan=tenants_plan(report.plan), sync=None, pace=None)
