"""When engines may open our GPU's memory, and whom a source serves. tests/pretend_gpu/test_weight_sync.py opens it."""

from __future__ import annotations

import dataclasses

import torch

from slime_like.records import EngineEndpoint
from slime_like.weight_sync.transports.device_ipc import is_possible
from slime_like.weight_sync.transports.registry import PublisherOptions

ENGINES = tuple(EngineEndpoint(index=index, url="http://127.0.0.1:1", tp_size=2) for index in (3, 5))
OPTIONS = PublisherOptions("ipc", ENGINES, 0, 1, 1, 1.0, None, "127.0.0.1")
BY_CARD = dataclasses.replace(OPTIONS, num_sources=4, cards=((0, 1), (2, 3)))


def test_only_of_those_on_the_same_card():
    assert is_possible(BY_CARD) is torch.cuda.is_available()
    assert not is_possible(OPTIONS) and not is_possible(dataclasses.replace(OPTIONS, endpoints=ENGINES[:1]))


def test_a_source_serves_its_card_or_without_cards_everyone():
    served = [dataclasses.replace(BY_CARD, source_index=source).readers for source in range(4)]
    assert served == [((3, 0),), ((3, 1),), ((5, 0),), ((5, 1),)]
    assert BY_CARD.source_of == {(3, 0): 0, (3, 1): 1, (5, 0): 2, (5, 1): 3}
    assert OPTIONS.readers == ((3, 0), (3, 1), (5, 0), (5, 1)) and OPTIONS.source_of is None
