"""Bars, verdict and pictures."""

import json
import subprocess
import sys

import pytest

from slime_like.errors import UserError
from slime_like.planning.hardware import GIB
from slime_like.planning.memory.by_phase import GpuMemory, MemoryPlan, PhaseMemory
from slime_like.planning.report.picture import as_html, draw_png, read_plan
from slime_like.planning.report.render import as_json, make_report
from slime_like.planning.report.timeline import render_memory
from tests.helpers.plan_models import LLAMA_70B, TINY, plan_config

COLOCATED = {"colocate": True, "actor_num_gpus_per_node": 4, "rollout_num_gpus_per_engine": 2}


def memory_plan(*sizes: dict, limit: int = 48) -> MemoryPlan:
    """One GPU per dict of GiB by part, each with one phase."""
    gpus = tuple(
        GpuMemory(
            bundle=i,
            limit_bytes=limit * GIB,
            phases=(PhaseMemory(name="train", bytes={k: v * GIB for k, v in size.items()}),),
        )
        for i, size in enumerate(sizes)
    )
    return MemoryPlan(
        limit_bytes=limit * GIB, per_gpu=gpus, advice=("--fewer-bytes",) if any(not gpu.fits for gpu in gpus) else ()
    )


def test_one_letter_is_one_48th_of_the_card():
    text = render_memory(memory_plan({"weights": 10, "optimizer": 20}))
    assert "W" * 10 + "O" * 20 + "·" * 18 + "|  30.0 GiB" in text
    assert "GPU 0: peak 30.0 GiB, fits" in text and "it would fit with" not in text


def test_what_is_too_much_stands_behind_the_card_and_advice_follows():
    text = render_memory(memory_plan({"weights": 40, "critic optimizer": 20}))
    assert "W" * 40 + "O" * 8 + "|" + "O" * 12 + "  60.0 GiB" in text
    assert "DOES NOT FIT" in text and "--fewer-bytes" in text


def test_equal_gpus_share_a_block_and_the_fullest_comes_first():
    text = render_memory(memory_plan({"weights": 1}, {"weights": 1}, {"weights": 30}))
    assert text.index("GPU 2: peak 30.0") < text.index("GPUs 0-1: peak 1.0")


@pytest.fixture
def plan():
    return json.loads(as_json(make_report(plan_config(TINY, placement=COLOCATED))))


def test_the_page_has_a_bar_for_each_phase_and_needs_nothing_else(plan):
    page = as_html(plan)
    for phase in ("start", "generate", "score", "train", "sync"):
        assert f"<td>{phase}<td>" in page
    assert "http" not in page and "<script" not in page
    assert "kv_cache" in page


@pytest.mark.slow
def test_a_png_is_drawn(plan, tmp_path):
    pytest.importorskip("matplotlib")
    draw_png(plan, str(tmp_path / "plan.png"))
    assert (tmp_path / "plan.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("text", "message"),
    [("no json", "pipe the output"), ("{}", "no memory timeline"), ('{"problems": ["too small"]}', "too small")],
)
def test_what_is_no_plan_is_refused(text, message):
    with pytest.raises(UserError, match=message):
        read_plan(text)


def test_the_command_writes_the_page_and_refuses_other_names(plan, tmp_path):
    command = [sys.executable, "-m", "slime_like.planning.report.picture"]
    good = subprocess.run(
        [*command, str(tmp_path / "a.html")],
        input=json.dumps(plan),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    bad = subprocess.run(
        [*command, str(tmp_path / "a.gif")],
        input=json.dumps(plan),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert good.returncode == 0 and (tmp_path / "a.html").read_text() == as_html(plan)
    assert bad.returncode == 2 and ".png or .html" in bad.stderr


def test_colocated_and_disaggregated_pictures_differ_where_they_should():
    apart = {
        "actor_num_gpus_per_node": 8,
        "rollout_num_gpus": 8,
        "rollout_num_gpus_per_engine": 8,
        "gpu_memory_gib": 999.0,
    }
    config = plan_config(
        LLAMA_70B, placement=apart, parallel={"tensor_model_parallel_size": 8, "sequence_parallel": True}
    )
    report = make_report(config)
    trainer, engine = report.memory.per_gpu[0], report.memory.per_gpu[8]
    assert "engine weights" not in trainer.phases[1].bytes and "gradients" not in engine.phases[1].bytes
