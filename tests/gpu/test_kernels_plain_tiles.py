"""Products of several tokens by tiles against float64, and how tiles are chosen by time."""

import logging

import numpy as np
import pytest
import torch

from gpu.operations.arguments import INTERPRETED
from gpu.operations.linear.plain_linear import gate_up_swiglu, linear, logits_linear, norm_linear
from gpu.operations.linear.plain_tiles import Tiles, candidates, fitted
from gpu.operations.linear.tile_choice import Product, TileChoice
from tests.gpu import kernel_oracles as oracle
from tests.gpu.kernel_oracles import DEVICES, NORM_EPS, distance, random, wide
from tests.tolerances import KERNEL_BFLOAT16, KERNEL_CHAIN_BFLOAT16, LOGITS_FLOAT32

ROWS, INNER = 72, 544  # no multiples of tiles
WAYS = {
    "whole": Tiles(64, 128, 4, 3),
    "two parts": Tiles(64, 16, 4, 3, parts=2),
    "four splits": Tiles(16, 32, 4, 3, splits=4),
    "wide": Tiles(128, 64, 4, 3),
}
ORACLES = {"silu": oracle.swiglu, "clamped_swiglu": oracle.clamped_swiglu, "relu2": oracle.squared_relu}
on_devices = pytest.mark.parametrize("device", DEVICES if INTERPRETED else DEVICES[1:])
interpreted = pytest.mark.skipif(not INTERPRETED, reason="made-up times, of kernels that run on the CPU")


def _matrix(generator, device, rows=ROWS):
    return random(generator, (rows, INNER), torch.bfloat16, device)


@on_devices
@pytest.mark.parametrize("tiles", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("tokens", [2, 16, 17, 64])
def test_a_product_by_tiles_is_the_oracles_with_a_residual_a_bias_and_in_float32(tiles, tokens, device):
    generator = np.random.default_rng(tokens)
    weight, x = _matrix(generator, device), random(generator, (tokens, INNER), torch.bfloat16, device)
    residual = random(generator, (tokens, ROWS), torch.bfloat16, device)
    product = wide(x) @ wide(weight).T
    assert distance(linear(x, weight, None, tiles), product) < KERNEL_BFLOAT16
    assert distance(linear(x, weight, residual, tiles), product + wide(residual)) < KERNEL_BFLOAT16
    assert distance(linear(x.float(), weight, residual, tiles), product + wide(residual)) < KERNEL_BFLOAT16
    assert distance(logits_linear(x, weight, tiles), product) < LOGITS_FLOAT32
    bias, norm = (random(generator, (size,), torch.bfloat16, device) for size in (ROWS, INNER))
    normed = oracle.rms_norm(wide(x), wide(norm), NORM_EPS) @ wide(weight).T + wide(bias)
    assert distance(norm_linear(x, norm, NORM_EPS, weight, bias, tiles), normed) < KERNEL_CHAIN_BFLOAT16
    x[:, int(np.abs(wide(x)).max(axis=0).argmax())] = 0
    assert distance(linear(x, weight, None, tiles), product) > KERNEL_BFLOAT16


@on_devices
@pytest.mark.parametrize("tiles", [WAYS["whole"], WAYS["four splits"]], ids=["whole", "four splits"])
@pytest.mark.parametrize("activation", ORACLES)
def test_what_is_activated_is_so_in_the_product(tiles, activation, device):
    generator = np.random.default_rng(3)
    weight = _matrix(generator, device, ROWS if activation == "relu2" else 2 * ROWS)
    x = random(generator, (5, INNER), torch.bfloat16, device)
    wanted = ORACLES[activation](wide(x) @ wide(weight).T)
    assert distance(gate_up_swiglu(x, weight, activation, tiles), wanted) < KERNEL_BFLOAT16


@on_devices
def test_a_product_reads_and_writes_nothing_beside_its_tensors(device):
    generator = np.random.default_rng(4)
    around = torch.full((ROWS + 2, INNER), float("nan"), dtype=torch.bfloat16, device=device)
    around[1:-1] = _matrix(generator, device)
    x = torch.full((7, INNER), float("nan"), dtype=torch.bfloat16, device=device)
    x[1:-1] = random(generator, (5, INNER), torch.bfloat16, device)
    for tiles in WAYS.values():
        assert torch.isfinite(linear(x[1:-1], around[1:-1], None, tiles)).all()


def test_stages_are_cut_to_the_shared_memory_that_there_is():
    tiles = Tiles(64, 128, 4, 4)
    assert fitted(tiles, 16, 2, False, 232_448) == tiles
    assert fitted(tiles, 64, 2, False, 99 * 1024) == Tiles(64, 128, 4, 3)
    assert fitted(tiles, 64, 4, True, 99 * 1024) is None
    for rows, is_activated in ((4096, False), (14336, True), (128_256, False)):
        for tokens in (16, 32, 64):
            found = candidates(rows, 4096, tokens, is_activated)
            assert any(fitted(one, tokens, 2, is_activated, 99 * 1024) for one in found), (rows, tokens)
            assert not is_activated or all(one.parts == 1 for one in found)


def _choose(times, sizes, shared=232_448):
    """Return a choice for one matrix, by made-up seconds of the vendor's product and of candidates, in their order."""
    told = iter(times)
    choice, weight = TileChoice(), torch.randn(64, 512).bfloat16()
    choice.choose([Product("add", (weight,))], sizes, lambda run: (run(), next(told))[1], shared)
    return choice, weight


@interpreted
def test_the_fastest_tiles_serve_numbers_of_tokens_that_pad_to_the_same():
    choice, weight = _choose([5.0, 4.0, 3.0, 4.5], [1, 4, 8, 128])
    best = candidates(64, 512, 8, False)[1]
    assert [choice.tiles("add", weight, tokens) for tokens in (1, 2, 16, 17, 128)] == [None, best, best, None, None]
    assert choice.tiles("linear", weight, 8) is None
    assert choice.tiles("add", weight[:32], 8) is None


@interpreted
def test_the_vendors_product_serves_where_tiles_gain_no_more_than_noise():
    choice, weight = _choose([5.0, 4.95, 4.92, 5.5], [8])
    assert choice.tiles("add", weight, 8) is None


@interpreted
def test_tiles_that_are_wrong_or_raise_are_out_and_named(monkeypatch, caplog):
    found = candidates(64, 512, 8, False)

    def multiply(self, x, weight, residual, tiles):
        if tiles == found[0]:
            raise RuntimeError("no such instruction")
        product = x.float() @ weight.float().T
        return product + 1e3 if tiles == found[1] else product

    monkeypatch.setattr(Product, "multiply", multiply)
    with caplog.at_level(logging.WARNING):
        choice, weight = _choose([5.0, 1.0], [8])
    assert choice.tiles("add", weight, 8) == found[2]
    assert "no such instruction" in caplog.text
    assert "differs from the vendor's product" in caplog.text


@interpreted
def test_what_is_chosen_for_attentions_output_is_compiled_for_a_short_prompts_too(monkeypatch):
    called = []
    multiply = Product.multiply
    monkeypatch.setattr(
        Product, "multiply", lambda self, x, *rest: (called.append((x.dtype, rest[-1])), multiply(self, x, *rest))[1]
    )
    choice, told = TileChoice(), iter([5.0, 4.0, 3.0, 4.5])
    weight = torch.randn(64, 512).bfloat16()
    product = Product("add", (weight,), torch.float32)
    choice.choose([product], [8], lambda run: (run(), next(told))[1], 232_448)
    assert (torch.bfloat16, choice.tiles("add", weight, 8)) in called
