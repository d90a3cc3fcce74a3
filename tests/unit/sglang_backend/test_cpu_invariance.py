"""A row of a product, and a query of an attention, are the same to the bit whatever stands beside them; and right."""

from __future__ import annotations

import pytest
import torch

from slime_like.sglang_backend.cpu_invariance import BLOCK, RowBlocks, block_attention


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_of_a_product_is_its_own(dtype):
    generator = torch.Generator().manual_seed(1)
    rows, weight = (torch.randn(shape, generator=generator).to(dtype) for shape in ((3 * BLOCK + 5, 96), (96, 160)))
    blocks = RowBlocks()
    whole = blocks.mm(rows, weight)
    error = 0.2 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(whole.double(), rows.double() @ weight.double(), rtol=1e-2, atol=error)
    for start, end in ((0, 1), (0, 7), (60, 70), (190, 197)):
        assert torch.equal(blocks.mm(rows[start:end], weight), whole[start:end])
    bias = torch.randn(160, generator=generator).to(dtype)
    assert torch.equal(blocks.addmm(bias, rows[3:9], weight), blocks.addmm(bias, rows, weight)[3:9])
    assert blocks.mm(rows[:0], weight).shape == (0, 160)


def test_a_host_where_rows_depend_on_each_other_is_refused():
    class Uneven(RowBlocks):
        """A product whose first row of a block is rounded in another way."""

        def _blocks(self, rows, weight, multiply):
            def uneven(rows, weight, out):
                multiply(rows, weight, out=out)
                out[0] += 1e-6

            return super()._blocks(rows, weight, uneven)

    with pytest.raises(RuntimeError, match="64 x .*depends on the rows beside it"):
        Uneven().mm(torch.ones(2, 8), torch.ones(8, 4))


def test_a_query_does_not_depend_on_what_comes_after_it():
    generator = torch.Generator().manual_seed(2)
    length = 2 * BLOCK + 50
    query = torch.randn(1, 4, length, 16, generator=generator)
    key, value = (torch.randn(1, 2, length, 16, generator=generator) for _ in range(2))
    options = {"enable_gqa": True, "scale": 0.3, "is_causal": True}
    whole = block_attention(query, key, value, **options)
    exact = torch.nn.functional.scaled_dot_product_attention(query.double(), key.double(), value.double(), **options)
    torch.testing.assert_close(whole.double(), exact, rtol=0, atol=1e-6)
    for end in (1, 5, BLOCK - 1, BLOCK, BLOCK + 1, 100, length - 1):
        cut = block_attention(*(tensor[:, :, :end] for tensor in (query, key, value)), **options)
        assert torch.equal(cut, whole[:, :, :end]), end
