"""Matrices of few bits in tiles on the CPU device: tokens are rounded to 16 bits and multiplied in integers."""

import logging
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu.cpu_step.cpu_step import CpuStep
from gpu.layers.decoder import Decoder
from gpu.model.gguf_translation.tensor_names import stored_as
from gpu.model.humming_formats import multiplied
from gpu.operations.linear.numba_packed_linear import packed_product, widen_packed
from gpu.operations.linear.packed_matrix import (
    Packed,
    lay_in_rows,
    lay_in_tiles,
    unpack_reference,
    unpack_rows,
)
from gpu.weights.drawing import random_weights
from gpu.weights.weights import Weights
from tests.gpu.cpu_decoder import CPU, cpu_decoder, reference_logits
from tests.gpu.test_cpu_packed import TINY, batch_of, draw, spread
from tests.narrow_vectors import run_with_narrow_vectors, where_vectors_are_wide
from tests.tolerances import COMPILED_LOGITS_FLOAT32, INTEGERS_HALF_STEP, INTEGERS_LOGITS, INTEGERS_SUMS
from transfer.model_constants import TILE
from transfer.simd import row_tiles
from transfer.simd.packed_rows import unit_columns

# kind, group (0: a row), rows that share scales, has_zeros, has_order, run; beside them the kinds of GGUF's they are
IN_TILES = {
    "Q4_0": ("int4", 32, 1, False, False, None), "Q4_1": ("int4", 32, 1, False, False, 32),
    "Q8_0": ("int8", 32, 1, False, False, None), "Q5_1": ("int8", 32, 1, False, False, 32),
    "Q4_K": ("int4", 32, 1, False, False, 256), "Q2_K": ("int4", 16, 1, False, False, 256),
    "Q6_K": ("int8", 16, 1, False, False, 256), "Q5_K": ("int8", 32, 1, False, False, 256),
    "MXFP4": ("fp4", 32, 1, False, False, None), "NVFP4": ("fp4", 16, 1, False, False, None),
    "int4 of 128": ("int4", 128, 1, True, False, None), "int8 of rows": ("int8", 0, 1, True, False, None),
}  # fmt: skip
# Each takes seconds to compile; others have their numbers and groups, NVFP4 units that are not whole.
LONG = ("Q2_K", "MXFP4", "int8 of rows")
SUITE = [name for name in IN_TILES if name not in LONG]
EACH = pytest.mark.parametrize("name", [*SUITE, *(pytest.param(name, marks=pytest.mark.long) for name in LONG)])


@pytest.fixture(autouse=True)
def _threads_as_before():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def most_off(x: torch.Tensor, packed: Packed) -> torch.Tensor:
    """How far a product may be off, `[tokens, rows]`: each number of x half a step of its unit, times the weight; and
    roundings of float32, of `q * gain` and of the offset by themselves.
    """
    numbers = unpack_reference(packed, torch.float64)
    offsets = unpack_reference(replace(packed, words=torch.zeros_like(packed.words)), torch.float64)
    if packed.kind == "fp4":  # its integers are above 0: what they are more is an offset of as much as the largest
        offsets = unpack_reference(replace(packed, words=torch.full_like(packed.words, 0x77777777)), torch.float64)
    unit = unit_columns(packed.kind)
    padded = torch.nn.functional.pad(x.double().abs(), (0, -x.shape[1] % unit))
    steps = padded.view(len(x), -1, unit).amax(2).repeat_interleave(unit, 1)[:, : x.shape[1]] / row_tiles.TOP
    sizes = (numbers - offsets).abs() + offsets.abs()
    return INTEGERS_HALF_STEP * steps @ numbers.abs().t() + INTEGERS_SUMS * x.shape[1] * x.double().abs() @ sizes.t()


@EACH
@settings(max_examples=7, deadline=None)
@given(
    st.sampled_from([32, 64, 96]), st.sampled_from([32, 64, 96, 160, 288, 512]), st.integers(1, 19),
    st.sampled_from([0.0, 1e-3, 1.0, 300.0]), st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_products_are_as_near_as_activations_of_16_bits_allow_whatever_the_rows_and_threads(
    name: str, rows: int, inner: int, tokens: int, outlier: float, seed: int
) -> None:
    kind = IN_TILES[name]
    inner = -(-inner // 256) * 256 if kind[5] == 256 else inner
    packed, _ = draw(kind, rows, inner, torch.float32)
    x = torch.randn(tokens, inner, generator=torch.Generator().manual_seed(seed))
    x[:, seed % inner] *= outlier
    torch.set_num_threads(2)
    tiled = lay_in_tiles(packed)
    got = packed_product(x, tiled)
    bound, wanted = most_off(x, packed), x.double() @ unpack_reference(packed, torch.float64).t()
    assert bool(((got.double() - wanted).abs() <= bound).all())
    if inner > 32:
        assert bool(((got.double() - wanted.roll(1, 1)).abs() > bound).any()), "power: the row before"
    torch.set_num_threads(1)
    for begin, end in ((0, 1), (tokens // 2, tokens), (0, tokens - 1)):
        if begin < end:
            assert torch.equal(packed_product(x[begin:end].contiguous(), tiled), got[begin:end])


def test_activations_of_8_bits_would_be_seen() -> None:
    packed, _ = draw(IN_TILES["Q4_K"], 64, 512, torch.float32)
    x = torch.randn(4, 512)
    steps = x.abs().amax(1, keepdim=True) / 127
    rough = (x / steps).round() * steps
    wanted = x.double() @ unpack_reference(packed, torch.float64).t()
    off = (packed_product(rough.float(), lay_in_tiles(packed)).double() - wanted).abs()
    assert bool((off > most_off(x, packed)).any())


@EACH
def test_a_matrix_in_tiles_has_the_numbers_that_it_had_in_rows(name: str) -> None:
    packed, _ = draw(IN_TILES[name], 64, 512, torch.float32)
    tiled = lay_in_tiles(packed)
    assert tiled.nbytes == packed.nbytes
    assert not torch.equal(tiled.words, packed.words), "power"
    assert torch.equal(lay_in_rows(tiled).words, packed.words)
    assert torch.equal(unpack_reference(tiled, torch.float64), unpack_reference(packed, torch.float64))
    assert torch.equal(widen_packed(tiled), widen_packed(packed))
    rows = torch.tensor([5, 63, 16, 5])
    assert torch.equal(unpack_rows(tiled, rows), unpack_rows(packed, rows))
    part = tiled.take_rows(16, 48)
    assert torch.equal(unpack_reference(part, torch.float32), unpack_reference(packed, torch.float32)[16:48])


@pytest.mark.parametrize("name", ["Q4_1", "Q5_1", "Q4_K"])
def test_scales_that_are_all_alike_are_read_once(name: str) -> None:
    drawn, _ = draw(IN_TILES[name], 64, 512, torch.float32)
    x = torch.randn(3, 512)
    for scales in (drawn.scales, torch.full_like(drawn.scales, 5 * 256 + 3)):
        packed = replace(drawn, scales=scales)
        tiled = lay_in_tiles(packed)
        assert tiled.has_equal_pairs == (scales is not drawn.scales)
        wanted = x.double() @ unpack_reference(packed, torch.float64).t()
        assert bool(((packed_product(x, tiled).double() - wanted).abs() <= most_off(x, packed)).all())
        assert torch.equal(widen_packed(tiled), widen_packed(packed))
    tiled.scales.view(-1)[TILE:] = 0
    assert bool(((packed_product(x, tiled).double() - wanted).abs() <= most_off(x, packed)).all()), "power: unread"
    assert not lay_in_rows(tiled).has_equal_pairs


NARROW = ["zeros or alike or 8_bits", pytest.param("near or zeros or mixed or step", marks=pytest.mark.long)]


@where_vectors_are_wide
@pytest.mark.parametrize("names", NARROW, ids=["two kinds", "every kind"])
def test_narrow_vectors_compute_the_same(names: str) -> None:
    """A tile is two of them, and no processor that has no more multiplies and adds at once."""
    run_with_narrow_vectors(__file__, names)


def test_rows_of_zeros_are_zero_and_a_number_that_is_not_finite_stays_in_its_row() -> None:
    packed, _ = draw(IN_TILES["Q6_K"], 32, 512, torch.float32)
    tiled, x = lay_in_tiles(packed), torch.randn(6, 512)
    x[1], x[3, 100], x[4, 300], x[5] = 0.0, torch.nan, torch.inf, 1e-38
    got = packed_product(x, tiled)
    assert torch.equal(got[1], torch.zeros(32))
    assert torch.equal(got[5].abs() < 1e-30, torch.ones(32, dtype=torch.bool))
    assert not bool(got[3:5].isfinite().any())
    for row in (0, 2):
        assert torch.equal(got[row : row + 1], packed_product(x[row : row + 1].contiguous(), tiled))


def mixed(rows: int, tied: bool) -> tuple[Decoder, Decoder]:
    """Each matrix of another kind, in tiles but for one, and over the same pages one of the numbers they stand for."""
    shape = replace(TINY, tied_embeddings=tied)
    decoder = cpu_decoder(shape, torch.float32, num_pages=16 * rows, max_slots=rows, max_pages=16)
    weights, kinds = decoder.weights, [IN_TILES[name] for name in SUITE]
    ours, theirs = [], []
    for layer in weights.layers:
        made = {name: draw(kinds.pop(0) if kinds else IN_TILES["Q8_0"], *one.shape, torch.float32)
                for name, one in layer.matrices.items()}  # fmt: skip
        ours.append(replace(layer, **{
            name: pair[0] if name == "output" and not theirs else lay_in_tiles(pair[0]) for name, pair in made.items()
        }))  # fmt: skip
        theirs.append(replace(layer, **{name: pair[1].float() for name, pair in made.items()}))
    output, numbers = draw(IN_TILES["Q8_0"], *weights.logits.shape, torch.float32)
    output, numbers = lay_in_tiles(output), numbers.float()
    embedding = (output, numbers) if tied else (weights.embedding, weights.embedding)
    packed, plain = (
        Weights(first, layers, weights.final_norm, last)
        for first, layers, last in zip(embedding, (ours, theirs), (output, numbers), strict=True)
    )
    return Decoder(shape, packed, decoder.pool, 256), Decoder(shape, plain, decoder.pool, 256)


@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
def test_the_compiled_step_multiplies_matrices_in_tiles_and_in_rows(tied: bool) -> None:
    decoder, plain = mixed(13, tied)
    batch = batch_of(decoder, 13)
    wanted = reference_logits(plain, *batch)
    torch.set_num_threads(2)
    step = CpuStep(decoder)
    together = step.run(*batch).clone()
    assert COMPILED_LOGITS_FLOAT32 < spread(together, wanted) < INTEGERS_LOGITS
    for threads, part in ((1, slice(0, 1)), (2, slice(3, 8)), (1, slice(2, 13))):  # the same bits
        torch.set_num_threads(threads)
        assert torch.equal(step.run(*(column[part] for column in batch)), together[part])
    words = decoder.weights.layers[0].down.words
    words.copy_(words.roll(1, 0))
    assert spread(step.run(*batch), wanted) > INTEGERS_LOGITS, "power: rows of one matrix one further"


def test_products_are_integers_where_that_is_asked_and_the_log_names_what_is_left_out(caplog) -> None:
    shape = stored_as(replace(TINY, vocab_size=TINY.vocab_size - 16), "Q4_0")
    with caplog.at_level(logging.INFO, "gpu.weights.weights"):
        integers, own = (
            random_weights(multiplied(shape, asked, "key"), 1, torch.float32, CPU, lambda _: None)
            for asked in ("integers", "own")
        )
    rows = shape.vocab_size
    assert f"products by=integers matrices=12 own='1 matrices: {rows} rows are no multiple of 32'" in caplog.text
    assert all(one.in_tiles for layer in integers.layers for one in layer.matrices.values())
    assert not integers.logits.in_tiles
    assert not any(one.in_tiles for one in own.matrices)
