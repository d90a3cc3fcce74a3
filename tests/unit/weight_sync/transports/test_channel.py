"""What an engine says over its socket, and its answer to the request: which of the two counts.

The rest of channels: test_ipc.py.
"""

from __future__ import annotations

import json
import socket

import pytest

from slime_like.errors import EngineError, WeightSyncError
from slime_like.weight_sync.buckets import PublisherOptions
from slime_like.weight_sync.transports.channel import Channel, Readers


def test_what_an_engine_says_as_its_answer_is_seen_counts_more(monkeypatch):
    monkeypatch.setattr("slime_like.weight_sync.transports.channel._LOOK_S", 0.01)
    ours, engines = socket.socketpair()

    class JustAnswered(Channel):
        def check_engines(self):
            engines.sendall(json.dumps({"error": "ValueError: no such tensor"}).encode() + b"\n")
            raise EngineError("engine 0 stopped taking in weights before all were sent")

    channel = JustAnswered(PublisherOptions("ipc", (), 0, 1, 1 << 20, 5.0, None, "127.0.0.1"), (), None)
    readers = Readers({(0, 0): "engine 0, rank 0"}, channel)
    engines.sendall(json.dumps({"engine": 0, "rank": 0}).encode() + b"\n")
    readers.add(ours)
    with engines, pytest.raises(WeightSyncError, match="engine 0, rank 0: load: ValueError: no such tensor"):
        readers.ask(lambda _: {"load": ["", 0, 0]}, "load")
    readers.close()


@pytest.mark.parametrize("lets_go", [False, True])
def test_what_an_engine_says_counts_more_than_its_answer_to_the_request(lets_go):
    """It says what is wrong, lets go, and answers; whichever we see first."""

    class Answered(Channel):
        def check_engines(self):
            raise EngineError("engine 0 stopped taking in weights before all were sent")

    channel = Answered(PublisherOptions("ipc", (), 0, 1, 1 << 20, 5.0, None, "127.0.0.1"), (), None)
    readers = Readers({(0, 0): "engine 0, rank 0"}, channel)
    ours, engines = socket.socketpair()
    engines.sendall(json.dumps({"engine": 0, "rank": 0}).encode() + b"\n")
    readers.add(ours)
    engines.sendall(json.dumps({"error": "ValueError: no such tensor"}).encode() + b"\n")
    if lets_go:
        engines.close()  # sending to it fails
    try:
        with pytest.raises(WeightSyncError, match="engine 0, rank 0: load: ValueError: no such tensor"):
            readers.ask(lambda _: {"load": ["", 0, 0]}, "load")
    finally:
        readers.close()
        engines.close()
