"""Starts one SGLang server as a guarded child process and waits until it is healthy."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import glob
import importlib.metadata
import importlib.util
import os
import secrets
import shutil
import sys
import tempfile
import time

from slime_like.config.quantisation import served_config
from slime_like.errors import EngineError, WaitTimeout
from slime_like.records import EngineEndpoint
from slime_like.sglang_backend.client import EngineClient
from slime_like.sglang_backend.cuda_defaults import attention_default, card_capability, kernels_folder
from slime_like.sglang_backend.second_update import second_update_problem
from slime_like.sglang_backend.server_args import known_arguments, merge_flags, to_argv
from slime_like.sglang_backend.shared_memory import DIRECTORY_VARIABLE, WEIGHT_LOADER, shared_directory
from slime_like.utils.files import PACKAGE_ROOT
from slime_like.utils.guard import GuardedProcess, start_guarded
from slime_like.utils.net import free_port, host_port, http_url, interface_of, port_is_free, with_another_port

_LOG_LINES = 30
#: sglang 0.5.23 leaves these files in shared memory when it is killed. Remove when it unlinks them.
_SHARED_FILES = ("/dev/shm/sglang_loads_", "/dev/shm/sgl_shm_mq_")
#: Characters of a folder for sockets: a socket's path has at most 107, and tempfile's name in it 12.
_LONGEST_SOCKET_FOLDER = 90
#: SGLang's variable for where the ranks of an engine meet; a version without it goes on as before.
_MEETING = "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"
_KEY_FILE = "server.yaml"
#: Arguments with which an engine on one machine is several worlds, which must not meet in one file.
_SEVERAL_WORLDS = ("dp_size", "dp", "data_parallel_size")
#: SGLang answers TERM with crash diagnostics, not with an orderly end: waiting longer gains nothing
_CLOSE_GRACE_S = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """What one engine is to be.

    extra_flags: underscored SGLang flag names -> value, list, or True; they win over our defaults.
    """

    index: int
    model_path: str
    tp_size: int = 1
    nnodes: int = 1  # machines of the engine; every one runs a server process, only rank 0's answers requests
    node_rank: int = 0
    #: host:port on rank 0's machine where the ranks meet; needed with several machines
    dist_init_addr: str | None = None
    dtype: str | None = None  # None: as the checkpoint says
    host: str = "127.0.0.1"
    port: int | None = None  # None: a free one
    gpu_ids: tuple[str, ...] = ()  # ignored without CUDA
    context_length: int | None = None  # tokens; None: the model's
    seed: int = 0
    extra_flags: dict = dataclasses.field(default_factory=dict)
    environment: dict[str, str] = dataclasses.field(default_factory=dict)  # over this process's own
    log_level: str | None = None  # None: SGLang's default, info
    memory_saver: bool = False  # release and resume really free memory; CUDA only
    shares_gpus: bool = False  # a trainer takes turns with it
    log_path: str
    custom_weight_loader: str | None = WEIGHT_LOADER
    command: tuple[str, ...] | None = None  # instead of SGLang's server, before its arguments


class Engine:
    """A running engine; made by `launch_engine`."""

    def __init__(self, spec: EngineSpec, process: GuardedProcess, endpoint: EngineEndpoint, private_dir: str):
        self.spec = spec
        self.endpoint = endpoint
        self.pid = process.pid
        self._process = process
        self._private_dir = private_dir

    def poll(self) -> int | None:
        """None while the server runs, else its exit status."""
        return self._process.poll()

    def check(self) -> None:
        """Raise EngineError with the tail of the log if the server has ended."""
        code = self.poll()
        if code is not None:
            raise EngineError(self._message(f"ended with status {code}"))

    def close(self) -> None:
        """End the server and everything it started. Harmless when called twice."""
        self._process.close(grace_s=_CLOSE_GRACE_S)
        shutil.rmtree(self._private_dir, ignore_errors=True)

    def wait_healthy(self, timeout_s: float) -> None:
        """Wait for /health.

        Raises EngineError the moment the server ends, WaitTimeout at the deadline, both with the tail of the log.
        """
        client = EngineClient(self.endpoint, timeout_s=5.0)
        deadline = time.monotonic() + timeout_s
        while not client.health():
            self.check()
            if time.monotonic() > deadline:
                last = self._process.log_tail(_LOG_LINES)
                raise WaitTimeout(
                    who="launcher",
                    whom=f"engine {self.spec.index} at {self.endpoint.url}",
                    phase="start",
                    seconds=timeout_s,
                    last=f"\n{last}",
                )
            time.sleep(0.05)
        # Health is answered by whoever listens there: make sure that it is ours, with our key. Other node ranks answer
        # nothing else.
        self.check()
        if self.spec.node_rank == 0:
            client.model_info()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self._private_dir, _KEY_FILE))

    def _message(self, what: str) -> str:
        engine = f"engine {self.spec.index} ({self.spec.model_path}, {self.endpoint.url})"
        return f"{engine} {what}. End of {self.spec.log_path}:\n{self._process.log_tail(_LOG_LINES)}"


def host_has_cuda() -> bool:
    """Whether engines here run on CUDA: there is a device, and torch is a build that can use it.

    torch is not imported.
    """
    if not (glob.glob("/dev/nvidia[0-9]*") or os.path.exists("/dev/dxg")):
        return False
    try:
        return not importlib.metadata.version("torch").endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        return False


def launch_engine(spec: EngineSpec, timeout_s: float) -> Engine:
    """Start a server and wait until it is healthy.

    It dies with this process, and always asks for a key that we make up.
    Raises EngineError (port taken, SGLang missing, server ended; with the tail of its log) or WaitTimeout.
    """

    def launch() -> Engine:
        engine = start_engine(spec)
        try:
            engine.wait_healthy(timeout_s)
        except BaseException:
            engine.close()
            raise
        return engine

    return with_another_port(launch, port_given=spec.port is not None)


def start_engine(spec: EngineSpec) -> Engine:
    """Start a server without waiting for it; `launch_engine` does both."""
    cuda = host_has_cuda()
    if spec.command is None and importlib.util.find_spec("sglang") is None:
        raise EngineError(f"engine {spec.index}: SGLang is not installed in {sys.prefix}.")
    if spec.port is not None and not port_is_free(spec.host, spec.port):
        raise EngineError(
            f"engine {spec.index}: port {spec.port} on {spec.host} is taken. Fix: end the process that listens there,"
            " or choose another port."
        )
    if cuda and spec.command is None:
        _check_second_update(spec)
    port = spec.port if spec.port is not None else free_port(spec.host)
    key = secrets.token_hex(24)
    private_dir = tempfile.mkdtemp(prefix="slime-like-engine-")
    endpoint = EngineEndpoint(index=spec.index, url=http_url(spec.host, port), api_key=key, tp_size=spec.tp_size)
    try:
        argv = [
            *(spec.command or _command(cuda)),
            *_server_argv(spec, port, cuda),
            "--config",
            _write_key(private_dir, key),
        ]
        environment = _environment(spec, cuda) | _meeting(spec, port, private_dir) | _temporary(private_dir)
        process = start_guarded(
            argv,
            env=environment,
            log_path=spec.log_path,
            secrets=(key,),
            remove_mapped=_SHARED_FILES,
            remove_folder=private_dir,
        )
    except BaseException as error:
        shutil.rmtree(private_dir, ignore_errors=True)
        if isinstance(error, OSError):
            raise EngineError(
                f"engine {spec.index} at {host_port(spec.host, port)} could not be started: {error}"
            ) from error
        raise
    return Engine(spec, process, endpoint, private_dir)


def _check_second_update(spec: EngineSpec) -> None:
    """Raise EngineError for eight bits that this SGLang would load once and then never again."""
    config = served_config({"model_path": spec.model_path} | spec.extra_flags)
    if config is None or str(spec.extra_flags.get("load_format")) != "dummy":
        return
    # Whether there are experts does not matter to what the first layer answers; with them both are asked.
    problem = second_update_problem(config, experts=True)
    if problem is not None:
        raise EngineError(
            f"engine {spec.index}: {problem}, and it starts with weights that only a sync replaces. Fix:"
            " --rollout-quantization fp8."
        )


def _command(cuda: bool) -> tuple[str, ...]:
    return (sys.executable, "-m", "sglang.launch_server" if cuda else "slime_like.sglang_backend.cpu_server")


def _write_key(directory: str, key: str) -> str:
    """The API key in a file that only we can read: on the command line every user of the host would see it.

    SGLang takes it from no environment variable, but from its --config file.
    """
    path = os.path.join(directory, _KEY_FILE)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(f'api-key: "{key}"\n')
    return path


def _server_argv(spec: EngineSpec, port: int, cuda: bool) -> list[str]:
    """SGLang's command line without the key: what we decide, then our defaults, then the user's flags."""
    fixed: dict = {
        "model_path": spec.model_path,
        "host": spec.host,
        "port": port,
        "tp_size": spec.tp_size,
        "random_seed": spec.seed,
    }
    if spec.nnodes > 1:
        assert spec.dist_init_addr, "an engine on several machines needs an address where its ranks meet"
        fixed |= {"nnodes": spec.nnodes, "node_rank": spec.node_rank, "dist_init_addr": spec.dist_init_addr}
    defaults: dict = _cuda_defaults() if cuda else _cpu_defaults(spec.context_length)
    if "enable_lora" in spec.extra_flags and not cuda:
        defaults["lora_backend"] = "torch_native"
    if spec.dtype is not None:
        defaults["dtype"] = spec.dtype
    if spec.log_level is not None:
        defaults["log_level"] = spec.log_level
    if spec.context_length is not None:
        defaults["context_length"] = spec.context_length
    if spec.memory_saver and cuda:  # it needs torch_memory_saver, which is CUDA only
        defaults["enable_memory_saver"] = True
    extra = dict(spec.extra_flags)
    if spec.custom_weight_loader and (spec.command or "custom_weight_loader" in known_arguments()):
        loaders = extra.pop("custom_weight_loader", [])
        fixed["custom_weight_loader"] = [
            *(loaders if isinstance(loaders, list) else [loaders]),
            spec.custom_weight_loader,
        ]
    return to_argv(fixed | merge_flags(defaults, extra))


@functools.cache
def _cuda_defaults() -> dict:
    """What SGLang would choose wrongly by itself on this host."""
    return attention_default(kernels_folder(), card_capability())


def _cpu_defaults(context_length: int | None) -> dict:
    """What makes SGLang start fast, idle at no cost and fit into memory without CUDA."""
    return {
        "device": "cpu",
        "attention_backend": "torch_native",
        "disable_overlap_schedule": True,  # gains nothing here
        "skip_server_warmup": True,
        "sleep_on_idle": True,  # else the scheduler spins on a whole core
        "mem_fraction_static": 0.3,
        # The torch-native backend loops over sequences in Python: more at a time brings nothing. 256 tokens each.
        "max_running_requests": 64,
        "max_total_tokens": max(64 * 256, context_length or 0),
    }


def _meeting(spec: EngineSpec, port: int, private_dir: str) -> dict[str, str]:
    """Where the ranks of an engine on one machine meet: in a file that only we can reach.

    SGLang's own TCPStore listens on every interface, without a key.
    The second half: SGLang (0.5.23) names its CPU kernels' shared memory after these two, which it takes from the
    address that is not there now.
    """
    if spec.nnodes > 1 or any(name in spec.extra_flags for name in _SEVERAL_WORLDS) or _MEETING in os.environ:
        return {}
    names = {"MASTER_ADDR": spec.host, "MASTER_PORT": str(port)}
    return {_MEETING: f"file://{os.path.join(private_dir, 'store')}", **names}


def _temporary(private_dir: str) -> dict[str, str]:
    """SGLang's sockets, locks and other temporary files are in a folder of the engine's own, which goes with it.

    Not what torch has compiled: the next engine takes it too.
    """
    folder = os.path.join(private_dir, "tmp")
    if len(folder) > _LONGEST_SOCKET_FOLDER:
        return {}
    os.mkdir(folder, 0o700)
    compiled = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or os.path.expanduser("~/.cache/slime_like/torchinductor")
    return {"TMPDIR": folder, "TORCHINDUCTOR_CACHE_DIR": compiled}


def _environment(spec: EngineSpec, cuda: bool) -> dict[str, str]:
    """The server's environment variables."""
    env = os.environ | spec.environment
    env["PYTHONPATH"] = os.pathsep.join([PACKAGE_ROOT, *filter(None, [env.get("PYTHONPATH")])])
    env[DIRECTORY_VARIABLE] = spec.environment.get(DIRECTORY_VARIABLE, shared_directory())  # never a caller's own
    # Else /health generates a token and takes a second, and fails while generation is paused.
    env["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] = "false"
    if os.path.isdir(spec.model_path):
        env.setdefault("HF_HUB_OFFLINE", "1")
    if cuda:
        if spec.gpu_ids:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, spec.gpu_ids))
        if spec.shares_gpus:
            # What a trainer holds differs from card to card, which SGLang takes for foreign processes, and ends. The
            # older name must not be there: 0.5.17 copies its value to the new one, so that "1" to disable enables.
            env.pop("SGL_DISABLE_TP_MEMORY_INBALANCE_CHECK", None)
            env["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] = "false"
    else:
        env["SGLANG_USE_CPU_ENGINE"] = "1"
        env["OMP_NUM_THREADS"] = env.get("SLIME_LIKE_ENGINE_OMP_THREADS", "1")
        if spec.tp_size > 1:
            cores = sorted(os.sched_getaffinity(0))
            env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[rank % len(cores)]) for rank in range(spec.tp_size))
    interface = interface_of(spec.host)
    if interface:
        env.setdefault("GLOO_SOCKET_IFNAME", interface)
    return env
