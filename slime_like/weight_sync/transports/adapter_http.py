"""Only the adapters, in the body of a request to each engine: no folder that trainer and engines both have to see.

The first source asks the engines; the others, of further pipeline stages, give it theirs through the store by which
sources know of each other. Each tensor goes with its sha256, which every rank of an engine compares with what it got.
Tensors are pickled here, as SGLang wants them, and never unpickled: between sources they are safetensors.
"""

from __future__ import annotations

import base64
import collections
import hashlib
import itertools
import pickle
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
from safetensors.torch import load, save

from slime_like.errors import WeightSyncError
from slime_like.records import POLICY, WeightsRef
from slime_like.sglang_backend.adapter_client import AdapterClient
from slime_like.weight_sync.buckets import NamedTensor, Proof, PublisherOptions, SentReport, num_bytes
from slime_like.weight_sync.together import run_together


class HttpPublisher:
    """See the module."""

    def __init__(self, options: PublisherOptions):
        self._options = options
        self._clients = [AdapterClient(endpoint, timeout_s=options.timeout_s) for endpoint in options.endpoints]
        self._share: dict[str, torch.Tensor] = {}

    def connect(self) -> None:
        """Nothing to do."""

    def begin(self, version: int) -> None:
        """A new round of sources, where there are several."""
        if self._options.sources is not None:
            self._options.sources.new_round()

    def send(self, tensors: Iterable[NamedTensor], version: int, proof: Proof | None = None) -> SentReport:
        """Keep this source's share until all have theirs; the first one gets it."""
        options = self._options
        self._share = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors}
        if options.sources is not None and options.source_index > 0:
            options.sources.announce(options.source_index, base64.b64encode(save(self._share)).decode())
        return SentReport(len(self._share), sum(map(num_bytes, self._share.values())))

    def finish(self, version: int) -> None:
        """Every engine loads all of it. Raises EngineError, WeightSyncError or WaitTimeout naming the engine."""
        options, whole, self._share = self._options, self._share, {}
        if options.source_index > 0:
            return
        if options.sources is not None:
            others = options.sources.channels(range(1, options.num_sources))
            for source, text in others.items():
                part = load(base64.b64decode(text))
                again = sorted(set(part) & set(whole))
                if again:
                    raise WeightSyncError(f"{again[0]} was sent twice (source {source})")
                whole |= part
        config = options.adapter_config
        assert config is not None, "a run that sends adapters says what they are"
        with ThreadPoolExecutor(1) as beside:  # hashing lets other threads run
            digesting = beside.submit(_digests, whole)
            pickled = _pickled(whole)
            digests = digesting.result()
        name = str(WeightsRef(POLICY.name, version))
        tasks = {
            f"engine {client.endpoint.index} at {client.url}": (
                lambda client=client: client.load_adapter_tensors(name, pickled, config, digests)
            )
            for client in self._clients
        }
        run_together(tasks, timeout_s=options.timeout_s, who="trainer source 0", phase="load adapters")

    def abandon(self, version: int) -> None:
        """Forget what was not sent."""
        self._share = {}
        if self._options.sources is not None:
            self._options.sources.fail(f"version {version} was given up")

    def close(self) -> None:
        """Nothing is held."""
        self._share = {}


class _Part:
    """Pickled as a tensor whose numbers lie end to end in a memory that it shares with others, which is written once.
    A pickler asks plain objects in C; to ask for tensors of theirs it would call Python for each.
    """

    __slots__ = ("_memory", "_shape", "_start")

    def __init__(self, memory: torch.TypedStorage, start: int, shape: tuple[int, ...]):
        self._memory, self._start, self._shape = memory, start, shape

    def __reduce__(self) -> tuple:
        strides = [1]
        for size in self._shape[:0:-1]:
            strides.insert(0, strides[0] * size)
        place = self._memory, self._start, self._shape, tuple(strides[: len(self._shape)])
        return torch._utils._rebuild_tensor_v2, (*place, False, collections.OrderedDict())


def _pickled(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Name -> tensor, as torch's own reader takes them. Of 200 tensors SGLang reads one memory in 4 ms, 200 in 150."""
    together: dict[str, _Part] = {}
    for dtype in {tensor.dtype for tensor in tensors.values()}:
        those = {name: tensor for name, tensor in tensors.items() if tensor.dtype == dtype}
        memory = torch.cat([tensor.flatten() for tensor in those.values()])._typed_storage()
        starts = itertools.accumulate((tensor.numel() for tensor in those.values()), initial=0)
        together |= {
            name: _Part(memory, start, tuple(tensor.shape))
            for (name, tensor), start in zip(those.items(), starts, strict=False)
        }
    return pickle.dumps(together)


def _digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    return {name: hashlib.sha256(_bytes_of(tensor)).hexdigest() for name, tensor in tensors.items()}


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.flatten().view(torch.uint8).numpy())
