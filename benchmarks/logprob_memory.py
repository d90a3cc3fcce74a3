"""Peak memory of log-probs and entropy at a vocabulary of 152k, against the chunk: what is alive beside the logits.

usage: logprob_memory.py [--tokens 1024] [--chunk 128] [--output benchmarks/results/logprob-memory]

Bytes are counted, not sampled: every tensor that an operation makes is added while it lives (a TorchDispatchMode), so
the numbers are the same on any host. The gradient takes the logits' place. Bound: one fp32 tensor of [chunk,
vocabulary], which no method that makes the softmax of a whole chunk goes below. On the host a chunk is cut further,
into blocks that a cache holds; the last two rows leave that out, as on a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import weakref
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

VOCABULARY = 151936


class LiveBytes(TorchDispatchMode):
    """Bytes of all storages made inside the block that are still alive, and the most there were."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf.untyped_storage())
        return result

    def known(self, *tensors: torch.Tensor) -> None:
        """Leave these out: they were there before."""
        self._seen |= {tensor.untyped_storage()._cdata for tensor in tensors}

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self._seen.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


def measure(tokens: int, chunk: int | None, *, host_blocks: bool = False) -> dict:
    """Largest extra bytes in forward and in backward, also over the bytes of one chunk."""
    from slime_like.megatron_backend.step import forward as module
    from slime_like.megatron_backend.step.forward import Scoring, log_probs_and_entropy

    if not host_blocks:
        module.HOST_ELEMENTS = tokens * VOCABULARY
    generator = torch.Generator().manual_seed(0)
    logits = (
        torch.randn(1, tokens, VOCABULARY, generator=generator, dtype=torch.bfloat16)
        .requires_grad_()
        .view(1, tokens, VOCABULARY)
    )
    targets = torch.randint(0, VOCABULARY, (tokens,), generator=generator)
    one_chunk = min(chunk or tokens, tokens) * VOCABULARY * 4
    with LiveBytes() as live:
        live.known(logits)
        log_probs, entropy = log_probs_and_entropy(
            logits, targets, Scoring(vocab_size=VOCABULARY, temperature=1.0, chunk_tokens=chunk)
        )
        forward = live.peak
        loss = log_probs.sum() + 0.01 * entropy.sum()
        live.peak = live.now
        loss.backward()
        backward = live.peak
    title = "in blocks, as on the host" if host_blocks else "all at once" if chunk is None else f"{chunk} at a time"
    return {"rows": title, "tokens": tokens, "chunk": chunk or tokens, "forward_chunks": forward / one_chunk,
        "backward_chunks": backward / one_chunk,
            "forward_mib": forward / 2**20, "backward_mib": backward / 2**20,
            "logits_mib": logits.numel() * 2 / 2**20}  # fmt: skip


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1024, help="Tokens of the pack.")
    parser.add_argument("--chunk", type=int, default=128, help="--log-probs-chunk-size.")
    parser.add_argument("--output", type=Path, help="Write OUTPUT.json and OUTPUT.md.")
    args = parser.parse_args()
    from slime_like.config.parallel import ParallelConfig
    from slime_like.megatron_backend.initialize import initialize, shut_down
    from slime_like.utils.net import free_port

    os.environ.setdefault("OMP_NUM_THREADS", "2")
    initialize(
        ParallelConfig(), rank=0, world_size=1, local_rank=0, master_address="127.0.0.1", master_port=free_port()
    )
    rows = [
        measure(args.tokens, None, host_blocks=True),
        *(measure(args.tokens, chunk) for chunk in (None, args.chunk)),
    ]
    shut_down()
    lines = [
        (
            f"| {args.tokens} tokens, vocabulary {VOCABULARY}, bf16 logits | forward | backward | forward / chunk |"
            " backward / chunk |"
        ),
        "|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['rows']} | {row['forward_mib']:.0f} MiB | {row['backward_mib']:.0f} MiB |"
            f" {row['forward_chunks']:.2f} | {row['backward_chunks']:.2f} |"
        )
    print("\n".join(lines))
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        hardware = "2-core x86 CPU host; bytes are counted, the same on any host"
        args.output.with_suffix(".json").write_text(
            json.dumps({"hardware": hardware, "rows": rows}, indent=1) + "\n", encoding="utf-8"
        )
        args.output.with_suffix(".md").write_text(
            "\n".join([hardware, "", "Beside the logits, whose place their gradient takes:", "", *lines, ""]),
            encoding="utf-8",
        )


if __name__ == "__main__":
    main()
