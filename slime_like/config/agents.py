"""Episodes of many turns with an environment."""

from __future__ import annotations

import dataclasses

from slime_like.config.base import flag
from slime_like.config.bounds import LONGEST_WAIT_S


@dataclasses.dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """Environments and their episodes"""

    env: str | None = flag(
        None,
        help=(
            "Play episodes with this environment instead of one answer a prompt: package.module:Class?key=value, or"
            " reasoning-gym:task, textarena:game, skyrl-gym:name, aviary:name, gymnasium:id, openenv:url."
        ),
    )
    max_turns: int = flag(8, help="With --env: most answers of an episode.", least=1)
    env_timeout_s: float = flag(
        60.0, help="With --env: deadline of each call of an environment, in seconds.", above=0, most=LONGEST_WAIT_S
    )
    env_tool_call_parser: str | None = flag(
        None, help="SGLang's parser of tool calls; 'none' leaves them to the environment. Default: by model family."
    )
    env_reasoning_parser: str | None = flag(
        None, help="SGLang's parser of thinking; 'none' leaves it in the text. Default: by model family."
    )

    def problems(self) -> list[str]:
        """What is impossible about the environment's flags alone."""
        problems = []
        if self.max_turns < 1:
            problems.append(f"--max-turns {self.max_turns}: must be at least 1.")
        if self.env_timeout_s <= 0:
            problems.append(f"--env-timeout-s {self.env_timeout_s:g}: must be above 0.")
        for field in dataclasses.fields(self):
            # The parsers are --serve-rollout's too.
            alone = self.env is None and not field.name.endswith("_parser")
            if alone and field.name != "env" and getattr(self, field.name) != field.default:
                problems.append(
                    f"--{field.name.replace('_', '-')} does nothing without --env. Fix: add it, or drop this."
                )
        return problems
