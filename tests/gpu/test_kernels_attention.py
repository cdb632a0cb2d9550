"""Paged decode attention against a float64 oracle: ragged contexts, shuffled pages, poison outside of them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from gpu.operations.arguments import runs_on_triton
from gpu.operations.decode_attention.attended_codes import LARGEST_INTEGER, multiplies_integers
from gpu.operations.decode_attention.decode_launch import PagedReads
from gpu.operations.decode_attention.paged_decode_attention import (
    MAXIMA_CELLS,
    paged_decode_attention_reference,
)
from gpu.operations.decode_attention.split_rows import filling_splits, most_rows, num_rows, num_splits
from gpu.operations.kv.kv_rows import kind_of
from tests.gpu.kernel_oracles import DEVICES, DTYPES, KERNEL_TOLERANCE, distance, wide
from tests.gpu.paged_rows import CODE_IDS, CODES, Paged, lose_row
from tests.tolerances import (
    INTEGER_LSE_OF_OUTLIERS,
    INTEGER_PRODUCTS,
    INTEGER_PRODUCTS_OF_OUTLIERS,
    KERNEL_FLOAT64,
    LSE_BFLOAT16,
    LSE_CHECKSUM,
    LSE_CHECKSUM_BFLOAT16,
    LSE_DOT_FLOAT32,
    LSE_FLOAT32,
)
from transfer.partial import Partial

on_devices = pytest.mark.parametrize("device", DEVICES)
on_dtypes = pytest.mark.parametrize("dtype", DTYPES)
on_codes = pytest.mark.parametrize("stored", CODES, ids=CODE_IDS)
CHECKSUM_TOLERANCE = {torch.float32: LSE_CHECKSUM, torch.bfloat16: LSE_CHECKSUM_BFLOAT16}
LSE_TOLERANCE = {torch.float32: LSE_FLOAT32, torch.bfloat16: LSE_BFLOAT16}
SHAPES = [(4, 2, 64, 16), (8, 1, 128, 32), (3, 3, 64, 64), (20, 1, 64, 16), (6, 2, 96, 16), (16, 1, 256, 16),
          (16, 2, 512, 16)]  # fmt: skip
FEW_SPLITS = 3 * 8192  # of three splits: the interpreter runs each
CONTEXTS = [1, 16, 0, 17, 255, 700, 64, 5]


def in_pairs(contexts: dict[str, list[int]]) -> pytest.MarkDecorator:
    """The first contexts in all shapes, and the others in the first, second and last of them."""
    few, first = (0, 1, len(SHAPES) - 1), next(iter(contexts))
    pairs = [(name, number) for name in contexts for number in (range(len(SHAPES)) if name == first else few)]
    cases = [pytest.param(contexts[name], SHAPES[number], id=f"{name}-shape{number}") for name, number in pairs]
    return pytest.mark.parametrize(("contexts", "shape"), cases)


def lse_tolerance(lse: np.ndarray, dim: int, dtype: torch.dtype) -> np.ndarray:
    """Of each lse, or logit, of products over `dim`; bf16 ones have room for these roundings."""
    return np.maximum(LSE_TOLERANCE[dtype], LSE_DOT_FLOAT32 * dim**0.5 * np.abs(lse))


@on_devices
@on_dtypes
@on_codes
@in_pairs(
    {"contexts0": CONTEXTS, "contexts1": [33], "contexts2": [300], "contexts3": [5, 5, 5], "contexts4": [0, 1500]}
)
def test_attention_equals_its_formula_over_ragged_paged_contexts(shape, contexts, stored, dtype, device):
    paged = Paged(dtype, device, shape, contexts, stored=stored)
    partial = paged.run()
    out, lse = paged.wanted()
    assert partial.out.dtype == partial.lse.dtype == torch.float32
    assert distance(partial.out, out) < KERNEL_TOLERANCE[dtype]
    held = np.array(contexts) > 0
    assert (np.abs(wide(partial.lse)[held] - lse[held]) < lse_tolerance(lse[held], shape[2], dtype)).all()
    assert np.array_equal(np.isneginf(wide(partial.lse)), np.isneginf(lse))
    assert not wide(partial.out)[~held].any()


@on_devices
@on_dtypes
@on_codes
def test_padding_slots_give_empty_partials_whatever_their_context_says(stored, dtype, device):
    paged = Paged(dtype, device, SHAPES[0], [40, 40, 40], stored=stored)
    paged.slots[1] = -1
    partial, (out, _) = paged.run(), paged.wanted()
    assert torch.isneginf(partial.lse[1]).all()
    assert not partial.out[1].any()
    assert distance(partial.out[[0, 2]], out[[0, 2]]) < KERNEL_TOLERANCE[dtype]


@on_devices
@on_dtypes
@on_codes
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[-1]])
def test_one_token_more_or_less_is_noticed(shape, stored, dtype, device):
    context = 700 if stored is None else 60  # codes of any size: some tokens have next to no weight
    paged = Paged(dtype, device, shape, [context], stored=stored)
    out, lse = paged.wanted()
    paged.keys[0], paged.values[0] = paged.keys[0][:-1], paged.values[0][:-1]
    short_out, short_lse = paged.wanted()
    partial = paged.run()
    assert distance(partial.out, short_out) > distance(partial.out, out)
    assert (np.abs(wide(partial.lse) - short_lse) > lse_tolerance(short_lse, shape[2], dtype)).any()
    assert (np.abs(wide(partial.lse) - lse) < lse_tolerance(lse, shape[2], dtype)).all()


@on_devices
@on_dtypes
@pytest.mark.parametrize("context", [1, 63, 64, 65, 1000, 4097])
def test_flat_logits_count_the_tokens_of_a_context(context, dtype, device):
    lse = wide(Paged(dtype, device, (2, 1, 64, 16), [context], flat=True).run().lse)
    assert np.abs(lse - np.log(context)).max() < CHECKSUM_TOLERANCE[dtype]
    assert np.abs(lse - np.log(context + 1)).max() > CHECKSUM_TOLERANCE[dtype]


@on_devices
@on_dtypes
@on_codes
def test_a_nan_inside_the_context_is_not_hidden(stored, dtype, device):
    paged = Paged(dtype, device, SHAPES[0], [40], stored=stored)
    heads = torch.ones(SHAPES[0][1], dtype=torch.bool, device=device)
    for offset in range(SHAPES[0][3]):
        lose_row(paged.key_pages, int(paged.page_table[0, 1]), heads, offset)
    assert paged.run().out.isnan().all()


def test_float64_stays_float64_on_the_cpu():
    paged = Paged(torch.float64, "cpu", SHAPES[0], [300, 20])
    partial = paged_decode_attention_reference(
        PagedReads(
            paged.query,
            paged.key_pages,
            paged.value_pages,
            paged.page_table,
            paged.slots,
            paged.context_lens,
            paged.scale,
        )
    ).near
    assert partial.out.dtype == torch.float64
    assert distance(partial.out, paged.wanted()[0]) < KERNEL_FLOAT64


@on_devices
@on_dtypes
def test_wrong_arguments_are_named(dtype, device):
    paged = Paged(dtype, device, SHAPES[0], [40])
    paged.context_lens = paged.context_lens.long()
    with pytest.raises(ValueError, match=r"paged_decode_attention: context_lens is \(1,\) torch.int64.*int32"):
        paged.run()


@pytest.mark.parametrize("programs", [4, 8])
@pytest.mark.parametrize("requests", [1, 2, 3, 16, 22, 32, 37, 64, 75, 128])
def test_splits_fill_the_device_and_bound_the_longest_program(requests, programs):
    filling = filling_splits(requests * 8, 132, programs)
    at_once, programs_in_all = programs * 132, requests * 8 * filling
    assert programs_in_all / (-(-programs_in_all // at_once) * at_once) > 0.6
    for context in (512, 8192, 17_408, 262_144):
        splits = num_splits(filling, context)
        assert splits >= filling
        assert context / splits <= 8192
        assert requests * splits <= num_rows(requests, 8, context, 1, 132) <= most_rows(requests, 8, context)


def test_programs_of_as_many_rounds_as_needed_end_together():
    assert filling_splits(256, 132, 4) == 2  # three would be 1.45 rounds
    assert filling_splits(300, 132, 4) == 3  # two would be 1.14 rounds


@on_devices
@on_dtypes
def test_a_short_context_has_no_more_splits_than_fill_the_device(dtype, device):
    """Of a longest context of three splits, the programs of the second and third write nothing of a short one."""
    paged = Paged(dtype, device, SHAPES[1], [700], max_context=FEW_SPLITS)
    paged.workspace = replace(paged.workspace, num_sms=0)
    partial, (out, lse) = paged.run(), paged.wanted()
    assert distance(partial.out, out) < KERNEL_TOLERANCE[dtype]
    assert (np.abs(wide(partial.lse) - lse) < lse_tolerance(lse, SHAPES[1][2], dtype)).all()
    if runs_on_triton(paged.query):
        assert not paged.workspace.lse[0].isnan().any()
        assert paged.workspace.lse[1:].isnan().all()


def attend_in_integers(paged: Paged, row: int, query_top: int, weight_top: int) -> np.ndarray:
    """A row's outputs with each query rounded to so many steps of its largest element, and weights likewise of 32."""
    query, keys, values = wide(paged.query[row]), paged.keys[row], paged.values[row]
    out = np.empty_like(query)
    for head, own in enumerate(query):
        step = np.abs(own).max() / query_top
        kv_head = head * keys.shape[1] // len(query)
        logits = keys[:, kv_head] @ (np.floor(own / step + 0.5) * step) * paged.scale
        weights = np.exp(logits - logits.max())
        steps = [np.full(len(part), part.max() / weight_top) for part in np.split(weights, range(32, len(weights), 32))]
        rounded = np.floor(weights / np.concatenate(steps) + 0.5) * np.concatenate(steps)
        out[head] = rounded @ values[:, kv_head] / weights.sum()
    return out


@on_devices
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[0] <= 16 * shape[1] and shape[2] < 512])
def test_products_of_integers_keep_16_bits_of_queries_and_of_weights(shape, device):
    paged = Paged(torch.bfloat16, device, shape, [700], stored=torch.int8)
    assert multiplies_integers(paged.query, shape[0] // shape[1], kind_of(paged.key_pages))
    wanted = paged.wanted()[0]
    assert distance(paged.run().out, wanted) < INTEGER_PRODUCTS
    for query_top, weight_top in ((127, LARGEST_INTEGER), (LARGEST_INTEGER, 127)):
        eight_bits = attend_in_integers(paged, 0, query_top, weight_top)
        assert distance(torch.from_numpy(eight_bits[None]), wanted) > INTEGER_PRODUCTS
    sixteen_bits = attend_in_integers(paged, 0, LARGEST_INTEGER, LARGEST_INTEGER)
    assert distance(torch.from_numpy(sixteen_bits[None]), wanted) < INTEGER_PRODUCTS


@on_devices
def test_products_of_integers_take_queries_of_zeros_outliers_and_weights_far_below_the_largest(device):
    paged = Paged(torch.bfloat16, device, SHAPES[1], [300], stored=torch.int8)
    paged.query[0, 0] = 0.0
    paged.query[0, 1, 0] = 100.0
    paged.query[0, 2] *= 1e-35
    paged.query[0, 3] *= 20.0
    out, lse = paged.wanted()
    partial = paged.run()
    assert distance(partial.out, out) < INTEGER_PRODUCTS_OF_OUTLIERS
    assert np.abs(wide(partial.lse) - lse).max() < INTEGER_LSE_OF_OUTLIERS
    for broken in ("nan", "inf"):
        paged.query[0, 4, 7] = float(broken)
        partial = paged.run()
        assert partial.out[0, 4].isnan().all()
        assert distance(partial.out[:, :4], out[:, :4]) < INTEGER_PRODUCTS_OF_OUTLIERS


def random_bounds(contexts: list[int], heads: int, seed: int) -> np.ndarray:
    """skip_begin <= skip_end <= cut, int32 `[3, rows, heads]`: of every kind that there is, and within the context."""
    generator = np.random.default_rng(seed)
    bounds = np.zeros((3, len(contexts), heads), np.int32)
    for row, context in enumerate(contexts):
        for head in range(heads):
            begin, end, cut = np.sort(generator.integers(0, context + 1, 3))
            kinds = [
                (begin, end, cut),
                (begin, end, end),  # nothing is far
                (0, 0, 0),  # no skipped range
                (0, context, context),  # nothing is read
                (16 * (begin // 16), 16 * (end // 16), context),  # no tail
                (context, context, context),  # all before the skipped range
            ]
            bounds[:, row, head] = kinds[generator.integers(len(kinds))]
    return bounds


def cells_of(bounds: np.ndarray, contexts: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Cells that are near and far, bool `[rows, heads, cells]`."""
    skip_begin, skip_end, cut = bounds[..., None]
    cell, context = np.arange(max(contexts)), np.array(contexts)[:, None, None]
    return (cell < skip_begin) | ((cell >= cut) & (cell < context)), (cell >= skip_end) & (cell < cut)


def assert_equal_partials(partial: Partial, wanted: tuple[np.ndarray, np.ndarray], dtype: torch.dtype) -> None:
    out, lse = wanted
    held = ~np.isneginf(lse)
    assert np.array_equal(np.isneginf(wide(partial.lse)), ~held)
    assert distance(partial.out, out) < KERNEL_TOLERANCE[dtype]
    assert (np.abs(wide(partial.lse)[held] - lse[held]) < lse_tolerance(lse[held], out.shape[2], dtype)).all()


@on_devices
@on_dtypes
@on_codes
@in_pairs({"bounds_many": [1, 0, 17, 255, 64], "bounds_one": [300], "bounds_long": [0, 1500]})
def test_near_and_far_are_read_by_each_heads_own_bounds_and_nothing_else_is(shape, contexts, stored, dtype, device):
    paged = Paged(dtype, device, shape, contexts, max_context=FEW_SPLITS, stored=stored)
    bounds = random_bounds(contexts, shape[0], seed=sum(shape))
    near, far = cells_of(bounds, contexts)
    wanted = paged.wanted_of(near), paged.wanted_of(far)
    paged.hide(near | far)
    reading = paged.read(torch.from_numpy(bounds).to(device), has_far=True, is_counted=True)
    for partial, whole, cells in zip((reading.near, reading.far), wanted, (near, far), strict=True):
        assert_equal_partials(partial, whole, dtype)
        assert np.array_equal(partial.covered.cpu().numpy(), cells.sum(-1))


@on_devices
@on_dtypes
def test_a_skipped_range_that_is_alike_for_all_heads_takes_bounds_that_are_expanded(dtype, device):
    paged = Paged(dtype, device, SHAPES[0], [700, 90, 40], max_context=FEW_SPLITS)
    rows = torch.tensor([[16, 16, 0], [512, 48, 0], [512, 48, 0]], dtype=torch.int32, device=device)
    bounds = rows[..., None].expand(3, 3, SHAPES[0][0])
    near, _ = cells_of(bounds.cpu().numpy(), paged.contexts)
    wanted = paged.wanted_of(near)
    paged.hide(near)
    reading = paged.read(bounds)
    assert reading.far is None
    assert_equal_partials(reading.near, wanted, dtype)


@on_devices
@on_dtypes
@on_codes
def test_a_bound_that_is_off_by_one_cell_is_noticed(stored, dtype, device):
    paged = Paged(dtype, device, SHAPES[0], [200], flat=True, max_context=FEW_SPLITS, stored=stored)
    bounds = torch.tensor([40, 90, 150], dtype=torch.int32, device=device)[:, None, None].repeat(1, 1, SHAPES[0][0])
    near, far = cells_of(bounds.cpu().numpy(), paged.contexts)
    wanted = [paged.wanted_of(near)[1], paged.wanted_of(far)[1]]
    for bound, changes in ((0, [True, False]), (1, [False, True]), (2, [True, True])):
        shifted = bounds.clone()
        shifted[bound, 0, 1] += 1
        reading = paged.read(shifted, has_far=True)
        for partial, lse, is_changed in zip((reading.near, reading.far), wanted, changes, strict=True):
            distances = np.abs(wide(partial.lse) - lse)
            assert (distances[0, 1] > LSE_TOLERANCE[dtype]) == is_changed
            assert np.delete(distances[0], 1).max() < LSE_TOLERANCE[dtype]


@on_devices
@on_dtypes
@on_codes
def test_the_largest_logits_of_blocks_are_those_of_the_cells_that_are_read(stored, dtype, device):
    contexts, heads = [133, 0, 17], SHAPES[0][0]
    paged = Paged(dtype, device, SHAPES[0], contexts, max_context=FEW_SPLITS, stored=stored)
    bounds = random_bounds(contexts, heads, seed=11)
    near, far = cells_of(bounds, contexts)
    paged.hide(near | far)
    maxima = torch.full((len(contexts), heads, 9), float("nan"), device=device)
    paged.read(torch.from_numpy(bounds).to(device), has_far=True, maxima=maxima)
    group = heads // SHAPES[0][1]
    for row, context in enumerate(contexts):
        for head in range(heads):
            logits = np.full(9 * MAXIMA_CELLS, -np.inf)
            keys = paged.keys[row][:, head // group]
            reads = (near | far)[row, head, :context]
            logits[:context][reads] = keys[reads] @ wide(paged.query[row, head]) * paged.scale
            wanted = logits.reshape(9, MAXIMA_CELLS).max(1)
            got = wide(maxima[row, head])
            assert np.array_equal(np.isneginf(got), np.isneginf(wanted))
            finite = ~np.isneginf(wanted)
            within = lse_tolerance(wanted[finite], SHAPES[0][2], dtype)
            assert (np.abs(got[finite] - wanted[finite]) < within).all()
