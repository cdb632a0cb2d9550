"""Products of tokens that are rounded to FP8, against float64 oracles of what e4m3 is."""

from typing import get_args

import numpy as np
import pytest
import torch

from gpu.model.spec import Activation
from gpu.operations.arguments import INTERPRETED
from gpu.operations.linear.fp8_linear import (
    LEAST_ROUNDED_TOKENS,
    LEAST_SCALE,
    MOST_FP8,
    fp8_linear,
    round_tokens,
    round_tokens_reference,
    why_no_scaled_product,
)
from gpu.operations.linear.packed_matrix import Packed
from gpu.operations.linear.plain_tiles import Tiles
from gpu.operations.linear.tile_choice import Product, TileChoice
from gpu.operations.linear.word_layout import unpack_words
from gpu.operations.swiglu import swiglu
from gpu.weights.matrix import RoundingMatrix, as_matrix
from tests.gpu import kernel_oracles as oracle
from tests.gpu.kernel_oracles import DEVICES, DTYPES, KERNEL_TOLERANCE, NORM_EPS, distance, random, wide
from tests.gpu.packed_oracle import Drawn, draw_packed, e4m3, poisoned
from tests.tolerances import KERNEL_BFLOAT16, KERNEL_CHAIN_BFLOAT16, KERNEL_FLOAT32

TOKENS = LEAST_ROUNDED_TOKENS + 1
SHAPES = [(48, 1056), (64, 1024), (16, 72)]  # rows and columns; columns that are whole words, and others
ROUNDING = 2.0**-4  # of a number of e4m3 that is not subnormal, relative
TILED = {torch.float32: KERNEL_FLOAT32, torch.bfloat16: KERNEL_BFLOAT16}
CHAIN_TOLERANCE = {torch.float32: 2 * KERNEL_FLOAT32, torch.bfloat16: KERNEL_CHAIN_BFLOAT16}


@pytest.fixture(params=DEVICES)
def device(request):
    reason = why_no_scaled_product(torch.device(request.param))
    if reason is not None:
        pytest.skip(reason)
    return request.param


def _drawn(rows: int, inner: int, dtype: torch.dtype, device: str) -> Drawn:
    """Return a matrix that rounds tokens."""
    drawn = draw_packed("fp8", rows, inner, inner, 1, False, False, dtype, device)
    fields = {name: getattr(drawn.packed, name) for name in Packed.__dataclass_fields__}
    return Drawn(Packed(**fields | {"rounds_tokens": True}), drawn.wanted)


def _tokens(inner: int, dtype: torch.dtype, device: str, count: int = TOKENS) -> torch.Tensor:
    """Return tokens in a buffer of NaN. They differ in size, and one is zero."""
    x = random(np.random.default_rng(inner + count), (count, inner), dtype, device)
    x *= torch.logspace(-3, 3, count, device=device).to(dtype)[:, None]
    x[1] = 0
    return poisoned(x, float("nan"))


def _numbers(codes: torch.Tensor, inner: int) -> np.ndarray:
    """Return rounded tokens in float64, `[tokens, inner]`, with columns in order and without their scales."""
    return e4m3(unpack_words(codes.cpu().view(torch.int32), 8, inner).numpy())


def _rounded(x: np.ndarray) -> np.ndarray:
    """Round by the definition: to the nearest number of e4m3, of those times the largest of a token over 448."""
    codes = np.arange(256, dtype=np.uint8)
    levels = np.sort(np.unique(e4m3(codes[(codes & 0x7F) != 0x7F])))
    scales = np.maximum(np.abs(x).max(1, keepdims=True) / MOST_FP8, LEAST_SCALE).astype(np.float32).astype(float)
    scaled = (x / scales).astype(np.float32).astype(float)
    above = np.clip(np.searchsorted(levels, scaled), 1, len(levels) - 1)
    below = above - 1
    is_above = levels[above] - scaled < scaled - levels[below]
    return np.where(is_above, levels[above], levels[below]) * scales


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", [inner for _, inner in SHAPES])
def test_tokens_are_rounded_to_the_nearest_numbers_of_their_scale_in_the_order_of_words(inner, dtype, device):
    x = _tokens(inner, dtype, device)
    codes, scales = round_tokens(x)
    got, wanted = _numbers(codes, inner) * wide(scales), _rounded(wide(x))
    most = np.abs(wide(x)).max(1, keepdims=True)
    ties = got != wanted  # halfway between two levels, either is nearest
    assert ties.mean() < 0.08
    assert np.allclose(np.abs(got - wide(x))[ties], np.abs(wanted - wide(x))[ties], rtol=1e-4)
    assert (np.abs(got - wide(x)) <= ROUNDING * np.abs(wide(x)) + most / MOST_FP8 * 2.0**-10 * 1.001).all()
    assert np.array_equal(np.abs(got).max(1), np.abs(wide(scales))[:, 0] * MOST_FP8 * (most[:, 0] > 0))
    padding = unpack_words(codes.cpu().view(torch.int32), 8, codes.shape[1])[:, inner:]
    assert not padding.any()
    assert (_numbers(codes, inner)[:, [0, 1]] != _numbers(codes, inner)[:, [1, 0]]).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_kernel_rounds_as_plain_torch_does(dtype, device):
    x = _tokens(1056, dtype, device)
    codes, scales = round_tokens(x)
    wanted, wanted_scales = round_tokens_reference(x)
    torch.testing.assert_close(scales, wanted_scales, rtol=2.0**-22, atol=0)  # CUDA multiplies by 1 / 448
    assert (codes.view(torch.uint8) == wanted.view(torch.uint8)).float().mean() > 0.99


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", get_args(Activation))
def test_an_activation_that_is_rounded_in_the_same_pass_is_rounded_as_by_itself(activation, dtype, device):
    x = _tokens(2 * 200, dtype, device)
    codes, scales = round_tokens(x, activation=activation)
    wanted, wanted_scales = round_tokens(swiglu(x, activation))
    assert torch.equal(codes.view(torch.uint8), wanted.view(torch.uint8))
    assert torch.equal(scales, wanted_scales)
    x[0, 3] *= 1.5  # what the comparison would see
    assert not torch.equal(round_tokens(x, activation=activation)[0].view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [LEAST_ROUNDED_TOKENS - 1, TOKENS])
def test_an_mlp_of_two_matrices_that_round_tokens_has_the_bits_of_its_products(count, dtype, device):
    gate_up, down = (as_matrix(_drawn(*size, dtype, device).packed) for size in ((2 * 144, 80), (80, 144)))
    assert isinstance(gate_up, RoundingMatrix)
    assert isinstance(down, RoundingMatrix)
    x, norm = _tokens(80, dtype, device, count), random(np.random.default_rng(3), (80,), dtype, device)
    got = gate_up.norm_mlp(down, x, norm, NORM_EPS, "silu", x)
    wanted = down.linear(gate_up.norm_gate_up(x, norm, NORM_EPS, "silu"), x)
    assert torch.equal(got, wanted)
    with pytest.raises(ValueError, match="residual"):
        gate_up.norm_mlp(down, _tokens(80, dtype, device), norm, NORM_EPS, "silu", x[:3])


def test_nan_stays_nan(device):
    x = random(np.random.default_rng(0), (TOKENS, 64), torch.float32, device)
    x[3, 7] = float("nan")
    drawn = _drawn(16, 64, torch.float32 if device == "cpu" else torch.bfloat16, device)
    got = fp8_linear(round_tokens(x), drawn.packed)
    assert got[3].isnan().all()
    assert not got[[0, 1, 2, 4]].isnan().any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "inner"), SHAPES)
def test_a_product_is_that_of_the_rounded_numbers(rows, inner, dtype, device):
    if device != "cpu" and dtype != torch.bfloat16:
        pytest.skip("on a GPU it multiplies in bf16")
    drawn, x = _drawn(rows, inner, dtype, device), _tokens(inner, dtype, device)
    codes, scales = rounded = round_tokens(x)
    wanted = (_numbers(codes, inner) * wide(scales)) @ drawn.wanted.T
    for token in range(TOKENS):
        got = fp8_linear(rounded, drawn.packed)[token]
        assert distance(got, wanted[token]) < KERNEL_TOLERANCE[dtype] or (not wanted[token].any() and not got.any())
    moved = wanted + np.outer(wide(scales)[:, 0], drawn.wanted[:, 3]) * 448
    assert distance(fp8_linear(rounded, drawn.packed), moved) > KERNEL_TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_activation_bias_and_residual_stand_around_a_rounded_product(dtype, device):
    if device != "cpu" and dtype != torch.bfloat16:
        pytest.skip("on a GPU it multiplies in bf16")
    drawn, x = _drawn(64, 1024, dtype, device), _tokens(1024, dtype, device)
    generator = np.random.default_rng(5)
    gain = poisoned(random(generator, (1024,), dtype, device), float("nan"))
    residual = random(generator, (TOKENS, 64), dtype, device)

    def product(tokens: torch.Tensor) -> np.ndarray:
        codes, scales = round_tokens(tokens)
        return (_numbers(codes, 1024) * wide(scales)) @ drawn.wanted.T

    plain, before = product(x), residual.clone()
    matrix = as_matrix(drawn.packed)
    assert distance(matrix.linear(x, residual), plain + wide(residual)) < CHAIN_TOLERANCE[dtype]
    assert torch.equal(residual, before)
    codes, scales = round_tokens(x, gain, NORM_EPS)
    normed = (_numbers(codes, 1024) * wide(scales)) @ drawn.wanted.T
    far = oracle.rms_norm(wide(x), wide(gain), NORM_EPS) @ drawn.wanted.T
    assert 0 < np.linalg.norm(normed - far) / np.linalg.norm(far) < ROUNDING
    bias = residual[0].contiguous()
    got = matrix.norm_linear(x, gain, NORM_EPS, bias)
    assert distance(got, normed + wide(bias)) < CHAIN_TOLERANCE[dtype]
    gate, up = normed[:, :32], normed[:, 32:]
    got = matrix.norm_gate_up(x, gain, NORM_EPS, "silu")
    assert distance(got, gate / (1 + np.exp(-gate)) * up) < 4 * CHAIN_TOLERANCE[dtype]
    assert distance(matrix.norm_linear(x, gain, NORM_EPS, None), plain) > CHAIN_TOLERANCE[dtype]


@pytest.mark.parametrize(("count", "is_rounded"), [(LEAST_ROUNDED_TOKENS - 1, False), (LEAST_ROUNDED_TOKENS, True)])
def test_few_tokens_are_not_rounded(count, is_rounded, device):
    dtype = torch.float32 if device == "cpu" or INTERPRETED else torch.bfloat16
    drawn, x = _drawn(48, 1056, dtype, device), _tokens(1056, dtype, device, count)
    error = distance(as_matrix(drawn.packed).linear(x), wide(x) @ drawn.wanted.T)
    assert (error > 2 * KERNEL_TOLERANCE[dtype]) == is_rounded


def test_the_matrix_is_not_widened(device):
    drawn = _drawn(48, 1056, torch.bfloat16, device)
    matrix = as_matrix(drawn.packed, widened=None)
    assert matrix.linear(_tokens(1056, torch.bfloat16, device, 300)).isfinite().all()


WAYS = {
    "whole": Tiles(64, 64, 4, 3),
    "two parts": Tiles(64, 32, 4, 3, parts=2),
    "four splits": Tiles(16, 32, 4, 3, splits=4),
    "wide": Tiles(128, 256, 4, 2),
}


@pytest.mark.parametrize("device", DEVICES if INTERPRETED else DEVICES[1:])
@pytest.mark.parametrize("tiles", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("tokens", [16, 17, 64])
def test_tiles_give_the_product_with_a_residual_a_bias_and_an_activation(tiles, tokens, device):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    drawn, x = _drawn(96, 1024, dtype, device), _tokens(1024, dtype, device, tokens)
    x[1] = 1e-3
    rounded = round_tokens(x)
    wanted = (_numbers(rounded[0], 1024) * wide(rounded[1])) @ drawn.wanted.T
    residual = random(np.random.default_rng(1), (tokens, 96), dtype, device)
    bias = residual[0].contiguous()
    for token in range(tokens):
        assert distance(fp8_linear(rounded, drawn.packed, tiles=tiles)[token], wanted[token]) < TILED[dtype]
    assert distance(fp8_linear(rounded, drawn.packed, residual, tiles=tiles), wanted + wide(residual)) < TILED[dtype]
    assert distance(fp8_linear(rounded, drawn.packed, bias, tiles=tiles), wanted + wide(bias)) < TILED[dtype]
    if tiles.parts == 1:
        gate, up = wanted[:, :48], wanted[:, 48:]
        got = fp8_linear(rounded, drawn.packed, None, "silu", tiles)
        assert distance(got, gate / (1 + np.exp(-gate)) * up) < 2 * TILED[dtype]
    swapped = (rounded[0], rounded[1].flip(0))
    assert distance(fp8_linear(swapped, drawn.packed, tiles=tiles), wanted) > TILED[dtype]


@pytest.mark.parametrize("device", DEVICES if INTERPRETED else DEVICES[1:])
def test_tiles_are_chosen_by_time_for_as_many_tokens_as_are_rounded(device):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    packed = _drawn(64, 1024, dtype, device).packed
    choice, sizes = TileChoice(), []

    def seconds(run):
        run()
        sizes.append(1)
        return 1.0 if len(sizes) == 1 else 0.5

    choice.choose([Product("add", (packed,), dtype)], (1, 8, 16, 100), seconds, 232_448)
    assert choice.tiles("add", packed, 16) is not None
    assert choice.tiles("add", packed, 32) is choice.tiles("linear", packed, 16) is None
    assert choice.tiles("add", torch.empty(64, 1024, dtype=torch.bfloat16), 16) is None
    matrix = RoundingMatrix(packed, None, choice)
    x, residual = _tokens(1024, dtype, device, 16), torch.zeros(16, 64, dtype=dtype, device=device)
    wanted = fp8_linear(round_tokens(x), packed, residual, tiles=choice.tiles("add", packed, 16))
    assert torch.equal(matrix.linear(x, residual), wanted)
