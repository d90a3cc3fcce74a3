"""Everything that a run was told, and what is asked of it: problems, missing files, JSON, the view for plugins."""

from __future__ import annotations

import dataclasses
import json

from slime_like.config.base import PluginArgs
from slime_like.config.checkpoint_rules import resume_problems
from slime_like.config.not_yet import engine_not_yet, model_not_yet, training_not_yet
from slime_like.config.rules import problems_of
from slime_like.config.share_prompt import share_prompt_problems
from slime_like.config.tree import GROUPS, ConfigTree

__all__ = ["GROUPS", "RunConfig"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig(ConfigTree):
    """Everything a run was told. Frozen; functions take the group they need, not the tree."""

    def not_yet(self) -> list[str]:
        """What the plan knows but a run cannot do yet; train.py adds it to the problems when not planning."""
        return (
            model_not_yet(self.model)
            + training_not_yet(self.loss, self.optimizer)
            + (engine_not_yet(self.model) if self.uses_engines else [])
        )

    def plugin_args(self) -> PluginArgs:
        """The flat, read-only view given to user plugins."""
        return PluginArgs(*(getattr(self, name) for name in GROUPS), extra=self.custom)

    def to_json(self) -> str:
        """The resolved config, for config.json in the run directory."""
        return json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True)

    def problems(self) -> list[str]:
        """Everything impossible that needs no file to see."""
        return problems_of(self) + resume_problems(self) + share_prompt_problems(self)

    def missing_files(self, *, data: bool = True) -> list[str]:
        """Every path that a run needs and that is not there. data: whether it reads any."""
        problems = (
            self.checkpoint.missing_files()
            + self.lora.missing_files()
            + self.loss.missing_files()
            + self.eval.missing_files()
            + self.observability.missing_files()
            + self.serving.missing_files()
        )
        if data and not self.observability.load_debug_rollout_data:
            problems += self.data.missing_files()
        return problems
