"""Products with matrices of 4 and 8 bits, with what is fused into them, against float64 oracles of their numbers."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from gpu.operations.arguments import INTERPRETED
from gpu.operations.linear.packed_linear import (
    packed_linear,
    packed_logits,
    packed_norm_gate_up,
    packed_norm_linear,
    unpack,
)
from gpu.operations.linear.packed_tiles import HALF_RUN, Tiles, groups_ahead, is_halved
from gpu.operations.linear.word_layout import RUN_COLUMNS, pack_words, unpack_words
from tests.gpu import kernel_oracles as oracle
from tests.gpu.kernel_oracles import DEVICES, DTYPES, KERNEL_TOLERANCE, NORM_EPS, distance, random, wide
from tests.gpu.packed_oracle import draw_codes, draw_packed, e4m3, poisoned
from tests.tolerances import KERNEL_BFLOAT16, KERNEL_CHAIN_BFLOAT16, KERNEL_FLOAT32, LOGITS_FLOAT32

CHAIN_TOLERANCE = {torch.float32: 2 * KERNEL_FLOAT32, torch.bfloat16: KERNEL_CHAIN_BFLOAT16}
# kind, rows, inner, group, row_block, has_zeros, has_order: rows and columns that no block divides, too; RUNS: columns
# of a run, where there are runs
MATRICES = {
    "int4": ("int4", 50, 1056, 32, 1, False, False),
    "int4-zeros": ("int4", 64, 1024, 128, 1, True, False),
    "int4-order": ("int4", 38, 320, 64, 1, True, True),
    "int4-small": ("int4", 6, 72, 72, 1, True, False),
    "int8": ("int8", 50, 1056, 1056, 1, False, False),
    "int8-zeros": ("int8", 22, 640, 128, 1, True, False),
    "fp8-rows": ("fp8", 50, 1056, 1056, 1, False, False),
    "fp8-blocks": ("fp8", 72, 448, 128, 8, False, False),
    "fp4-halves": ("fp4", 50, 1056, 16, 1, False, False),
    "int4-runs": ("int4", 50, 1280, 32, 1, False, False),
    "int8-runs": ("int8", 14, 512, 16, 1, False, False),
    "int8-run-each": ("int8", 14, 352, 32, 1, False, False),
    "int8-halves": ("int8", 22, 144, 48, 1, True, False),
    "int4-fine": ("int4", 30, 72, 8, 1, True, False),
}
RUNS = {"int4-runs": 256, "int8-runs": 256, "int8-run-each": 32}

of_every_kind = [
    pytest.mark.parametrize("device", DEVICES),
    pytest.mark.parametrize("dtype", DTYPES),
    pytest.mark.parametrize("tokens", [1, 2, 17]),
    pytest.mark.parametrize("name", MATRICES),
]


def each(test):
    for mark in of_every_kind:
        test = mark(test)
    return test


def _arguments(name, tokens, dtype, device):
    drawn = draw_packed(*MATRICES[name], dtype, device, RUNS.get(name))
    generator = np.random.default_rng(tokens)
    nan = float("nan")
    x = poisoned(random(generator, (tokens, drawn.packed.inner), dtype, device), nan)
    gain = poisoned(random(generator, (drawn.packed.inner,), dtype, device), nan)
    return drawn, x, gain, random(generator, (tokens, drawn.packed.rows), dtype, device)


@each
def test_a_product_is_that_of_the_numbers_and_adds_the_residual(name, tokens, dtype, device):
    drawn, x, _, residual = _arguments(name, tokens, dtype, device)
    product, before = wide(x) @ drawn.wanted.T, residual.clone()
    got = packed_linear(x, drawn.packed)
    assert got.dtype == dtype
    assert distance(got, product) < KERNEL_TOLERANCE[dtype]
    assert distance(packed_linear(x, drawn.packed, residual), product + wide(residual)) < KERNEL_TOLERANCE[dtype]
    assert torch.equal(residual, before)
    over = packed_linear(x, drawn.packed, residual, overwrites=True)
    assert distance(over, product + wide(before)) < KERNEL_TOLERANCE[dtype]
    x[:, int((np.abs(wide(x)).max(0) * np.linalg.norm(drawn.wanted, axis=0)).argmax())] = 0
    assert distance(packed_linear(x, drawn.packed), product) > KERNEL_TOLERANCE[dtype]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "tiles", [Tiles(8, 16, 2, 4, 1, 2), Tiles(8, 16, 1, 4, 1)], ids=["unrolled", "two axes"]
)  # fmt: skip
@pytest.mark.parametrize(
    "name", [*(name for name in MATRICES if "zeros" in name), "int4-small", "fp8-rows", "int4-runs"]
)
def test_tiles_of_every_make_give_the_product(name, tiles, dtype, device, monkeypatch):
    if dtype == torch.bfloat16:
        tiles = replace(tiles, num_warps=tiles.splits if tiles.splits > 1 else 4, num_stages=3)
    monkeypatch.setattr("gpu.operations.linear.packed_tiles.tiles_for", lambda *_: tiles)
    drawn, x, _, residual = _arguments(name, 5, dtype, device)
    wanted = wide(x) @ drawn.wanted.T + wide(residual)
    assert distance(packed_linear(x, drawn.packed, residual), wanted) < KERNEL_TOLERANCE[dtype]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 17])
def test_four_bits_in_groups_of_half_a_run_give_the_product(tokens, dtype, device):
    """As GGUF's Q2_K and Q3_K: a unit has eight groups, more than are loaded at once."""
    drawn = draw_packed("int4", 50, 512, 16, 1, False, False, dtype, device, 256)
    x = random(np.random.default_rng(tokens), (tokens, 512), dtype, device)
    product = wide(x) @ drawn.wanted.T
    assert groups_ahead(drawn.packed) == 0
    assert distance(packed_linear(x, drawn.packed), product) < KERNEL_TOLERANCE[dtype]
    assert distance(packed_logits(x, drawn.packed), product) < KERNEL_TOLERANCE[dtype]


def test_products_are_of_half_a_run_where_groups_of_runs_have_as_many_columns_and_beside_no_zero_points():
    """Zero points are bytes, for which Triton gives a thread more columns than half a run has for it."""
    assert is_halved(16, 512, has_runs=True)
    assert not is_halved(16, 512, has_runs=False)
    assert not is_halved(32, 512, has_runs=True)
    assert not is_halved(8, 512, has_runs=True)


@each
def test_logits_are_float32_and_not_rounded_where_a_kernel_can_store_them(name, tokens, dtype, device):
    drawn, x, _, _ = _arguments(name, tokens, dtype, device)
    got, product = packed_logits(x, drawn.packed), wide(x) @ drawn.wanted.T
    assert got.dtype == torch.float32
    has_runs, group = drawn.packed.runs is not None, drawn.packed.group
    is_fine = drawn.packed.scales.shape[1] > 1 and group % (HALF_RUN if has_runs else RUN_COLUMNS) != 0
    is_rounded = dtype == torch.bfloat16 and not INTERPRETED and (tokens > 1 or is_fine or device == "cpu")  # numbers
    assert distance(got, product) < (KERNEL_BFLOAT16 if is_rounded else LOGITS_FLOAT32)
    assert distance(got.bfloat16(), product) > LOGITS_FLOAT32


@each
def test_a_norm_stands_before_and_a_bias_behind(name, tokens, dtype, device):
    drawn, x, gain, residual = _arguments(name, tokens, dtype, device)
    bias = residual[0].contiguous()
    wanted = oracle.rms_norm(wide(x), wide(gain), NORM_EPS) @ drawn.wanted.T
    assert distance(packed_norm_linear(x, gain, NORM_EPS, drawn.packed, None), wanted) < CHAIN_TOLERANCE[dtype]
    got = packed_norm_linear(x, gain, NORM_EPS, drawn.packed, bias)
    assert distance(got, wanted + wide(bias)) < CHAIN_TOLERANCE[dtype]
    got = packed_norm_linear(x, gain * 1.1, NORM_EPS, drawn.packed, bias)
    assert distance(got, wanted + wide(bias)) > CHAIN_TOLERANCE[dtype]


@each
def test_gate_and_up_meet_in_swiglu(name, tokens, dtype, device):
    drawn, x, gain, _ = _arguments(name, tokens, dtype, device)
    packed, spread = drawn.packed, float(np.linalg.norm(drawn.wanted) / drawn.wanted.shape[0] ** 0.5)
    if packed.runs is not None:
        _assert_gates(packed, x, gain, drawn.wanted, dtype)
        return
    scales = poisoned((packed.scales.float() / spread).to(packed.scales.dtype), float("nan"))
    kept = wide(scales) / np.where(wide(packed.scales) == 0, 1, wide(packed.scales))
    ratio = np.repeat(np.repeat(kept, packed.row_block, 0), packed.group, 1)[: packed.rows, : packed.inner]
    if packed.order is not None:
        placed = np.empty_like(ratio)
        placed[:, packed.order.cpu().numpy()] = ratio
        ratio = placed
    _assert_gates(replace(packed, scales=scales), x, gain, drawn.wanted * ratio, dtype)


def _assert_gates(packed, x, gain, wanted, dtype):
    """Of a matrix whose rows have a length of about one.

    Under the interpreter bf16 is cut, not rounded. The norm is cut twice, so gate and up are both 5.6e-3 too small, and
    what SwiGLU makes of them (silu grows by up to 1.3 times its gate's share) 1.3e-2, before it is cut itself. So the
    oracle's norm is cut there, too: with its result cut as well it is the kernel's, to the last bit.
    """
    tokens, is_cut = len(x), INTERPRETED and dtype == torch.bfloat16
    tolerance = (KERNEL_TOLERANCE if is_cut else CHAIN_TOLERANCE)[dtype]
    normed = (oracle.interpreted_rms_norm if is_cut else oracle.rms_norm)(wide(x), wide(gain), NORM_EPS) @ wanted.T
    got = packed_norm_gate_up(x, gain, NORM_EPS, packed, "silu")
    assert got.shape == (tokens, packed.rows // 2)
    assert distance(got, oracle.swiglu(normed)) < tolerance
    assert distance(got, oracle.swiglu(np.roll(normed, 1, 1))) > tolerance
    gate, up = np.split(normed, 2, -1)
    gelu = 0.5 * gate * (1 + np.tanh((2 / np.pi) ** 0.5 * (gate + 0.044715 * gate**3))) * up
    got = packed_norm_gate_up(x, gain, NORM_EPS, packed, "gelu_tanh")
    assert distance(got, gelu) < tolerance
    got = packed_norm_gate_up(x, gain, NORM_EPS, packed, "relu2")
    assert got.shape == (tokens, packed.rows)
    assert distance(got, oracle.squared_relu(normed)) < 2 * tolerance  # a square doubles an error


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MATRICES)
def test_an_unpacked_matrix_is_its_numbers_each_rounded_once(name, dtype, device):
    drawn = draw_packed(*MATRICES[name], dtype, device, RUNS.get(name))
    got = unpack(drawn.packed)
    assert torch.equal(got.cpu(), torch.from_numpy(drawn.wanted).float().to(dtype))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_more_tokens_than_the_kernel_takes_are_multiplied_all_the_same(dtype, device, monkeypatch):
    monkeypatch.setattr("gpu.operations.linear.packed_linear.MOST_PACKED_TOKENS", 16)
    drawn, x, gain, residual = _arguments("int4-order", 17, dtype, device)
    product = wide(x) @ drawn.wanted.T
    assert distance(packed_linear(x, drawn.packed, residual), product + wide(residual)) < KERNEL_TOLERANCE[dtype]
    assert distance(packed_logits(x, drawn.packed), product) < KERNEL_TOLERANCE[dtype]
    normed = oracle.rms_norm(wide(x), wide(gain), NORM_EPS) @ drawn.wanted.T
    assert distance(packed_norm_linear(x, gain, NORM_EPS, drawn.packed, None), normed) < CHAIN_TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("name", "at_once"),
    [("int4", 0), ("int4-zeros", 1), ("int4-small", 1), ("fp8-rows", 1), ("fp8-blocks", 1), ("int4-runs", 4),
     ("int8-runs", 4), ("int8-run-each", 0), ("int8-halves", 0), ("int4-fine", 0)],
)  # fmt: skip
def test_scales_are_loaded_ahead_where_a_unit_has_all_of_a_word(name, at_once):
    assert groups_ahead(draw_packed(*MATRICES[name], torch.float32, "cpu", RUNS.get(name)).packed) == at_once


def test_every_fp8_number_is_the_one_that_its_byte_means():
    codes = np.arange(256, dtype=np.uint8)
    codes = codes[(codes & 0x7F) != 0x7F]
    assert np.array_equal(torch.from_numpy(codes).view(torch.float8_e4m3fn).double().numpy(), e4m3(codes))


@pytest.mark.parametrize(("bits", "inner"), [(4, 1056), (4, 72), (8, 640), (8, 12)])
def test_halves_of_words_hold_neighbours_and_give_them_back(bits, inner):
    codes = torch.from_numpy(draw_codes(np.random.default_rng(3), "int4" if bits == 4 else "int8", (3, inner)))
    words, unit = pack_words(codes, bits), 16 * 32 // bits
    assert words.shape == (3, -(-inner // unit) * 16)
    assert torch.equal(unpack_words(words, bits, inner), codes)
    padded = np.zeros((3, words.shape[1] * 32 // bits), dtype=np.int64)
    padded[:, :inner] = codes
    mask = 2**bits - 1
    for word in (0, 1, 15, words.shape[1] - 1):
        for place in range(16 // bits):
            column = word // 16 * unit + 32 * place + 2 * (word % 16)
            assert np.array_equal((words[:, word].numpy() >> (bits * place)) & mask, padded[:, column])
            assert np.array_equal((words[:, word].numpy() >> (bits * place + 16)) & mask, padded[:, column + 1])


def test_tokens_that_do_not_meet_a_matrix_are_named():
    drawn = draw_packed(*MATRICES["int4-small"], torch.float32, "cpu")
    x = torch.zeros(2, 72)
    with pytest.raises(ValueError, match=r"packed_linear: got x .*wanted \[tokens, in\] and \[out, in\]"):
        packed_linear(x[:, 1:], drawn.packed)
    with pytest.raises(ValueError, match="packed_linear: residual is"):
        packed_linear(x, drawn.packed, torch.zeros(2, 5))
    with pytest.raises(ValueError, match="packed_norm_linear: norm is"):
        packed_norm_linear(x, torch.zeros(71), NORM_EPS, drawn.packed, None)
