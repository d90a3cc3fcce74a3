import copy
import subprocess
import sys

import pytest
import torch

from slime_like.megatron_backend.compat import megatron as compat

needs_no_cuda = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the stand-in for CUDA is installed only where there is none"
)


@needs_no_cuda
def test_megatron_sees_a_cpu_where_it_asks_for_cuda():
    from megatron.core.pipeline_parallel import schedules

    assert schedules.torch is not torch
    assert schedules.torch.zeros(2, device="cuda").device == torch.device("cpu")
    assert schedules.torch.device("cuda", 1) == torch.device("cpu")
    assert isinstance(torch.device("cpu"), schedules.torch.device)
    assert schedules.torch.cuda.current_device() == "cpu"
    assert schedules.torch.float32 is torch.float32
    copy.copy(schedules.torch.cuda.Event())


@needs_no_cuda
def test_everybody_else_keeps_the_real_torch():
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(2, device="cuda")
    assert torch.zeros(1).type() == "torch.FloatTensor"
    assert torch.zeros(1).type(torch.float64).dtype is torch.float64
    assert torch.zeros(1).type() != "torch.cuda.HalfTensor"


def test_install_is_idempotent():
    finders = len(sys.meta_path)
    compat.install()
    assert len(sys.meta_path) == finders


@pytest.mark.slow
def test_start_is_quiet():
    code = "import slime_like.megatron_backend.model.provider"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr.strip()) == (0, "")
