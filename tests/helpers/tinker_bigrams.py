"""A small protocols.Service for the API's tests: its models are tables of bigrams, so numbers can be checked.

W [V, V]: log p(target | token) = log_softmax(W[token])[target]. optim_step: W -= learning_rate * gradient.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import uuid
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from slime_like.errors import RunError
from slime_like.records import LossRow, PassResult
from slime_like.tinker.errors import Refused
from slime_like.tinker.records import (
    UNLISTED,
    Call,
    CallFailure,
    CallResult,
    Kind,
    SampledSequence,
    SampleJob,
    SampleResult,
    StillWaiting,
    TopLogprobs,
)
from slime_like.tinker.store.database import Database
from slime_like.tinker.store.tables import CheckpointRow, ModelRow, SamplerRow

VOCABULARY = 32
END = 0
#: A prompt that begins with it is never answered, but may be cancelled.
HELD = VOCABULARY - 1
BASE = "bigrams"
_EMPTY = (0, np.nan)


def base_table() -> np.ndarray:
    """W of the base model."""
    return np.random.default_rng(7).normal(size=(VOCABULARY, VOCABULARY))


def log_softmax(table: np.ndarray) -> np.ndarray:
    """float64, over the last axis."""
    shifted = table - table.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


@dataclasses.dataclass
class _Model:
    table: np.ndarray
    gradient: np.ndarray
    done_seq: int = -1
    waiting: dict[int, tuple[str, Call]] = dataclasses.field(default_factory=dict)


class BigramService:
    """Calls in, answers out; a model's are executed by seq_id. num_runs: calls executed, by kind.

    refusal: what every call is answered with while it is there.
    """

    def __init__(self, database: Database, folder: Path):
        self._database, self._folder = database, folder
        self._models: dict[str, _Model] = {}
        self._ids: dict[tuple[str, int], str] = {}
        self._owners: dict[str, str] = {}
        self._outcomes: dict[str, asyncio.Future[CallResult | CallFailure]] = {}
        self.num_runs: dict[Kind, int] = {}
        self.num_cancelled = 0
        self.refusal: Refused | None = None

    def stats(self) -> dict[str, Any]:
        """As protocols.Service has it; of two tenants."""
        return {"queued_requests": {"ann": 2, "bob": 3}, "seconds": {"optim_step": 1.5}, "ended": {"sample/done": 4}}

    async def submit(self, call: Call) -> str:
        """As protocols.Service has it."""
        if self.refusal is not None:
            raise self.refusal
        owner = call.model_id or call.sampler_id
        if owner and call.seq_id is not None and (owner, call.seq_id) in self._ids:
            return self._ids[owner, call.seq_id]
        is_new = call.kind in (Kind.CREATE_MODEL, Kind.CREATE_FROM_STATE)
        if call.model_id and not is_new and call.model_id not in self._models:
            raise Refused(f"there is no {call.model_id!r}", status=404)
        request_id = uuid.uuid4().hex
        if owner and call.seq_id is not None:
            self._ids[owner, call.seq_id] = request_id
        self._owners[request_id] = call.tenant
        self._outcomes[request_id] = asyncio.get_running_loop().create_future()
        if call.model_id is None:
            await self._run(request_id, call)
        elif is_new:
            table = base_table()
            self._models[call.model_id] = _Model(table, np.zeros_like(table))
            await self._write_model(call)
            await self._in_order(call.model_id, request_id, call)
        else:
            await self._in_order(call.model_id, request_id, call)
        return request_id

    async def result(
        self, request_id: str, *, tenant: str, timeout_s: float
    ) -> CallResult | CallFailure | StillWaiting | None:
        """As protocols.Service has it."""
        if self._owners.get(request_id) != tenant:
            return None
        try:
            return await asyncio.wait_for(asyncio.shield(self._outcomes[request_id]), timeout_s)
        except TimeoutError:
            return StillWaiting(queue_state="paused_capacity", reason="held by the test")

    async def cancel(self, request_id: str, *, tenant: str) -> None:
        """As protocols.Service has it."""
        outcome = self._outcomes.get(request_id)
        if outcome is not None and self._owners[request_id] == tenant and not outcome.done():
            outcome.set_result(CallFailure(kind=Kind.SAMPLE, category="user", message="cancelled"))
            self.num_cancelled += 1

    async def _in_order(self, model_id: str, request_id: str, call: Call) -> None:
        model = self._models[model_id]
        if call.seq_id is None:
            await self._run(request_id, call)
            return
        model.waiting[call.seq_id] = (request_id, call)
        while (ready := model.waiting.pop(model.done_seq + 1, None)) is not None:
            model.done_seq += 1
            await self._run(*ready)

    async def _run(self, request_id: str, call: Call) -> None:
        self.num_runs[call.kind] = self.num_runs.get(call.kind, 0) + 1
        if call.sample is not None and call.sample.prompt[0] == HELD:
            return
        outcome: CallResult | CallFailure
        try:
            outcome = CallResult(kind=call.kind, result=await self._execute(call))
        except RunError as error:
            outcome = CallFailure(kind=call.kind, category="user", message=str(error))
        self._outcomes[request_id].set_result(outcome)

    async def _execute(self, call: Call) -> Any:
        if call.kind == Kind.SAMPLE:
            assert call.sample is not None, "a sample has its job"
            return sample(await self._sampler_table(call.sample.sampler_id), call.sample)
        assert call.model_id is not None, "all others are a model's"
        model = self._models[call.model_id]
        if call.kind == Kind.REFUSED:
            raise RunError(call.fields["message"])
        if call.kind in (Kind.FORWARD, Kind.FORWARD_BACKWARD):
            answer, gradient = bigram_pass(model.table, call.rows, call.fields["loss"])
            if call.kind == Kind.FORWARD_BACKWARD:
                model.gradient += gradient
            return answer
        if call.kind == Kind.OPTIM_STEP:
            model.table = model.table - call.fields["adam"]["learning_rate"] * model.gradient
            norm, model.gradient = float(np.linalg.norm(model.gradient)), np.zeros_like(model.gradient)
            return {"metrics": {"grad_norm": norm}}
        if call.kind in (Kind.SAVE_WEIGHTS, Kind.SAVE_FOR_SAMPLER):
            return await self._save(call, model)
        if call.kind in (Kind.LOAD_WEIGHTS, Kind.CREATE_FROM_STATE):
            model.table = await self._load(call.fields["path"])
            return {"path": call.fields["path"], "model_id": call.model_id}
        if call.kind == Kind.UNLOAD_MODEL:
            del self._models[call.model_id]
        return {"model_id": call.model_id}

    async def _write_model(self, call: Call) -> None:
        spec = call.fields["spec"]
        row = ModelRow(
            id=call.model_id,
            session_id=call.session_id,
            tenant=call.tenant,
            base_model=spec["base_model"],
            lora_rank=spec["lora_rank"],
            spec=dict(spec),
            created=1.0,
            last_request=2.0,
            user_metadata=call.fields["user_metadata"],
        )
        async with self._database.write() as session:
            session.add(row)

    async def _save(self, call: Call, model: _Model) -> dict[str, str]:
        folder = self._folder / uuid.uuid4().hex
        folder.mkdir(parents=True)
        save_file({"table": model.table}, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
        if (sampler_id := call.fields.get("sampler_id")) is not None:
            row = SamplerRow(
                id=sampler_id,
                session_id=call.session_id,
                tenant=call.tenant,
                base_model=BASE,
                folder=str(folder),
                created=3.0,
            )
            async with self._database.write() as session:
                session.add(row)
            return {"sampler_id": sampler_id}
        kind = "training" if call.kind == Kind.SAVE_WEIGHTS else "sampler"
        path = (
            f"tinker://{call.model_id}/{'weights' if kind == 'training' else 'sampler_weights'}/{call.fields['name']}"
        )
        checkpoint = CheckpointRow(
            path=path,
            model_id=call.model_id,
            tenant=call.tenant,
            kind=kind,
            name=call.fields["name"],
            folder=str(folder),
            size_bytes=sum(file.stat().st_size for file in folder.iterdir()),
            created=4.0,
            has_optimizer=kind == "training",
            user_metadata=call.fields["user_metadata"],
        )
        async with self._database.write() as session:
            session.add(checkpoint)
        return {"path": path}

    async def _load(self, path: str) -> np.ndarray:
        async with self._database.read() as session:
            row = await session.get(CheckpointRow, path)
        if row is None:
            raise RunError(f"there are no weights {path}")
        return _read_table(row.folder)

    async def _sampler_table(self, sampler_id: str) -> np.ndarray:
        async with self._database.read() as session:
            row = await session.get(SamplerRow, sampler_id)
        assert row is not None, "the API asks of samplers that there are"
        return base_table() if row.folder is None else _read_table(row.folder)


def _read_table(folder: str) -> np.ndarray:
    from safetensors.numpy import load_file

    return load_file(Path(folder) / "adapter_model.safetensors")["table"]


def bigram_pass(table: np.ndarray, rows: Any, loss: str) -> tuple[PassResult, np.ndarray]:
    """Log-probs, "loss" as a sum, and the gradient of W: cross_entropy, and importance_sampling, of one target each."""
    gradient, total, log_probs = np.zeros_like(table), 0.0, []
    for row in rows:
        if (row.targets >= VOCABULARY).any() or (row.tokens >= VOCABULARY).any():
            raise RunError(f"a token id beyond the vocabulary of {VOCABULARY}")
        picked = log_softmax(table)[_columns(row.tokens, row.targets), row.targets]
        log_probs.append(picked.astype(np.float32))
        factors = -row.inputs["weights"].astype(np.float64) if loss == "cross_entropy" else _importance(row, picked)
        total += float((factors * (picked if loss == "cross_entropy" else 1.0)).sum())
        for token, targets, ours in zip(row.tokens, *_two_dimensional(row.targets, factors), strict=True):
            for target, factor in zip(targets, ours, strict=True):
                gradient[token] += factor * (np.eye(VOCABULARY)[target] - np.exp(log_softmax(table[token])))
    return PassResult(log_probs=log_probs, metrics={"loss": total}), gradient


def _columns(tokens: np.ndarray, targets: np.ndarray) -> np.ndarray:
    return tokens if targets.ndim == 1 else tokens[:, None]


def _two_dimensional(*arrays: np.ndarray) -> list[np.ndarray]:
    return [array if array.ndim == 2 else array[:, None] for array in arrays]


def _importance(row: LossRow, picked: np.ndarray) -> np.ndarray:
    return -np.exp(picked - row.inputs["logprobs"]) * row.inputs["advantages"]


def sample(table: np.ndarray, job: SampleJob) -> SampleResult:
    """Token by token; temperature 0 takes the likeliest."""
    log_probs = log_softmax(table)
    rng = np.random.default_rng(job.seed)
    stops = (END,) if job.stop is None else job.stop
    sequences = []
    for _ in range(job.num_samples):
        tokens: list[int] = []
        reason = "length"
        while len(tokens) < (job.max_tokens or 16):
            odds = log_probs[tokens[-1] if tokens else job.prompt[-1]]
            chances = np.exp(log_softmax(odds / job.temperature)) if job.temperature else None
            tokens.append(int(odds.argmax() if chances is None else rng.choice(VOCABULARY, p=chances)))
            if tokens[-1] in stops:
                reason = "stop"
                break
        before = [int(job.prompt[-1]), *tokens[:-1]]
        sequences.append(
            SampledSequence(
                tokens=np.array(tokens, np.int32),
                logprobs=log_probs[before, tokens].astype(np.float32),
                stop_reason=reason,
                topk=top(log_probs[before], job.topk_sample_logprobs),
            )
        )
    prompt_logprobs = np.concatenate([[np.nan], log_probs[job.prompt[:-1], job.prompt[1:]]]).astype(np.float32)
    topk_prompt = _after_nothing(top(log_probs[job.prompt[:-1]], job.topk_prompt_logprobs))
    if job.prompt_logprobs_last_n is not None:
        prompt_logprobs[: -job.prompt_logprobs_last_n] = np.nan
        if topk_prompt is not None:
            topk_prompt.token_ids[: -job.prompt_logprobs_last_n] = _EMPTY[0]
            topk_prompt.logprobs[: -job.prompt_logprobs_last_n] = _EMPTY[1]
    targets = job.prompt_targets
    if targets is not None:
        scores = log_probs[job.prompt[:-1, None], targets]
        targets = np.where(targets >= 0, scores, np.where(targets == UNLISTED, np.nan, 0.0)).astype(np.float32)
    return SampleResult(
        sequences=tuple(sequences),
        prompt_logprobs=prompt_logprobs if job.prompt_logprobs else None,
        topk_prompt=topk_prompt,
        prompt_targets=targets,
    )


def top(log_probs: np.ndarray, k: int) -> TopLogprobs | None:
    """The k likeliest of each row."""
    if not k:
        return None
    ids = np.argsort(-log_probs, axis=-1, kind="stable")[:, :k].astype(np.int32)
    return TopLogprobs(token_ids=ids, logprobs=np.take_along_axis(log_probs, ids, -1).astype(np.float32))


def _after_nothing(tops: TopLogprobs | None) -> TopLogprobs | None:
    """With a first row for the token that nothing comes before."""
    if tops is None:
        return None
    ids = np.concatenate([np.full_like(tops.token_ids[:1], _EMPTY[0]), tops.token_ids])
    logprobs = np.concatenate([np.full_like(tops.logprobs[:1], _EMPTY[1]), tops.logprobs])
    return TopLogprobs(token_ids=ids, logprobs=logprobs)
