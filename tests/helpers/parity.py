"""The parity table's rows and how they are run: one family, layout and format of batches each, all in one world of four
processes.

A row compares with HF transformers inside the ranks, so that only differences travel: log-probs, loss, gradient norm,
and every single gradient, which are gathered by the way that weights are exported.
"""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable

import numpy as np
from safetensors.numpy import load_file

from slime_like.records import BASE, REFERENCE, TrainSample, per_token
from tests.helpers.hf_truth import CHOOSING_BIAS, Truth, first_step_truth
from tests.helpers.train_world import (
    add_gradients,
    advantage_of,
    free_ports,
    make_config,
    make_samples,
    recipe_of,
    run_ranks,
)

TEMPERATURE, KL_COEF, ENTROPY_COEF = 0.7, 0.1, 0.01
LOSS = {"use_kl_loss": True, "kl_loss_type": "k2", "kl_loss_coef": KL_COEF, "entropy_coef": ENTROPY_COEF}
ROWS_PER_WORLD = 60
DYNAMIC = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 40, "balance_data": True}


def ragged_batch() -> list[TrainSample]:
    """make_samples, and two more: one of 3 tokens (fewer than 2 x 2 and 2 x 4 chunks), one of 16 trained on its first
    tokens only.
    """
    samples = make_samples()
    short, early = make_samples(2, seed=7)
    mask = np.array([0, 1, 1], dtype=np.int8)
    short = dataclasses.replace(
        short,
        **{name: getattr(short, name)[:3] for name in ("tokens", "engine_logprobs", "weight_versions")},
        loss_mask=mask,
        advantages=per_token(advantage_of(short), mask),
        weights=per_token(1.0, mask),
    )
    generator = np.random.default_rng(9)
    mask = np.zeros(16, dtype=np.int8)
    mask[2:7] = 1
    early = dataclasses.replace(
        early,
        tokens=generator.integers(0, 101, 16).astype(np.int32),
        loss_mask=mask,
        engine_logprobs=(-4.6 + generator.normal(size=16)).astype(np.float32) * mask,
        weight_versions=np.where(mask, 0, -1).astype(np.int32),
        advantages=per_token(advantage_of(early), mask),
        weights=per_token(1.0, mask),
    )
    return [*samples, short, early]


def sharing_batch() -> list[TrainSample]:
    """Ten samples that begin alike: answers to one prompt, one of them given twice and one the beginning of another;
    forks of an episode; one alone. No two neighbours are of one prompt.
    """
    generator = np.random.default_rng(3)

    def tokens(count: int) -> list[int]:
        return generator.integers(0, 101, count).tolist()

    prompt, history = tokens(14), tokens(9)
    answers = [tokens(count) for count in (1, 6, 9)]
    later = history + tokens(7)
    groups = [
        [prompt + answer for answer in answers] + [prompt + answers[1], prompt + answers[2][:5]],
        [later + tokens(5), later + tokens(3), history + tokens(6), later],
        [tokens(13)],
    ]
    firsts = [14, 9, 4]  # tokens that are not trained
    samples = []
    for number, (prompt_index, index) in enumerate([(0, 0), (1, 0), (0, 1), (2, 0), (1, 1), (0, 2), (1, 2), (0, 3),
                                                    (1, 3), (0, 4)]):  # fmt: skip
        row = np.array(groups[prompt_index][index], dtype=np.int32)
        mask = np.ones(len(row), dtype=np.int8)
        mask[: firsts[prompt_index]] = 0
        if number == 4:
            mask[12:14] = 0  # what is shared is trained in some samples only
        engine = (-4.6 + generator.normal(size=len(row)) * mask).astype(np.float32) * mask
        samples.append(
            TrainSample(
                prompt_index=prompt_index, sample_index=index, tokens=row, loss_mask=mask, engine_logprobs=engine,
                weight_versions=np.where(mask, 0, -1).astype(np.int32), reward=0.0,
                advantages=per_token(float(generator.normal()), mask), weights=per_token(1.0, mask),
            )
        )  # fmt: skip
    return samples


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table."""

    model: str
    layout: str
    ranks: int
    parallel: dict
    format: str = "packed"
    batch: dict = dataclasses.field(default_factory=lambda: DYNAMIC)
    loss: dict = dataclasses.field(default_factory=dict)
    bf16: bool = False

    @property
    def shares(self) -> bool:
        """Whether its samples begin alike, and what they have in common is computed once."""
        return self.batch.get("share_prompt") == "on"

    @property
    def samples(self) -> list[TrainSample]:
        """What it is compared on."""
        return sharing_batch() if self.shares else ragged_batch()

    @property
    def name(self) -> str:
        """For people and for pytest."""
        return f"{self.model}: {self.layout}, {self.format}" + (", bf16" if self.bf16 else "")


def in_waves(rows: list[Row], num_ranks: int = 4) -> list[list[tuple[int, int]]]:
    """[[(number of a row, its first rank)]]: rows of few ranks side by side, so that few wait for the others."""
    waves: list[list[tuple[int, int]]] = []
    used = num_ranks
    for number in sorted(range(len(rows)), key=lambda n: rows[n].ranks):
        ranks = rows[number].ranks
        if used + ranks > num_ranks:
            waves.append([])
            used = 0
        waves[-1].append((number, used))
        used += ranks
    return waves


def run_rows(place, rows: list[Row], folders: dict[str, str], truths: dict, ports: list[int]) -> dict[int, dict]:
    """Number of a row -> what this rank found, for the rows that it has a part in."""
    results = {}
    for wave in in_waves(rows, place["world_size"]):
        for number, first in wave:
            row = rows[number]
            if first <= place["rank"] < first + row.ranks:
                own = place | {"rank": place["rank"] - first, "world_size": row.ranks, "master_port": ports[number]}
                try:
                    results[number] = run_row(own, row, folders, truths[truth_key(row)])
                except Exception as error:
                    raise RuntimeError(f"{row.name}, its rank {own['rank']}: {error}") from error
                gc.collect()  # the trainer's process groups, whose threads would otherwise add up from row to row
    return results


def run_table(rows: list[Row], folders: dict[str, str], *, timeout_s: float) -> list[list[dict]]:
    """For each row what each of its ranks found, from worlds of four processes.

    Torch does not end every thread of a process group that it destroys, so that a world is left after ROWS_PER_WORLD
    rows.
    """
    truths = {}
    for key, row in {truth_key(row): row for row in rows}.items():
        model, over_tokens, _ = key
        options = {
            "temperature": TEMPERATURE,
            "kl_coef": KL_COEF,
            "entropy_coef": ENTROPY_COEF,
            "per_token": over_tokens,
        }
        truths[key] = first_step_truth(
            folders[model], row.samples, reference=folders["reference of " + model], **options
        )
    results, end = [], time.monotonic() + timeout_s
    for first in range(0, len(rows), ROWS_PER_WORLD):
        part = rows[first : first + ROWS_PER_WORLD]
        needed = {key: truths[key] for key in {truth_key(row) for row in part}}
        by_rank = run_ranks(
            run_rows, 4, part, folders, needed, free_ports(len(part)), timeout_s=max(end - time.monotonic(), 1.0)
        )
        results += [[of_rank[number] for of_rank in by_rank if number in of_rank] for number in range(len(part))]
    return results


def truth_key(row: Row) -> tuple[str, bool, bool]:
    """Which oracle a row has."""
    return row.model, bool(row.loss.get("calculate_per_token_loss")), row.shares


def run_row(place, row: Row, folders: dict[str, str], truth: Truth) -> dict:
    """Differences from HF, and what must be equal on every rank."""
    from slime_like.megatron_backend.worker import TrainWorker

    groups = {
        "parallel": row.parallel,
        "batch": row.batch,
        "loss": LOSS | row.loss,
        "rollout": {"rollout_temperature": TEMPERATURE},
    }
    groups["optimizer"] = {"bf16": row.bf16}
    groups["checkpoint"] = {"ref_load": folders["reference of " + row.model], "load": folders[row.model]}
    config = make_config(folders[row.model], num_ranks=row.ranks, num_samples=10, **groups)
    started = time.monotonic()
    worker = TrainWorker(config, **place)
    worker.start()
    samples = row.samples
    prepared = worker.prepare(samples)
    log_probs, reference = recipe_of(worker).log_probs(samples), recipe_of(worker).log_probs(samples, weights=REFERENCE)
    exported = {name: tensor.float().numpy().copy() for name, tensor in worker.export(BASE)}
    metrics = add_gradients(worker, samples)
    gradients = whole_gradients(worker)
    _, grad_norm, _ = worker.optimizer.step()
    worker._clear_gradients()
    after = recipe_of(worker).log_probs(samples)
    lone = recipe_of(worker).train(1, samples[:1])  # fewer samples than data parallel ranks
    worker.close()
    weights = load_file(f"{folders[row.model]}/model.safetensors")
    largest = max(np.abs(gradient).max() for gradient in truth.gradients.values())
    return {
        "log_probs": _furthest(log_probs, truth.log_probs),
        "log_probs_mean": float(np.mean(np.abs(np.concatenate(log_probs) - np.concatenate(truth.log_probs)))),
        "reference": _furthest(reference, truth.reference_log_probs),
        "gradient": max(
            (float(np.abs(gradients[name] - truth.gradients[name]).max() / largest) for name in gradients), default=0.0
        ),
        "gradient names": sorted(gradients),
        "all names": sorted(truth.gradients),
        "exported": max((float(np.abs(exported[name] - weights[name]).max()) for name in exported), default=0.0),
        "grad_norm": abs(grad_norm / truth.grad_norm - 1),
        **{
            name: abs(metrics["train/" + name] / getattr(truth, field) - 1)
            for name, field in (("loss", "loss"), ("entropy", "entropy"), ("kl_loss", "kl"))
        },
        "engine": [metrics["train/logprob_abs_diff"], metrics["train/logprob_abs_diff_max"]],
        "same": [metrics, grad_norm, lone.metrics],
        "lone": lone.metrics,
        "scores": [*log_probs, *after],
        "computed": prepared.num_computed_tokens / prepared.num_tokens,
        "seconds": time.monotonic() - started,
    }


def _furthest(ours: list[np.ndarray], theirs: list[np.ndarray]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(ours, theirs, strict=True))


def whole_gradients(worker) -> dict[str, np.ndarray]:
    """See gradients_as: of the whole model, under HF names."""

    def exported() -> dict[str, np.ndarray]:
        tensors = worker.export(BASE)
        return {name: x.float().numpy().copy() for name, x in tensors if not name.endswith(CHOOSING_BIAS)}

    return gradients_as(worker, exported)


def gradients_as(worker, read: Callable[[], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Gradients accumulated by forward_backward, summed over the ranks, as `read` gives this rank's weights: whole, of
    its pipeline stage.

    Collective, and to be followed by an optimizer step or by clearing. They take the weights' place and are exported
    like weights, so what tensor and expert parallel ranks hold comes together as proven for weights.
    """
    import torch
    from megatron.core.distributed import finalize_model_grads

    chunks = worker.model if isinstance(worker.model, list) else [worker.model]
    finalize_model_grads(chunks)
    for chunk in chunks:
        for buckets in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            if not buckets.ddp_config.use_distributed_optimizer:
                continue
            # Each rank has summed the gradients of its own part of the buffer only.
            group = buckets.intra_distributed_optimizer_instance_group
            for bucket in buckets.buckets:
                mine = bucket.grad_data.view(group.size(), -1)[group.rank()].clone()
                torch.distributed.all_gather_into_tensor(bucket.grad_data, mine, group=group)
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters() if parameter.requires_grad]
    kept = [parameter.detach().clone() for parameter in parameters]
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_(parameter.main_grad)
        gradients = read()
        for parameter, weights in zip(parameters, kept, strict=True):
            parameter.copy_(weights)
    return gradients
