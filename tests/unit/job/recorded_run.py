"""A run over parts that only write down their calls."""

from __future__ import annotations

import dataclasses
import types
from pathlib import Path

import numpy as np

from slime_like.config.data import DataConfig
from slime_like.config.model import ModelConfig
from slime_like.config.rollout import RolloutConfig
from slime_like.config.run import RunConfig
from slime_like.config.sync import SyncConfig
from slime_like.job.running import Job, ResolvedRun
from slime_like.loops import sync_loop
from slime_like.observability.console import ProgressConsole
from slime_like.observability.metrics import MetricsLog
from slime_like.records import Prompt, Sample, SampleGroup, StepReport, SyncReceipt, WeightsRef
from slime_like.rollout.data_source import DataSource
from slime_like.utils.files import RunDirectory


def group(index: int) -> SampleGroup:
    tokens, mask = np.array([1, 2, 3], dtype=np.int32), np.array([0, 1, 1], dtype=np.int8)
    zeros, versions = np.zeros(3, dtype=np.float32), np.array([-1, 1, 1], dtype=np.int32)
    prompt = Prompt(index=index, text="", tokens=tokens[:1])
    samples = [
        Sample(
            prompt_index=index,
            sample_index=number,
            tokens=tokens,
            loss_mask=mask,
            engine_logprobs=zeros,
            weight_versions=versions,
            response="",
            reward=float(number),
        )
        for number in range(2)
    ]
    return SampleGroup(prompt=prompt, samples=tuple(samples))


class Part:
    """A part that answers with what it was given for a method, and writes every call into the common list."""

    def __init__(self, name: str, calls: list[str], answers: dict):
        self.name, self.calls, self.answers = name, calls, answers

    def __getattr__(self, method: str):
        def call(*args, **options):
            shown = next((str(value) for value in args if isinstance(value, int | str | tuple | WeightsRef)), "")
            self.calls.append(f"{self.name}.{method}" + (f" {shown}" if shown else ""))
            answer = self.answers.get(method)
            if isinstance(answer, Exception):
                raise answer
            return answer(*args) if callable(answer) else answer

        return call


class Run:
    """A job over such parts, and what it left."""

    def __init__(
        self,
        folder: Path,
        config: RunConfig,
        *,
        num_rollout: int = 2,
        parts: tuple[str, ...] = ("trainer", "engines", "rollouts"),
        **answers: dict,
    ):
        self.calls: list[str] = []
        run = RunDirectory(str(folder))
        data = DataSource([], config.data, path="", tokenizer=None, max_tokens=0)
        resolved = ResolvedRun(config=config, plan=types.SimpleNamespace(), run=run, data=data, num_rollout=num_rollout)
        defaults = {
            "trainer": {
                "put": lambda samples: samples,
                "train": lambda step, samples: StepReport(
                    step=step, num_train_steps=1, num_samples=len(samples), num_tokens=4, metrics={"train/loss": 0.5}
                ),
                "save": lambda done, state: f"checkpoint-{done}",
                "finish_save": True,
            },
            "engines": {
                "sync": lambda weights, trainer, in_use: SyncReceipt(
                    weights=weights, transport="ipc", num_tensors=1, num_bytes=4, seconds=0.1, digest="d"
                ),
                "compare": 0.0,
                "num_members": 1,
            },
            "rollouts": {
                "generate": lambda step, watch: types.SimpleNamespace(
                    groups=(group(2 * step), group(2 * step + 1)),
                    metrics={"rollout/reward_mean": 0.5},
                    busy=((1.0, 2.0),),
                ),
                "evaluate": {"eval/x/reward_mean": 0.5},
                "snapshot": ({"data": {}}, None),
            },
        }
        doubles = {name: Part(name, self.calls, defaults.get(name, {}) | answers.get(name, {})) for name in parts}
        if "engines" in doubles:
            doubles["engines"].num_members = 1
        self.job = Job(resolved=resolved, **doubles)
        self.log = MetricsLog(run, tensorboard=False)

    def go(self) -> list[str]:
        """Run the loop; the calls."""
        with open("/dev/null", "w") as nowhere:
            sync_loop.run(self.job, self.log, ProgressConsole(self.job.num_rollout, nowhere))
        return self.calls


def config(**groups) -> RunConfig:
    base = RunConfig(
        data=DataConfig(num_rollout=2),
        model=ModelConfig(vocab_size=5),
        rollout=RolloutConfig(rollout_batch_size=2, n_samples_per_prompt=2),
    )
    return dataclasses.replace(base, **{"sync": SyncConfig(verify_weight_sync_interval=0), **groups})
