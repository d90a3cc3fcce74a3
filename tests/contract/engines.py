"""A tiny Qwen3 from a seed, its log-probs by transformers and by an engine, and one whole weight sync."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from slime_like.records import EngineEndpoint, WeightsRef
from slime_like.sglang_backend.client import EngineClient
from slime_like.sglang_backend.launcher import Engine
from slime_like.weight_sync.session import EngineSide, PublishOrder
from slime_like.weight_sync.transports.registry import PublisherOptions, SentReport, WeightPublisher
from slime_like.weight_sync.transports.sources import Sources

VOCAB = 320
TINY = Path(__file__).parents[2] / "models" / "tiny-qwen3"
#: The engine has no tokenizer: prompts are token ids, and so are answers.
FLAGS = {"skip_tokenizer_init": True}


def make_model(seed: int) -> Qwen3ForCausalLM:
    """The tiny Qwen3 with fp32 weights from a seed, large enough that predictions are far from uniform."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16,
        max_position_embeddings=1024, tie_word_embeddings=False, initializer_range=0.2, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).float().eval()


def prompt(seed: int, length: int = 40) -> list[int]:
    """Token ids from a seed."""
    return torch.randint(5, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def hf_logprobs(model: Qwen3ForCausalLM, tokens: list[int], temperature: float = 1.0) -> torch.Tensor:
    """[T-1]: log p(tokens[t] | tokens[<t]) for t = 1 … T-1 by transformers."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0, :-1]
    return (logits / temperature).log_softmax(-1).gather(1, torch.tensor(tokens[1:]).unsqueeze(1)).squeeze(1)


def prompt_logprobs(client: EngineClient, tokens: list[int]) -> torch.Tensor:
    """[T-1]: the same by the engine."""
    answer = client.generate(tokens, {"temperature": 0, "max_new_tokens": 1}, return_logprob=True, logprob_start_len=0)
    return torch.tensor([item[0] for item in answer["meta_info"]["input_token_logprobs"][1:]])


def largest_difference(client: EngineClient, model: Qwen3ForCausalLM) -> float:
    """Between engine and transformers, over the tokens of two prompts."""
    return max(
        (prompt_logprobs(client, prompt(seed)) - hf_logprobs(model, prompt(seed))).abs().max().item() for seed in (1, 2)
    )


@dataclasses.dataclass
class Served:
    """An engine of the test session, its client, and the number of the last sync."""

    engine: Engine
    client: EngineClient
    logprobs_at_start: torch.Tensor
    version: int = 0


def options(
    served: list[Served],
    transport: str,
    *,
    source: int = 0,
    num_sources: int = 1,
    directory: Path | None = None,
    timeout_s: float = 30,
) -> PublisherOptions:
    """Small buckets, so that there are several."""
    endpoints = tuple(one.engine.endpoint for one in served)
    return PublisherOptions(
        transport, endpoints, source, num_sources, 50_000, timeout_s, str(directory) if directory else None, "127.0.0.1"
    )


def order_of(
    endpoints: Sequence[EngineEndpoint],
    transport: str,
    version: int,
    *,
    directory: Path | None = None,
    pause_mode: str = "abort",
) -> PublishOrder:
    """What the engines' side of a sync is told."""
    return PublishOrder(
        weights=WeightsRef(version=version), endpoints=tuple(endpoints), transport=transport, timeout_s=30,
        pause_mode=pause_mode,
        directory=str(directory) if directory else None,
    )  # fmt: skip


def two_sources() -> list[Sources]:
    """What two sources know of each other."""
    host = Sources("127.0.0.1", 0, is_host=True, who="trainer source 0", timeout_s=30)
    return [host, Sources("127.0.0.1", host.port, is_host=False, who="trainer source 1", timeout_s=30)]


def sync(
    served: list[Served],
    model: Qwen3ForCausalLM,
    publishers: list[WeightPublisher],
    transport: str,
    directory: Path | None = None,
) -> list[SentReport]:
    """One whole weight sync: each publisher sends its share of the model's tensors, all at the same time."""
    version = max(one.version for one in served) + 1
    update = EngineSide(order_of([one.client.endpoint for one in served], transport, version, directory=directory))
    update.begin()
    tensors = list(model.state_dict().items())
    share = -(-len(tensors) // len(publishers))
    for publisher in publishers:
        publisher.begin(version)
    with ThreadPoolExecutor() as pool:
        reports = list(
            pool.map(
                lambda i: publishers[i].send(iter(tensors[i * share : (i + 1) * share]), version),
                range(len(publishers)),
            )
        )
    for publisher in publishers:
        publisher.finish(version)
    update.load()
    update.finish()
    for one in served:
        one.version = version
    return reports
