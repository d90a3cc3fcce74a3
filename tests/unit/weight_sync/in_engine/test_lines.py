"""Messages that come in parts, several at once, too long, or not at all."""

from __future__ import annotations

import socket

import pytest

from slime_like.weight_sync.in_engine import lines
from slime_like.weight_sync.in_engine.lines import Lines


def test_messages_are_heard_one_by_one_however_they_come(monkeypatch):
    ours, theirs = (Lines(end) for end in socket.socketpair())
    with ours.socket, theirs.socket:
        theirs.say({"a": 1})
        theirs.say({"b": "é\n"})
        theirs.socket.sendall(b'{"c": ')
        assert not ours.has_one and ours.hear() == {"a": 1}
        assert ours.has_one and ours.hear() == {"b": "é\n"}
        assert not ours.has_one
        theirs.socket.sendall(b"[]}\n")
        assert ours.hear() == {"c": []}
        ours.socket.settimeout(0.05)
        with pytest.raises(TimeoutError):
            ours.hear()
        monkeypatch.setattr(lines, "_MOST", 10)
        theirs.socket.sendall(b"x" * 11)
        with pytest.raises(ValueError, match="more than 10 bytes"):
            ours.hear()
        theirs.socket.close()
        ours._read.clear()
        assert ours.hear() is None
