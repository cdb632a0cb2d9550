"""Compiled RoPE, KV write and decode attention on the CPU equal the plain references in float64."""

import numpy as np
import pytest
import torch

from gpu.operations.decode_attention import numba_decode_attention as attention
from gpu.operations.decode_attention.decode_launch import PagedReads
from gpu.operations.decode_attention.numba_decode_attention import paged_decode_attention_cpu
from gpu.operations.decode_attention.paged_decode_attention import paged_decode_attention_reference
from gpu.operations.kv.numba_rope_kv_write import rope_kv_write_cpu
from gpu.operations.kv.rope_kv_write import rope_kv_write_reference
from gpu.operations.kv.row_places import RowPlaces
from tests.gpu.test_kernels_attention import cells_of, random_bounds
from tests.tolerances import ATTENTION_F32_ATOL

SHAPES = [(8, 2, 64, 16), (4, 4, 32, 32), (6, 1, 80, 64)]  # (heads, kv_heads, dim, page_tokens)
CONTEXTS = [1, 0, 15, 16, 17, 400, 0, 83]
PAGES_A_SLOT = 26


def pool(kv_heads: int, dim: int, page_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pages of NaN, and a page table of 8 slots that share no page."""
    num_pages = len(CONTEXTS) * PAGES_A_SLOT
    pages = [torch.full((num_pages, kv_heads, page_tokens, dim), torch.nan) for _ in range(2)]
    order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(3))
    return pages[0], pages[1], order.view(len(CONTEXTS), -1).to(torch.int32)


def fill(pages: torch.Tensor, page_table: torch.Tensor, slots: torch.Tensor, contexts: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    page_tokens = pages.shape[2]
    for slot, context in zip(slots.tolist(), contexts, strict=True):
        for position in range(context):
            page = page_table[slot, position // page_tokens]
            pages[page, :, position % page_tokens] = torch.randn(pages.shape[1], pages.shape[3], generator=generator)


@pytest.mark.parametrize("spread_tokens", [10**9, 0])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "page_tokens"), SHAPES)
def test_attention_equals_the_reference_in_float64(
    heads: int, kv_heads: int, dim: int, page_tokens: int, spread_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "SPREAD_TOKENS", spread_tokens)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    keys, values, page_table = pool(kv_heads, dim, page_tokens)
    slots = torch.tensor([4, -1, 0, 7, 2, 1, 3, 5], dtype=torch.int32)
    filled = slots.clamp(min=6)
    fill(keys, page_table, torch.where(slots < 0, filled, slots), CONTEXTS, 1)
    fill(values, page_table, torch.where(slots < 0, filled, slots), CONTEXTS, 2)
    query = torch.randn(len(CONTEXTS), heads, dim, generator=torch.Generator().manual_seed(4))
    lens = torch.tensor(CONTEXTS, dtype=torch.int32)
    got = paged_decode_attention_cpu(PagedReads(query, keys, values, page_table, slots, lens, dim**-0.5)).near
    wanted = paged_decode_attention_reference(
        PagedReads(query.double(), keys.double(), values.double(), page_table, slots, lens, dim**-0.5)
    ).near
    torch.testing.assert_close(got.out.double(), wanted.out, rtol=0, atol=ATTENTION_F32_ATOL)
    torch.testing.assert_close(got.lse.double(), wanted.lse, rtol=0, atol=ATTENTION_F32_ATOL)


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "page_tokens"), SHAPES)
def test_near_and_far_equal_the_reference_under_bounds_of_each_head(
    heads: int, kv_heads: int, dim: int, page_tokens: int
) -> None:
    """What no head of a KV head reads is NaN."""
    contexts = [1, 16, 0, 17, 400]
    keys, values, page_table = pool(kv_heads, dim, page_tokens)
    slots = torch.tensor([4, -1, 0, 2, 1], dtype=torch.int32)
    bounds = random_bounds(contexts, heads, seed=heads)
    reads = np.logical_or(*cells_of(bounds, contexts)).reshape(len(contexts), kv_heads, -1, max(contexts)).any(2)
    generator = torch.Generator().manual_seed(3)
    for row, slot in enumerate(slots.tolist()):
        for kv_head, cell in zip(*reads[row].nonzero(), strict=True):
            for pages in (keys, values) if slot >= 0 else ():
                page = page_table[slot, cell // page_tokens]
                pages[page, kv_head, cell % page_tokens] = torch.randn(dim, generator=generator)
    query, lens = torch.randn(len(contexts), heads, dim, generator=generator), torch.tensor(contexts, dtype=torch.int32)
    rest = (page_table, slots, lens, dim**-0.5)
    maxima, wide_maxima = torch.empty(len(contexts), heads, 25), torch.empty(len(contexts), heads, 25).double()
    limits = torch.from_numpy(bounds)
    got = paged_decode_attention_cpu(PagedReads(query, keys, values, *rest), limits, True, maxima)
    wanted = paged_decode_attention_reference(
        PagedReads(query.double(), keys.double(), values.double(), *rest), limits, True, wide_maxima
    )
    for one, other in ((got.near, wanted.near), (got.far, wanted.far)):
        torch.testing.assert_close(one.out.double(), other.out, rtol=0, atol=ATTENTION_F32_ATOL)
        torch.testing.assert_close(one.lse.double(), other.lse, rtol=0, atol=ATTENTION_F32_ATOL)
        assert torch.equal(one.covered, other.covered)
    torch.testing.assert_close(maxima.double(), wide_maxima, rtol=0, atol=ATTENTION_F32_ATOL)


def test_the_comparison_sees_one_lost_token() -> None:
    keys, values, page_table = pool(2, 64, 16)
    slots = torch.tensor([0], dtype=torch.int32)
    fill(keys, page_table, slots, [400], 1)
    fill(values, page_table, slots, [400], 2)
    query = torch.randn(1, 8, 64, generator=torch.Generator().manual_seed(4))
    whole, lost = (
        paged_decode_attention_cpu(
            PagedReads(query, keys, values, page_table, slots, torch.tensor([n], dtype=torch.int32), 0.125)
        ).near
        for n in (400, 399)
    )
    assert (whole.out - lost.out).abs().max() > ATTENTION_F32_ATOL
    assert (whole.lse - lost.lse).abs().max() > ATTENTION_F32_ATOL


def test_a_nan_in_one_context_stays_in_its_row() -> None:
    keys, values, page_table = pool(2, 64, 16)
    slots = torch.tensor([0, 1], dtype=torch.int32)
    for pages in (keys, values):
        fill(pages, page_table, slots, [20, 20], 1)
    keys[page_table[1, 0], 0, 3, 5] = torch.nan
    got = paged_decode_attention_cpu(
        PagedReads(
            torch.ones(2, 8, 64), keys, values, page_table, slots, torch.tensor([20, 20], dtype=torch.int32), 0.125
        )
    ).near
    assert got.out[0].isfinite().all()
    assert got.out[1, :4].isnan().all()
    assert got.lse[1, :4].isnan().all()


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "page_tokens"), SHAPES)
def test_rope_and_write_equal_the_reference(heads: int, kv_heads: int, dim: int, page_tokens: int) -> None:
    generator = torch.Generator().manual_seed(5)
    qkv = torch.randn(5, (heads + 2 * kv_heads) * dim, generator=generator)
    before = qkv.clone()
    angles = torch.rand(500, dim // 2, generator=generator) * 6
    cells = torch.tensor([16, 3, 398, 0, 5])
    positions, slots = torch.tensor([0, 399, 17, 16, 5]), torch.tensor([0, 3, 3, 7, -1], dtype=torch.int32)
    keys, values, page_table = pool(kv_heads, dim, page_tokens)
    wanted_keys, wanted_values = keys.double(), values.double()
    places = RowPlaces(angles.cos(), angles.sin(), positions, cells, slots)
    got = rope_kv_write_cpu(qkv, places, page_table, keys, values, heads)
    wanted = rope_kv_write_reference(
        qkv.double(), places._replace(cos=places.cos.double(), sin=places.sin.double()), page_table,
        wanted_keys, wanted_values, heads,
    )  # fmt: skip
    torch.testing.assert_close(got[:4].double(), wanted[:4], rtol=0, atol=ATTENTION_F32_ATOL)
    torch.testing.assert_close(keys.double(), wanted_keys, rtol=0, atol=ATTENTION_F32_ATOL, equal_nan=True)
    torch.testing.assert_close(values.double(), wanted_values, rtol=0, atol=ATTENTION_F32_ATOL, equal_nan=True)
    assert torch.equal(qkv, before)
