"""Adapters in a request: what each engine is sent, from one source and from several."""

from __future__ import annotations

import base64
import hashlib
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from sglang_backend.fake_http import serve

from slime_like.errors import EngineError, WeightSyncError
from slime_like.records import EngineEndpoint
from slime_like.utils.net import free_port
from slime_like.weight_sync.buckets import PublisherOptions
from slime_like.weight_sync.transports.adapter_http import HttpPublisher
from slime_like.weight_sync.transports.sources import Sources

PATH = "/load_lora_adapter_from_tensors"
CONFIG = {"r": 4, "lora_alpha": 8}
WHOLE = torch.arange(12, dtype=torch.float32)
#: Views of one memory, of which each goes alone; one in half precision.
TENSORS = {"a.lora_A": WHOLE[:4].view(1, 4), "a.lora_B": WHOLE[4:].view(2, 4).T, "b.lora_A": WHOLE[:3].bfloat16()}


def publisher_for(urls, *, tp_sizes=(1, 2), **options):
    endpoints = tuple(
        EngineEndpoint(index=number, url=url, tp_size=tp_size)
        for number, (url, tp_size) in enumerate(zip(urls, tp_sizes, strict=False))
    )
    alone = {"source_index": 0, "num_sources": 1, "sources": None} | options
    return HttpPublisher(
        PublisherOptions(
            transport="http", endpoints=endpoints, buffer_bytes=1, timeout_s=10.0, directory=None, address="127.0.0.1",
            adapter_config=CONFIG, **alone,
        )
    )  # fmt: skip


def check(body, tp_size):
    assert (body["lora_name"], body["config_dict"]) == ("policy@7", CONFIG)
    copies = body["serialized_named_tensors"]
    assert len(copies) == tp_size and len(set(copies)) == 1
    received = pickle.loads(base64.b64decode(copies[0]))  # our own, a moment ago
    assert set(received) == set(TENSORS)
    memories = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in received.values()}
    assert sorted(memories.values()) == [3 * 2, 12 * 4]  # one for each type, of what is sent and no more
    for name, tensor in TENSORS.items():
        assert torch.equal(received[name], tensor) and received[name].dtype == tensor.dtype
        raw = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        assert body["expected_checksums"][name] == hashlib.sha256(raw).hexdigest()


def test_every_engine_gets_all_of_it_for_each_of_its_ranks():
    with serve({PATH: (200, {"success": True})}) as one, serve({PATH: (200, {"success": True})}) as two:
        publisher = publisher_for([one.url, two.url])
        publisher.connect()
        publisher.begin(7)
        report = publisher.send(iter(TENSORS.items()), 7)
        assert not one.calls and not two.calls  # other sources may not have sent yet
        publisher.finish(7)
        publisher.close()
    assert (report.num_tensors, report.num_bytes) == (3, 16 + 32 + 6)
    for server, tp_size in ((one, 1), (two, 2)):
        assert server.paths == [PATH]
        check(server.calls[0][2], tp_size)


def both(url, first, second):
    """Two sources send these in one sync, in threads of their own."""
    port = free_port()
    with ThreadPoolExecutor(2) as pool:

        def work(index, tensors):
            sources = Sources("127.0.0.1", port, is_host=index == 0, who=f"source {index}", timeout_s=10.0)
            publisher = publisher_for([url], source_index=index, num_sources=2, sources=sources)
            publisher.begin(7)
            publisher.send(iter(tensors.items()), 7)
            publisher.finish(7)

        futures = [pool.submit(work, index, tensors) for index, tensors in enumerate((first, second))]
        for future in futures:
            future.result()


def test_the_first_source_sends_what_the_others_have_too():
    with serve({PATH: (200, {"success": True})}) as engine:
        items = list(TENSORS.items())
        both(engine.url, dict(items[:1]), dict(items[1:]))
    assert engine.paths == [PATH]
    check(engine.calls[0][2], 1)


def test_what_goes_wrong_is_named():
    with serve({PATH: (200, {"success": False, "error_message": "rank too large"})}) as engine:
        with pytest.raises(EngineError, match=f"engine 0: POST {engine.url}{PATH} refused: rank too large"):
            both(engine.url, TENSORS, {})
        with pytest.raises(WeightSyncError, match=r"a.lora_A was sent twice \(source 1\)"):
            both(engine.url, TENSORS, TENSORS)
