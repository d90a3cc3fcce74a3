"""The endpoint at which foreign agents play."""

from __future__ import annotations

import dataclasses
import os

from slime_like.config.base import flag
from slime_like.config.bounds import LONGEST_WAIT_S
from slime_like.utils.net import is_loopback


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingConfig:
    """Agents that play over HTTP, in OpenAI's language"""

    serve_rollout: bool = flag(
        False, help="Episodes are played by agents that talk to an endpoint of the run; their answers are trained on."
    )
    serve_host: str = flag("127.0.0.1", help="Address of the endpoint; another than the loopback one needs a key.")
    serve_port: int | None = flag(None, help="Port of the endpoint. Default: a free one.", least=0, most=65535)
    serve_api_key_env: str = flag(
        "SLIME_LIKE_SERVE_API_KEY", help="Environment variable with the endpoint's key, if it is to have one."
    )
    serve_max_requests: int = flag(
        1024, help="Requests that are answered at a time; one more is told to try again.", least=1
    )
    agent_path: str | None = flag(
        None,
        help=(
            "module.run(base_url, prompt, request_kwargs, metadata) -> {reward, metadata} or None, async or not: plays"
            " an episode. Default: agents from outside fetch episodes with POST /sessions."
        ),
    )
    agent_python: str | None = flag(
        None,
        help=(
            "Python interpreter that runs --agent-path, such as that of another virtual environment; it need not have"
            " this package. Default: this one."
        ),
    )
    agent_timeout_s: float = flag(1800.0, help="Deadline of an episode, in seconds.", above=0, most=LONGEST_WAIT_S)
    agent_max_turns: int = flag(256, help="Most requests of an episode.", least=1)

    def problems(self) -> list[str]:
        """What is impossible about the endpoint alone."""
        problems = []
        for name in ("serve_max_requests", "agent_max_turns"):
            if getattr(self, name) < 1:
                problems.append(f"--{name.replace('_', '-')} {getattr(self, name)}: must be at least 1.")
        if self.agent_timeout_s <= 0:
            problems.append(f"--agent-timeout-s {self.agent_timeout_s:g}: must be above 0.")
        if self.serve_port is not None and not 0 < self.serve_port < 65536:
            problems.append(f"--serve-port {self.serve_port}: must be 1 to 65535.")
        if self.agent_python is not None and self.agent_path is None:
            problems.append("--agent-python does nothing without --agent-path. Fix: add it, or drop this.")
        for field in dataclasses.fields(self):
            if not self.serve_rollout and getattr(self, field.name) != field.default:
                name = field.name.replace("_", "-")
                problems.append(f"--{name} does nothing without --serve-rollout. Fix: add it, or drop this.")
        return problems

    def missing_files(self) -> list[str]:
        """Paths that do not exist."""
        python = self.agent_python
        if python is None or (os.path.isfile(python) and os.access(python, os.X_OK)):
            return []
        return [f"--agent-python {python}: is no program. Fix: the path of an interpreter, such as VENV/bin/python."]

    def key_problem(self, key: str | None) -> str | None:
        """Why the endpoint would be open to others, or None. key: what the environment holds."""
        if key or is_loopback(self.serve_host):
            return None
        return (
            f"--serve-host {self.serve_host}: others than this machine can reach the endpoint, and it has no key. Fix:"
            f" export {self.serve_api_key_env}, or drop the flag."
        )
