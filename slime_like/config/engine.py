"""Engines and their router."""

from __future__ import annotations

import dataclasses

from slime_like.config.base import flag
from slime_like.config.bounds import LONGEST_WAIT_S

#: Spellings that SGLang takes for an engine's parallel sizes.
_ENGINE_SIZES = {
    "pp": ("pp_size", "pipeline_parallel_size", "pp"),
    "dp": ("dp_size", "data_parallel_size", "dp"),
    "ep": ("ep_size", "expert_parallel_size", "ep"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Rollout engines and router (every SGLang server flag is taken as --sglang-<flag>)"""

    sglang_router_ip: str | None = flag(None, help="Use a router that already runs, at this address.")
    sglang_router_port: int | None = flag(
        None, help="Port of the router; of ours too. Default: a free one.", least=0, most=65535
    )
    sglang_router_api_key_env: str = flag(
        "SLIME_LIKE_ROUTER_API_KEY",
        help="Environment variable that holds the key of a router at --sglang-router-ip, if it has one.",
    )
    sglang_router_policy: str | None = flag(
        None,
        choices=("cache_aware", "manual", "round_robin", "random", "power_of_two"),
        help=(
            "How our router picks an engine; manual: all turns of an episode on one. Default: manual with --env or"
            " --serve-rollout, else cache_aware."
        ),
    )
    sglang_server_concurrency: int = flag(512, help="Most requests in flight per engine.", least=1)
    engine_start_timeout_s: float = flag(
        600.0,
        help="Deadline for an engine or the router to become healthy, in seconds.",
        above=0,
        most=LONGEST_WAIT_S,
    )
    max_engine_restarts: int = flag(
        3,
        help=(
            "How often in a run an engine that dies is replaced by a new one with the present weights; an external one"
            " is waited for at its address. 0: a dead engine ends the run."
        ),
        least=0,
    )
    min_engines: int = flag(
        1,
        help=(
            "Fewest engines that generate. Below it generation waits for those that are being replaced, and where none"
            " is, the run ends."
        ),
        least=1,
    )
    engine_hang_timeout_s: float = flag(
        300.0,
        help=(
            "An engine of ours whose scheduler answers nothing for so long, in seconds, is ended and counts as one that"
            " died; so is our router. Longer than any batch, and than loading weights. 0: nobody asks."
        ),
        least=0,
        most=LONGEST_WAIT_S,
    )
    max_router_restarts: int = flag(
        3,
        help=(
            "How often in a run our router is started again at its address when it ends, with the engines that serve."
            " 0: its end is that of the run."
        ),
        least=0,
    )
    sglang: dict = dataclasses.field(default_factory=dict)  # --sglang-<name>: name -> value, list, or True for a switch

    @property
    def outlives_faults(self) -> bool:
        """Whether requests wait for another engine, or router, where theirs has died."""
        return bool(self.max_engine_restarts or self.max_router_restarts)

    @property
    def pp_size(self) -> int:
        """Pipeline stages of one engine (--sglang-pp-size). Raises ValueError, as the two below."""
        return self._size("pp")

    @property
    def dp_size(self) -> int:
        """Data parallel copies of the attention inside one engine's tensor parallel GPUs (--sglang-dp-size)."""
        return self._size("dp")

    @property
    def ep_size(self) -> int:
        """GPUs of one engine that share the experts (--sglang-ep-size)."""
        return self._size("ep")

    @property
    def dp_attention(self) -> bool:
        """Whether the data parallel copies lie within the tensor parallel GPUs (--sglang-enable-dp-attention)."""
        return str(self.sglang.get("enable_dp_attention", False)).lower() == "true"

    def tp_size(self, num_gpus: int) -> int:
        """SGLang's tensor parallel size of an engine of `num_gpus` GPUs.

        Its data and expert parallel GPUs lie within it.
        """
        return max(1, num_gpus // self.pp_size)

    def _size(self, kind: str) -> int:
        for name in _ENGINE_SIZES[kind]:
            if name in self.sglang:
                try:
                    size = int(self.sglang[name])
                except (TypeError, ValueError):
                    size = 0
                if size < 1 or self.sglang[name] is True:
                    raise ValueError(
                        f"--sglang-{name.replace('_', '-')} {self.sglang[name]}: must be a whole number of at least 1"
                    )
                return size
        return 1

    def problems(self) -> list[str]:
        """What is impossible about the engine flags."""
        problems = []
        for kind in _ENGINE_SIZES:
            try:
                self._size(kind)
            except ValueError as error:
                problems.append(f"{error}.")
        if self.sglang_router_ip and not self.sglang_router_port:
            problems.append("--sglang-router-ip needs --sglang-router-port.")
        if self.sglang_server_concurrency < 1:
            problems.append(f"--sglang-server-concurrency {self.sglang_server_concurrency}: must be at least 1.")
        return problems
