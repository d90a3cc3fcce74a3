"""GPUs alike share a row, the fullest comes first, and every part has its colour; test_timeline.py draws real plans."""

from __future__ import annotations

import pytest

from slime_like.errors import UserError
from slime_like.planning.hardware import GIB
from slime_like.planning.report.picture import as_html, color, main, read_plan, rows
from slime_like.planning.report.timeline import LETTERS


def gpu(bundle: int, gib: float, fits: bool = True) -> dict:
    phase = {"name": "train", "total_bytes": int(gib * GIB), "bytes": {"weights": int(gib * GIB)}}
    return {"bundle": bundle, "fits": fits, "peak_bytes": int(gib * GIB), "phases": [phase]}


def plan(*gpus: dict) -> dict:
    return {"mode": "colocate", "num_gpus": len(gpus), "memory": {"limit_bytes": 80 * GIB, "per_gpu": list(gpus)}}


def test_gpus_alike_share_a_row():
    names = [name for name, _ in rows(plan(gpu(0, 10), gpu(1, 90, fits=False), gpu(2, 10)))]
    assert names == ["GPU 1: peak 90.0 GiB, does not fit", "GPU 0 and 1 more alike: peak 10.0 GiB, fits"]


def test_a_part_has_one_colour_whichever_role_it_belongs_to():
    assert color("ref weights") == color("weights") != color("engine weights")
    assert len({color(part) for part in LETTERS}) == len(LETTERS)


def test_bars_are_drawn_to_the_largest():
    page = as_html(plan(gpu(0, 40)))
    assert "width:50.00%" in page and "left:100.00%" in page  # half of the card, whose end is the scale's


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<html>", "is no JSON"),
        ('{"problems": ["7 GPUs"]}', "no memory timeline. 7 GPUs"),
        ("[]", "no memory timeline"),
    ],
)
def test_what_is_no_plan(text: str, message: str):
    with pytest.raises(UserError, match=message):
        read_plan(text)


def test_a_name_of_another_kind_is_a_mistake(capsys):
    assert main(["plan.pdf"]) == 2
    assert "plan.pdf: the name must end in .png or .html." in capsys.readouterr().err
