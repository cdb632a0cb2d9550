"""Projections of a few tokens, with what is fused into them, against float64 oracles."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gpu.operations.arguments import INTERPRETED
from gpu.operations.linear.plain_linear import linear, logits_linear, norm_gate_up_swiglu, norm_linear
from tests.gpu import kernel_oracles as oracle
from tests.gpu.kernel_oracles import DEVICES, DTYPES, KERNEL_TOLERANCE, NORM_EPS, distance, random, wide
from tests.tolerances import KERNEL_BFLOAT16, KERNEL_CHAIN_BFLOAT16, KERNEL_FLOAT32, LOGITS_FLOAT32

CHAIN_TOLERANCE = {torch.float32: KERNEL_FLOAT32, torch.bfloat16: KERNEL_CHAIN_BFLOAT16}

pytestmark = [
    pytest.mark.parametrize("device", DEVICES),
    pytest.mark.parametrize("dtype", DTYPES),
    pytest.mark.parametrize("tokens", [1, 2, 5]),
    pytest.mark.parametrize(("rows", "inner"), [(50, 1056), (64, 1024), (6, 72)]),
]


class Called(TorchDispatchMode):
    """Keeps which operators are called."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: set[object] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operators.add(func)
        return func(*args, **(kwargs or {}))


def _arguments(tokens, rows, inner, dtype, device):
    generator = np.random.default_rng(rows + tokens)
    x, weight = (random(generator, shape, dtype, device) for shape in ((tokens, inner), (rows, inner)))
    return x, weight, random(generator, (inner,), dtype, device), random(generator, (tokens, rows), dtype, device)


def test_linear_adds_the_residual_and_leaves_it(rows, inner, tokens, dtype, device):
    x, weight, _, residual = _arguments(tokens, rows, inner, dtype, device)
    product = wide(x) @ wide(weight).T
    before = residual.clone()
    assert distance(linear(x, weight), product) < KERNEL_TOLERANCE[dtype]
    assert distance(linear(x, weight, residual), product + wide(residual)) < KERNEL_TOLERANCE[dtype]
    assert torch.equal(residual, before)
    x[:, int(np.abs(wide(x)).max(axis=0).argmax())] = 0
    assert distance(linear(x, weight), product) > KERNEL_TOLERANCE[dtype]


def test_a_residual_is_copied_by_a_kernel_for_a_copy_of_memory_has_no_priority_in_a_graph(
    rows, inner, tokens, dtype, device
):
    if INTERPRETED and tokens == 1:
        pytest.skip("one token's kernel adds the residual itself, and the interpreter copies what it is given")
    x, weight, _, residual = _arguments(tokens, rows, inner, dtype, device)
    with Called() as called:
        linear(x, weight, residual)
    copying = {torch.ops.aten.addmm.default, torch.ops.aten.clone.default, torch.ops.aten.copy_.default}
    assert not called.operators & copying


def test_logits_are_float32_and_not_rounded_where_a_kernel_can_store_them(rows, inner, tokens, dtype, device):
    x, weight, _, _ = _arguments(tokens, rows, inner, dtype, device)
    got, product = logits_linear(x, weight), wide(x) @ wide(weight).T
    assert got.dtype == torch.float32
    is_rounded = dtype == torch.bfloat16 and device == "cpu" and not (INTERPRETED and tokens == 1)
    assert distance(got, product) < (KERNEL_BFLOAT16 if is_rounded else LOGITS_FLOAT32)
    assert distance(got.bfloat16(), product) > LOGITS_FLOAT32


def test_norm_linear_equals_the_product_of_the_norm(rows, inner, tokens, dtype, device):
    x, weight, gain, _ = _arguments(tokens, rows, inner, dtype, device)
    wanted = oracle.rms_norm(wide(x), wide(gain), NORM_EPS) @ wide(weight).T
    assert distance(norm_linear(x, gain, NORM_EPS, weight), wanted) < CHAIN_TOLERANCE[dtype]
    assert distance(norm_linear(x, gain * 1.1, NORM_EPS, weight), wanted) > CHAIN_TOLERANCE[dtype]


def test_gate_and_up_meet_in_swiglu(rows, inner, tokens, dtype, device):
    x, weight, gain, _ = _arguments(tokens, rows, inner, dtype, device)
    weight /= inner**0.5
    wanted = oracle.swiglu(oracle.rms_norm(wide(x), wide(gain), NORM_EPS) @ wide(weight).T)
    assert distance(norm_gate_up_swiglu(x, gain, NORM_EPS, weight), wanted) < CHAIN_TOLERANCE[dtype]
    assert distance(norm_gate_up_swiglu(x, gain, NORM_EPS, weight.roll(1, 0)), wanted) > CHAIN_TOLERANCE[dtype]


def test_up_alone_meets_its_squared_relu(rows, inner, tokens, dtype, device):
    x, weight, gain, _ = _arguments(tokens, rows, inner, dtype, device)
    weight /= inner**0.5
    product = oracle.rms_norm(wide(x), wide(gain), NORM_EPS) @ wide(weight).T
    got = norm_gate_up_swiglu(x, gain, NORM_EPS, weight, "relu2")
    assert distance(got, oracle.squared_relu(product)) < 2 * CHAIN_TOLERANCE[dtype]  # a square doubles an error
    assert distance(got, np.maximum(product, 0.0)) > 2 * CHAIN_TOLERANCE[dtype]


def test_shapes_that_do_not_meet_are_named(rows, inner, tokens, dtype, device):
    x, weight, gain, residual = _arguments(tokens, rows, inner, dtype, device)
    with pytest.raises(ValueError, match=r"linear: got x .*wanted \[tokens, in\] and \[out, in\]"):
        linear(x[:, 1:], weight)
    with pytest.raises(ValueError, match=r"logits_linear: got x .*wanted \[tokens, in\] and \[out, in\]"):
        logits_linear(x[:, 1:], weight)
    with pytest.raises(ValueError, match="logits_linear: x is"):
        logits_linear(x.double(), weight)
    with pytest.raises(ValueError, match="linear: residual is"):
        linear(x, weight, residual[:, 1:])
    with pytest.raises(ValueError, match="norm_linear: norm_weight is"):
        norm_linear(x, gain[1:], NORM_EPS, weight)
