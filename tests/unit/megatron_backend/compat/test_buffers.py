"""Collectives of a rank that is alone, and gradients scaled where they lie."""

import pytest
import torch
import torch.distributed as dist
from megatron.core import utils
from megatron.core.distributed import param_and_grad_buffer

needs_no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="gloo alone copies")


@needs_no_cuda
@pytest.mark.parametrize("name", ["dist_reduce_scatter_func", "dist_all_gather_func"])
def test_a_rank_that_is_alone_asks_nobody_in_place_and_is_answered_elsewhere(name, monkeypatch):
    collective, group = getattr(param_and_grad_buffer, name), dist.ProcessGroup(0, 1)
    own, other = torch.arange(4.0), torch.zeros(4)
    assert collective(own, own, group=group, async_op=False) is None  # this group has no backend to ask
    with pytest.raises(RuntimeError):
        collective(other, own, group=group, async_op=False)
    with pytest.raises(RuntimeError):
        collective(own, own, group=dist.ProcessGroup(0, 2), async_op=False)


def test_gradients_are_scaled_where_they_lie():
    gradients = [torch.randn(5), torch.randn(2, 3)]
    expected = [(gradient * 0.3, gradient.data_ptr()) for gradient in gradients]
    utils.local_multi_tensor_scale(1, None, [gradients, gradients], 0.3)
    assert all(
        torch.equal(one, scaled) and one.data_ptr() == place
        for one, (scaled, place) in zip(gradients, expected, strict=True)
    )
