"""What a row of the table of transports decides, in every place that reads it."""

from __future__ import annotations

import dataclasses

import pytest

from slime_like.config.placement import PlacementConfig
from slime_like.config.run import RunConfig
from slime_like.config.sync import SyncConfig
from slime_like.config.transports import TRANSPORTS, Transport, choices, fitting, modes, transport_of
from slime_like.errors import ConfigError
from slime_like.planning.placement import make_plan


def test_the_first_one_that_fits_is_the_default():
    assert fitting(colocate=True) == ("ipc", "disk") and fitting(colocate=False) == ("broadcast", "disk")
    assert fitting(colocate=True, several_machines=True) == ("disk",)
    assert choices() == ("ipc", "broadcast", "disk", "http") and modes() == ("delta", "adapter")


def test_an_unknown_one_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="pigeon is unknown. Known: ipc, broadcast, disk, delta, adapter"):
        transport_of("pigeon")


def problems(transport: str, *, colocate: bool) -> list[str]:
    config = RunConfig(sync=SyncConfig(update_weight_transport=transport), placement=PlacementConfig(colocate=colocate))
    return [problem for problem in config.problems() if "--update-weight-transport" in problem]


def test_each_names_the_others_where_it_does_not_fit():
    assert problems("ipc", colocate=False) == [
        "--update-weight-transport ipc needs --colocate. Fix: broadcast or disk."
    ]
    (wrong,) = problems("broadcast", colocate=True)
    assert (
        wrong
        == "--update-weight-transport broadcast does not go with --colocate: NCCL refuses two ranks on one GPU. Fix:"
        " ipc or disk."
    )
    assert (
        problems("ipc", colocate=True) == problems("broadcast", colocate=False) == problems("disk", colocate=True) == []
    )


def test_a_new_row_is_all_that_config_and_plan_need(monkeypatch):
    """Its name is taken by the flag, planned, bounded, and refused where it does not fit."""
    pigeon: Transport = dataclasses.replace(
        TRANSPORTS["broadcast"], name="pigeon", takes_interface=False, why_not_colocated="it needs a window"
    )
    monkeypatch.setitem(TRANSPORTS, "pigeon", pigeon)
    assert make_plan(RunConfig(sync=SyncConfig(update_weight_transport="pigeon"))).transport == "pigeon"
    assert problems("pigeon", colocate=True) == [
        "--update-weight-transport pigeon does not go with --colocate: it needs a window. Fix: ipc or disk."
    ]
    assert SyncConfig(update_weight_transport="pigeon", update_weight_interface="eth0").problems() != []
