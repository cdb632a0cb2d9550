"""Rows in codes of 8 bits: written and read as their formulas say, within half a step, and nothing beside them.

Oracles in numpy: e4m3 by its definition, a page's bytes by its layout.
"""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpu.operations.arguments import INTERPRETED
from gpu.operations.decode_attention.decode_launch import PagedReads
from gpu.operations.decode_attention.paged_decode_attention import (
    paged_decode_attention,
    paged_decode_attention_reference,
    workspace_for,
)
from gpu.operations.kv.gather_pages import gather_pages
from gpu.operations.kv.kv_rows import (
    make_codes,
    read_cells,
    read_codes,
    read_rows,
    scales_of,
    width_of,
    write_rows,
)
from tests.gpu import kernel_oracles as oracle
from tests.gpu.kernel_oracles import DEVICES, DTYPES, random, wide
from tests.gpu.packed_oracle import e4m3
from tests.gpu.paged_rows import RawPages, draw_rows, read_raw
from tests.gpu.poison import poison
from tests.gpu.test_kernels_elementwise import Rope
from tests.tolerances import (
    CPU_ATTENTION_FLOAT32,
    KV_FP8_STEP,
    KV_INT8_STEP,
    KV_ROW_FP8,
    KV_ROW_INT8,
    KV_SCALE_FLOAT32,
    ROUNDING_BFLOAT16,
)

on_devices = pytest.mark.parametrize("device", DEVICES)
on_dtypes = pytest.mark.parametrize("dtype", DTYPES)
on_codes = pytest.mark.parametrize("stored", [torch.int8, torch.uint8], ids=["int8", "fp8"])
SHAPES = [(2, 16, 128), (1, 64, 64), (3, 32, 96), (5, 16, 16)]  # kv_heads, page_tokens, dim
LARGEST = {torch.int8: 127.0, torch.uint8: 448.0}
READ_ERROR = {torch.float32: KV_SCALE_FLOAT32, torch.bfloat16: ROUNDING_BFLOAT16}
MEAN_ERROR = {torch.int8: KV_ROW_INT8, torch.uint8: KV_ROW_FP8}


def nearest(rows: np.ndarray, stored: torch.dtype) -> tuple[np.ndarray, np.ndarray]:
    """What rows `[.., dim]` are read as, float64, and the most that an element may be off, a step's half."""
    scales = np.abs(rows).max(-1, keepdims=True) / LARGEST[stored]
    if stored == torch.int8:
        return np.floor(rows / scales + 0.5) * scales, KV_INT8_STEP * scales + 0 * rows
    numbers = np.unique(e4m3(np.array([code for code in range(256) if code & 0x7F != 0x7F], np.uint8)))
    steps = rows / scales
    above = np.searchsorted(numbers, steps).clip(1, len(numbers) - 1)
    low, high = numbers[above - 1], numbers[above]
    return np.where(steps - low < high - steps, low, high) * scales, KV_FP8_STEP * (high - low) * scales


@on_codes
@given(seed=st.integers(0, 2**32 - 1), exponent=st.integers(-60, 60), spread=st.floats(0.1, 8.0))
def test_a_row_is_read_within_half_a_step_whatever_its_size(stored, seed, exponent, spread):
    generator = np.random.default_rng(seed)
    rows = (generator.normal(size=(7, 64)) * np.exp(spread * generator.normal(size=(7, 64)))).astype(np.float32)
    rows = rows * np.float32(2.0) ** exponent
    codes, scales = make_codes(torch.from_numpy(rows), stored)
    got = wide(read_codes(codes, scales, torch.float64))
    _, most = nearest(rows.astype(np.float64), stored)
    assert (np.abs(got - rows) <= most).all()
    top = np.abs(rows).max(-1)
    assert np.abs(np.abs(got).max(-1) / top - 1).max() < KV_SCALE_FLOAT32  # the largest element is the largest code
    assert torch.equal(make_codes(-torch.from_numpy(rows), stored)[1], scales)


@on_codes
def test_errors_of_normal_rows_are_those_of_the_format_and_a_coarser_one_is_seen(stored):
    rows = random(np.random.default_rng(3), (200, 128), torch.float32, "cpu")
    codes, scales = make_codes(rows, stored)
    error = oracle.distance(read_codes(codes, scales, torch.float64), wide(rows))
    assert MEAN_ERROR[stored] / 2 < error < MEAN_ERROR[stored]
    coarse = (codes & 0xF0 if stored == torch.uint8 else codes & -2), scales
    assert oracle.distance(read_codes(*coarse, torch.float64), wide(rows)) > MEAN_ERROR[stored]


@on_codes
def test_rows_of_zeros_stay_zero_and_what_is_not_finite_is_nan(stored):
    rows = torch.zeros(4, 32)
    rows[1, 5], rows[2, 0], rows[3, 31] = float("nan"), float("inf"), -float("inf")
    got = read_codes(*make_codes(rows, stored), torch.float32)
    assert not got[0].any()
    assert got[1:].isnan().all()


@on_devices
@on_dtypes
@on_codes
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_are_written_to_their_cells_and_nothing_else_is(shape, stored, dtype, device):
    kv_heads, page_tokens, dim = shape
    generator = np.random.default_rng(dim)
    pages = torch.zeros(6, kv_heads, page_tokens, width_of(stored, dim), dtype=stored, device=device)
    poison(pages)
    cells = generator.permutation(6 * page_tokens)[:37]
    rows = random(generator, (37, kv_heads, dim), dtype, device).transpose(0, 1)  # heads and tokens strided
    rows = rows * torch.tensor(generator.uniform(1e-3, 1e3, (kv_heads, 37, 1)), device=device).to(dtype)
    page_ids, offsets = (torch.from_numpy(own).to(device) for own in (cells // page_tokens, cells % page_tokens))
    write_rows(rows, page_ids, offsets, pages)
    got, scales = read_raw(pages)
    wanted, most = nearest(wide(rows), stored)
    for token, cell in enumerate(cells):
        own = got[cell // page_tokens, :, cell % page_tokens]
        assert (np.abs(own - wide(rows)[:, token]) <= most[:, token]).all()
    assert (np.abs(got[cells // page_tokens, :, cells % page_tokens] - wanted.swapaxes(0, 1)) > 0).mean() < 1
    others = np.ones((6, page_tokens), bool)
    others[cells // page_tokens, cells % page_tokens] = False
    assert np.isnan(scales.swapaxes(1, 2)[others]).all()
    assert not np.isnan(scales.swapaxes(1, 2)[~others]).any()


@on_devices
@on_dtypes
@on_codes
def test_whole_pages_are_written_as_cells_are(stored, dtype, device):
    kv_heads, page_tokens, dim = SHAPES[0]
    rows = random(np.random.default_rng(5), (kv_heads, 3 * page_tokens, dim), dtype, device)
    ids, token = torch.tensor([4, 0, 2], device=device), torch.arange(3 * page_tokens, device=device)
    both = [torch.zeros(5, kv_heads, page_tokens, dim + 4, dtype=stored, device=device) for _ in range(2)]
    write_rows(rows, ids, None, both[0])
    write_rows(rows, ids[token // page_tokens], token % page_tokens, both[1])
    assert torch.equal(*both)
    assert both[0][ids].any()
    with pytest.raises(ValueError, match="write_rows: 47 tokens; wanted whole pages of 16, or offsets"):
        write_rows(rows[:, :-1], ids[:2], None, both[0])


@on_devices
@on_dtypes
@on_codes
def test_a_row_with_a_nan_is_written_as_nan_and_its_neighbours_are_not(stored, dtype, device):
    pages = torch.zeros(1, 2, 16, 68, dtype=stored, device=device)
    rows = torch.ones(2, 16, 64, dtype=dtype, device=device)
    rows[1, 3, 7], rows[0, 5, 0] = float("nan"), float("inf")
    write_rows(rows, torch.zeros(1, dtype=torch.int64, device=device), None, pages)
    got, _ = read_raw(pages)
    lost = np.isnan(got).all(-1)[0]
    assert np.array_equal(np.argwhere(lost), [[0, 5], [1, 3]])
    assert np.isnan(got).any(-1)[0].sum() == 2


def draw_pages(stored: torch.dtype, device: str, shape: tuple[int, int, int]) -> tuple[torch.Tensor, np.ndarray]:
    """Seven pages, but for the last tokens of one, and what they mean."""
    kv_heads, page_tokens, dim = shape
    raw, generator = RawPages(7, *shape), np.random.default_rng(dim)
    codes, scales, rows = draw_rows(generator, (7, page_tokens, kv_heads, dim), stored)
    for page, offset in np.ndindex(7, page_tokens):
        if page == 4 and offset >= page_tokens - 3:
            rows[page, offset] = np.nan
        else:
            raw.put(page, offset, codes[page, offset], scales[page, offset])
    return raw.tensor(stored, device), rows.swapaxes(1, 2)


@on_devices
@on_dtypes
@on_codes
@pytest.mark.parametrize("shape", SHAPES)
def test_gathered_rows_are_what_codes_mean_also_of_some_heads(shape, stored, dtype, device):
    kv_heads, page_tokens, dim = shape
    (key_pages, keys), (value_pages, values) = (draw_pages(stored, device, shape) for _ in range(2))
    value_pages, values = value_pages.flip(0).contiguous(), values[::-1]
    ids = torch.tensor([5, 0, 4], dtype=torch.int32, device=device)
    for first in (0, kv_heads - 1):
        room = torch.full((2, kv_heads - first, 5, page_tokens, dim), float("nan"), dtype=dtype, device=device)
        gather_pages(key_pages[:, first:], value_pages[:, first:], ids, room[0, :, 1:4], room[1, :, 1:4])
        for gathered, rows in zip(room, (keys, values), strict=True):
            wanted = rows[[5, 0, 4], first:].swapaxes(0, 1)
            got, known = wide(gathered[:, 1:4]), ~np.isnan(wanted)
            assert np.array_equal(~np.isnan(got), known)
            assert (np.abs(got - wanted)[known] <= READ_ERROR[dtype] * np.abs(wanted[known])).all()
            assert gathered[:, [0, 4]].isnan().all()


@on_devices
@on_dtypes
@on_codes
@pytest.mark.parametrize("shape", SHAPES)
def test_single_rows_are_read_in_any_order(shape, stored, dtype, device):
    kv_heads, page_tokens, dim = shape
    pages, rows = draw_pages(stored, device, shape)
    at = np.random.default_rng(8).permutation(4 * kv_heads * page_tokens)[:41]
    out = torch.full((len(at), dim), float("nan"), dtype=dtype, device=device)
    read_rows(pages, torch.from_numpy(at).to(device), out)
    wanted = torch.from_numpy(rows.reshape(-1, dim)[at])
    assert (np.abs(wide(out) - wanted.numpy()) <= READ_ERROR[dtype] * wanted.abs().numpy()).all()
    page, rest = np.divmod(at, kv_heads * page_tokens)
    places = (torch.from_numpy(own).to(device) for own in (page, rest // page_tokens, rest % page_tokens))
    assert np.array_equal(wide(read_cells(pages, *places, torch.float64)), wanted.numpy())


@on_devices
@on_dtypes
@on_codes
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "page_tokens"), [(4, 2, 64, 16), (6, 1, 128, 32), (3, 3, 96, 64)])
def test_rope_writes_codes_of_what_it_would_have_written(heads, kv_heads, dim, page_tokens, stored, dtype, device):
    plain, coded = (Rope(dtype, device, heads, kv_heads, dim, page_tokens) for _ in range(2))
    coded.key_pages, coded.value_pages = (
        torch.zeros(*plain.key_pages.shape[:3], dim + 4, dtype=stored, device=device) for _ in range(2)
    )
    poison(coded.key_pages), poison(coded.value_pages)
    assert torch.equal(plain.run(), coded.run())
    for pages, written in ((coded.key_pages, plain.key_pages), (coded.value_pages, plain.value_pages)):
        (got, scales), rows = read_raw(pages), wide(written)
        known = ~np.isnan(rows[..., 0])
        assert np.array_equal(~np.isnan(scales), known)
        _, most = nearest(rows[known], stored)
        assert (np.abs(got[known] - rows[known]) <= most).all()


@on_codes
def test_pages_of_another_width_or_kind_are_refused(stored):
    rope = Rope(torch.float32, "cpu", 4, 2, 64, 16)
    rope.key_pages = torch.zeros(*rope.key_pages.shape[:3], 68, dtype=stored)
    with pytest.raises(ValueError, match=r"rope_kv_write: value_pages is .*float32.*wanted .*68"):
        rope.run()
    with pytest.raises(ValueError, match=r"read_rows: out is \(3, 60\).*wanted \(3, 64\)"):
        read_rows(rope.key_pages, torch.zeros(3, dtype=torch.int64), torch.zeros(3, 60))
    assert scales_of(rope.key_pages).shape == rope.key_pages.shape[:3]


@pytest.mark.skipif(INTERPRETED, reason="kernels take rows in the dtype that computes, or in codes")
def test_on_a_cpu_float32_rows_are_in_bf16_pages_as_the_nearest_numbers():
    kv_heads, page_tokens, dim, num_pages, tokens = 2, 16, 64, 6, 48
    rows = [torch.randn(kv_heads, tokens, dim, generator=torch.manual_seed(seed)) for seed in range(2)]
    ids = torch.tensor([4, 0, 5])
    pages = [torch.full((num_pages, kv_heads, page_tokens, dim), torch.nan, dtype=torch.bfloat16) for _ in rows]
    for own, to in zip(rows, pages, strict=True):
        write_rows(own[:, :32], ids[:2], None, to)
        cells = torch.arange(32, tokens)
        write_rows(own[:, 32:], ids[cells // page_tokens], cells % page_tokens, to)
    nearest_rows = [own.bfloat16().float() for own in rows]
    assert not torch.equal(nearest_rows[0], rows[0]), "power"
    gathered = [torch.empty(kv_heads, 3, page_tokens, dim) for _ in rows]
    gather_pages(*pages, ids, *gathered)
    for got, wanted in zip(gathered, nearest_rows, strict=True):
        assert torch.equal(got.flatten(1, 2), wanted)
    places = (ids[1] * kv_heads + 1) * page_tokens + torch.arange(page_tokens)
    read = torch.empty(page_tokens, dim)
    read_rows(pages[0], places, read)
    assert torch.equal(read, nearest_rows[0][1, 16:32])
    query, lens = torch.randn(1, 4, dim), torch.tensor([tokens - 3], dtype=torch.int32)
    table, slots = ids.int().view(1, 3), torch.zeros(1, dtype=torch.int32)
    workspace = workspace_for(1, 4, kv_heads, dim, tokens, "cpu")
    got = paged_decode_attention(PagedReads(query, *pages, table, slots, lens, 0.125), workspace).near
    wide_pages = [one.double() for one in pages]
    wanted = paged_decode_attention_reference(PagedReads(query.double(), *wide_pages, table, slots, lens, 0.125)).near
    assert float((got.out - wanted.out).abs().max()) < CPU_ATTENTION_FLOAT32
    exact = [own.double().unflatten(1, (3, page_tokens)).transpose(0, 1) for own in rows]
    own_table = torch.arange(3, dtype=torch.int32).view(1, 3)
    unrounded = paged_decode_attention_reference(PagedReads(query.double(), *exact, own_table, slots, lens, 0.125)).near
    assert float((got.out - unrounded.out).abs().max()) > CPU_ATTENTION_FLOAT32, "power: rows that were not rounded"
