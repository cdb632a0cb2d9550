"""Merging outputs over pieces of a past against a float64 oracle: any number of sides, any layout, over NaN."""

import numpy as np
import pytest
import torch

from gpu.operations.prefill_attention.merge_attended import MOST_PIECES, merge_attended
from tests.gpu.kernel_oracles import DEVICES, DTYPES, KERNEL_TOLERANCE, distance, random, wide
from tests.tolerances import MERGE_FLOAT32

pytestmark = [pytest.mark.parametrize("device", DEVICES), pytest.mark.parametrize("dtype", DTYPES)]
SHAPES = [(1, 4, 64), (5, 3, 128), (33, 8, 40)]  # tokens, heads, dim


def oracle(outs: list[np.ndarray], lses: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    top = np.max(lses, axis=0)
    masses = [np.exp(lse - top) for lse in lses]
    total = np.sum(masses, axis=0)
    out = sum(mass[..., None] * out for mass, out in zip(masses, outs, strict=True)) / total[..., None]
    return out, np.log(total) + top


def make_sides(count, shape, dtype, device):
    """Outs `[tokens, heads, dim]`, lses as kernels leave them: heads outside tokens but for the last one's."""
    generator = np.random.default_rng(count)
    outs = [random(generator, shape, dtype, device) for _ in range(count)]
    tokens, heads, _ = shape
    lses = [random(generator, (heads, tokens), torch.float32, device).mul_(5).add_(30).t() for _ in range(count - 1)]
    return outs, [*lses, random(generator, (tokens, heads), torch.float32, device).mul_(5).add_(30)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("count", [1, 2, 3, MOST_PIECES + 1, MOST_PIECES + 2, 2 * MOST_PIECES + 3])
def test_a_merge_is_the_softmax_of_all_sides(count, shape, dtype, device):
    outs, lses = make_sides(count, shape, dtype, device)
    out, lse = merge_attended(outs, lses, dtype)
    wanted, wanted_lse = oracle([wide(side) for side in outs], [wide(side) for side in lses])
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    assert distance(out, wanted) < KERNEL_TOLERANCE[dtype]
    np.testing.assert_allclose(wide(lse), wanted_lse, atol=30 * MERGE_FLOAT32)
    if count > 1:
        heaviest = int(np.argmax([wide(lse)[0, 0] for lse in lses]))
        left = [side for side in range(count) if side != heaviest]
        without, _ = oracle([wide(outs[side]) for side in left], [wide(lses[side]) for side in left])
        assert distance(out, without) > KERNEL_TOLERANCE[dtype]


def test_rows_in_front_of_padded_sides_are_merged_in_place(dtype, device):
    outs, lses = make_sides(3, (16, 4, 64), dtype, device)
    wanted, _ = merge_attended([out[:9].clone() for out in outs], [lse[:9].clone() for lse in lses], torch.float32)
    for out, lse in zip(outs, lses, strict=True):
        out[9:], lse[9:] = float("nan"), float("nan")
    got, lse = merge_attended([out[:9] for out in outs], [lse[:9] for lse in lses], torch.float32)
    assert torch.equal(got, wanted)
    assert not lse.isnan().any()


def test_sides_that_do_not_fit_are_refused(dtype, device):
    outs, lses = make_sides(2, (5, 4, 64), dtype, device)
    with pytest.raises(ValueError, match=r"merge_attended: out is \(4, 4, 64\)"):
        merge_attended([outs[0], outs[1][:4]], lses, dtype)
    with pytest.raises(ValueError, match=r"merge_attended: lse is \(4, 5\)"):
        merge_attended(outs, [lses[0], lses[1].t()], dtype)
