"""Pages gathered into buffers are the rows that they hold, in order, bit by bit, and nothing beside them is touched."""

import pytest
import torch

from gpu.operations.kv.gather_pages import gather_pages
from tests.gpu.kernel_oracles import DEVICES, DTYPES

pytestmark = [pytest.mark.parametrize("device", DEVICES), pytest.mark.parametrize("dtype", DTYPES)]
SHAPES = [(2, 16, 128), (1, 64, 64), (3, 32, 40)]  # kv_heads, page_tokens, dim


def make_pages(shape, num_pages, dtype, device):
    generator = torch.Generator().manual_seed(num_pages)
    return [torch.randn(num_pages, *shape, generator=generator).to(device, dtype) for _ in range(2)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ids", [[4], [6, 0, 3], [5, 5, 1, 2, 6]])
def test_rows_of_pages_lie_one_after_another(ids, shape, dtype, device):
    kv_heads, page_tokens, dim = shape
    key_pages, value_pages = make_pages(shape, 7, dtype, device)
    key_pages[4, :, 9:] = float("nan")  # nobody has written there
    room = torch.full((2, kv_heads, 9, page_tokens, dim), float("nan"), dtype=dtype, device=device)
    own = slice(2, 2 + len(ids))
    page_ids = torch.tensor([1, *ids, 1], dtype=torch.int32, device=device)[1:-1]
    gather_pages(key_pages, value_pages, page_ids, room[0, :, own], room[1, :, own])
    for pages, gathered in zip((key_pages, value_pages), room, strict=True):
        for place, page in enumerate(ids):
            for head in range(kv_heads):
                got, wanted = gathered[head, 2 + place], pages[page, head]
                assert torch.equal(got.nan_to_num(9.0), wanted.nan_to_num(9.0))
        assert gathered[:, :2].isnan().all()
        assert gathered[:, own.stop :].isnan().all()


def test_buffers_that_do_not_fit_are_refused(dtype, device):
    key_pages, value_pages = make_pages((2, 16, 64), 5, dtype, device)
    page_ids = torch.tensor([0, 1], dtype=torch.int32, device=device)
    room = torch.empty(2, 2, 2, 16, 64, dtype=dtype, device=device)
    with pytest.raises(ValueError, match=r"gather_pages: values is \(2, 1, 16, 64\)"):
        gather_pages(key_pages, value_pages, page_ids, room[0], room[1, :, :1])
