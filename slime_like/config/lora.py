"""LoRA: which matrices get low-rank adapters, of what size, and where they start (PEFT's names and values)."""

from __future__ import annotations

import dataclasses
import math
import os
import re

from slime_like.config.base import flag
from slime_like.config.lora_targets import OUTPUT, expert_of, target_modules
from slime_like.config.model import ModelConfig

#: PEFT's word for every linear layer but the output layer.
ALL_LINEAR = "all-linear"
#: What a name of a module looks like; anything else is a pattern.
_NAME = re.compile(r"[A-Za-z0-9_.\-]+")
#: How one of an adapter's matrices may start.
STARTS = ("uniform", "gaussian", "zeros")
#: --lora-init -> (A, B); orthogonal draws both from one matrix.
_STARTS_OF = {"true": ("uniform", "zeros"), "gaussian": ("gaussian", "zeros"), "false": ("uniform", "uniform")}
#: A folder of PEFT's.
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """LoRA: train low-rank adapters over a frozen base (PEFT's names and values)"""

    lora_rank: int = flag(
        0, help="Rank of the adapters; the policy's own weights are then frozen. 0: train them all.", least=0
    )
    lora_alpha: float | None = flag(
        None,
        help="An adapter's product is scaled by this over the rank. Default: the rank, a scale of 1.",
        above=0,
    )
    lora_use_rslora: bool = flag(False, help="Scale by --lora-alpha over the root of the rank (arXiv:2312.03732).")
    lora_dropout: float = flag(
        0.0,
        help="Share of an adapter's input that is dropped in train steps; never while log-probs are scored.",
        least=0,
        below=1,
    )
    lora_target_modules: list[str] = flag(
        [ALL_LINEAR],
        help=(
            "HF modules with an adapter: ends of their names (q_proj down_proj), one regular expression for whole"
            " names, or all-linear: every linear layer but the output's."
        ),
    )
    lora_exclude_modules: list[str] | None = flag(None, help="HF modules without one; as --lora-target-modules.")
    lora_init: str = flag(
        "true",
        choices=("true", "gaussian", "orthogonal", "false"),
        help=(
            "How adapters start: true draws A as torch's linear layers and B is zero; gaussian draws A of deviation"
            " 1/rank, B zero; orthogonal and false start away from the base."
        ),
    )
    lora_a_init: str | None = flag(
        None,
        choices=STARTS,
        help=(
            "How A starts, instead of as --lora-init says: uniform as torch's linear layers, gaussian of deviation"
            " 1/rank, or zeros."
        ),
    )
    lora_b_init: str | None = flag(
        None, choices=STARTS, help="How B starts, instead of as --lora-init says; as --lora-a-init."
    )
    lora_load: str | None = flag(
        None, help="PEFT folder (adapter_config.json, adapter_model.safetensors) whose adapters the run starts from."
    )
    lora_plus_lr_ratio: float = flag(
        1.0, help="Learning rate of the B matrices over that of A (arXiv:2402.12354).", above=0
    )

    @property
    def enabled(self) -> bool:
        """Whether the policy trains adapters, and nothing else."""
        return self.lora_rank > 0

    @property
    def alpha(self) -> float:
        """What the scale is made of."""
        return float(self.lora_rank if self.lora_alpha is None else self.lora_alpha)

    @property
    def scale(self) -> float:
        """Factor on B A x."""
        return self.alpha / (math.sqrt(self.lora_rank) if self.lora_use_rslora else self.lora_rank)

    @property
    def starts(self) -> tuple[str, str] | None:
        """How A and B start, each one of STARTS; None: orthogonal, from one matrix."""
        if self.lora_init not in _STARTS_OF:
            return None
        start_a, start_b = _STARTS_OF[self.lora_init]
        return self.lora_a_init or start_a, self.lora_b_init or start_b

    @property
    def of_critic(self) -> LoraConfig:
        """The same for a critic, whose output layer is its value head: trained whole, beside the adapters."""
        excluded, (output,) = self.lora_exclude_modules or [], OUTPUT.modules
        if len(excluded) == 1 and not _NAME.fullmatch(excluded[0]):
            excluded = [f"(?:{excluded[0]})|{output}"]  # a pattern stands alone
        else:
            excluded = [*excluded, output]
        return dataclasses.replace(self, lora_exclude_modules=excluded)

    def targets(self, module: str) -> bool:
        """Whether the HF module of this whole name has an adapter (PEFT's check_target_module_exists)."""
        excluded = self.lora_exclude_modules
        return _matches(self.lora_target_modules, module) and not (excluded and _matches(excluded, module))

    def problems(self) -> list[str]:
        """What is impossible about adapters by themselves."""
        if self.lora_rank < 0:
            return [f"--lora-rank {self.lora_rank}: must not be negative."]
        if not self.enabled:
            return [
                f"--{field.name.replace('_', '-')} does nothing without --lora-rank. Fix: add it, or drop this."
                for field in dataclasses.fields(self)
                if getattr(self, field.name) != getattr(LoraConfig(), field.name)
            ]
        problems = []
        if self.alpha <= 0:
            problems.append(f"--lora-alpha {self.alpha:g}: must be above 0.")
        if not 0 <= self.lora_dropout < 1:
            problems.append(f"--lora-dropout {self.lora_dropout}: must be in [0, 1).")
        if self.lora_plus_lr_ratio <= 0:
            problems.append(f"--lora-plus-lr-ratio {self.lora_plus_lr_ratio}: must be above 0.")
        if self.lora_init == "orthogonal" and self.lora_rank % 2:
            problems.append(f"--lora-init orthogonal needs an even --lora-rank, not {self.lora_rank}.")
        problems += self._start_problems()
        for name in ("lora_target_modules", "lora_exclude_modules"):
            problems += _pattern_problems(name, getattr(self, name) or [])
        return problems

    def _start_problems(self) -> list[str]:
        flags = {"--lora-a-init": self.lora_a_init, "--lora-b-init": self.lora_b_init}
        chosen = [f"{name} {value}" for name, value in flags.items() if value is not None]
        if self.lora_load:
            idle = [f"--lora-init {self.lora_init}"] if self.lora_init != "true" else []
            return [f"{name} does nothing with --lora-load. Fix: drop one of them." for name in idle + chosen]
        if chosen and self.starts is None:
            return [f"{chosen[0]}: --lora-init orthogonal draws A and B together. Fix: drop one of them."]
        if self.starts == ("zeros", "zeros"):
            return [f"{' '.join(chosen)}: A and B of zeros have no gradient, ever. Fix: another start for one."]
        return []

    def target_problems(self, model: ModelConfig) -> list[str]:
        """Names that no module of the model has, or none at all."""
        if not self.enabled:
            return []
        modules = target_modules(model)
        kinds = ", ".join(sorted({module.rsplit(".", 1)[-1] for module in modules}))
        names = self.lora_target_modules
        strangers = [name for name in names if not any(_matches([name], module) for module in modules)]
        if strangers:
            wrong = f"--lora-target-modules {' '.join(strangers)}: no linear layer has such a name"
            if set(strangers) & set(OUTPUT.modules):
                wrong = (
                    f"--lora-target-modules {' '.join(strangers)}: this model's output layer is its embedding (tied)"
                )
            return [f"{wrong}. There are: {kinds}."]
        if not any(self.targets(module) for module in modules):
            return ["--lora-exclude-modules leaves no module with an adapter. Fix: exclude less."]
        return self._expert_problems(modules)

    def _expert_problems(self, modules: tuple[str, ...]) -> list[str]:
        """What experts' adapters cannot be, since PEFT (0.21.2) cannot compute them on HF's joined experts."""
        kinds: dict[str, set[str]] = {"gate_proj": set(), "up_proj": set(), "down_proj": set()}
        for module in modules:
            if expert_of(module) is not None and self.targets(module):
                expert, _, kind = module.rpartition(".")
                kinds[kind].add(expert)
        if not any(kinds.values()):
            return []
        asked = f"--lora-target-modules {' '.join(self.lora_target_modules)} asks for adapters on experts"
        if self.lora_dropout:
            return [f"{asked}, which cannot drop any of their input: --lora-dropout {self.lora_dropout}. Fix: drop it."]
        if kinds["gate_proj"] != kinds["up_proj"]:
            odd = min(kinds["gate_proj"] ^ kinds["up_proj"])
            return [f"{asked}, but of {odd} on one of gate_proj and up_proj only, which PEFT cannot load. Fix: both."]
        for kind, those in kinds.items():
            whole = {module.rpartition(".")[0] for module in modules if expert_of(module) is not None}
            if those and those != whole:
                odd = min(whole - those)
                return [f"{asked}, but not on {kind} of {odd}: PEFT has one of all experts or none. Fix: name all."]
        return []

    def missing_files(self) -> list[str]:
        """Files of --lora-load that are not there."""
        if not self.lora_load:
            return []
        missing = [
            name for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS) if not os.path.isfile(os.path.join(self.lora_load, name))
        ]
        return [f"--lora-load {self.lora_load}: has no {' and no '.join(missing)}."] if missing else []


def _matches(patterns: list[str], module: str) -> bool:
    """PEFT's rule: one pattern is for the whole name, names are ends of it at a dot."""
    if patterns == [ALL_LINEAR]:
        return module not in OUTPUT.modules
    if len(patterns) == 1 and not _NAME.fullmatch(patterns[0]):
        return re.fullmatch(patterns[0], module) is not None
    return any(module == name or module.endswith("." + name) for name in patterns)


def _pattern_problems(name: str, patterns: list[str]) -> list[str]:
    flag_name = f"--{name.replace('_', '-')}"
    if len(patterns) > 1 and ALL_LINEAR in patterns:
        return [f"{flag_name} {' '.join(patterns)}: all-linear is every module. Fix: drop the others."]
    odd = [pattern for pattern in patterns if not _NAME.fullmatch(pattern)]
    if odd and len(patterns) > 1:
        return [f"{flag_name} {' '.join(patterns)}: {odd[0]!r} is a pattern, and stands alone. Fix: join them by |."]
    try:
        re.compile(odd[0] if odd else "")
    except re.error as error:
        return [f"{flag_name} {odd[0]!r} is no regular expression: {error}."]
    return []


def served_modules(lora: LoraConfig, model: ModelConfig) -> list[str]:
    """Ends of HF names of the modules with adapters, as SGLang's --lora-target-modules has them."""
    return sorted({name.rsplit(".", 1)[-1] for name in target_modules(model) if lora.targets(name)})


def adapter_flags(lora: LoraConfig, model: ModelConfig, *, num_versions: int = 2) -> dict[str, str | bool | list[str]]:
    """SGLang's arguments of an engine that serves so many versions of these adapters at a time, and the base.

    How many are loaded is left to the syncs: SGLang would unload the oldest by itself, and load nothing until the last
    request for it has ended.
    """
    return {
        "enable_lora": True,
        "max_lora_rank": str(lora.lora_rank),
        "lora_target_modules": served_modules(lora, model),
        "max_loras_per_batch": str(num_versions + 1),
    }
