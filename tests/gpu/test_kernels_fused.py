"""Rows with their own scale: fbgemm's bytes wherever they are made, read within half a step, over poisoned memory."""

import numpy as np
import pytest
import torch
from torch import Tensor

from gpu.operations.kv.fused_rows import (
    find_unstorable,
    fuse_rows,
    fuse_rows_reference,
    widen_rows,
    widen_rows_reference,
)
from tests.gpu.kernel_oracles import DEVICES, DTYPES, wide
from tests.tolerances import FUSED_HALF_STEP, FUSED_READ

pytestmark = [pytest.mark.parametrize("device", DEVICES), pytest.mark.parametrize("dtype", DTYPES)]
SHAPES = [(1, 1, 64), (33, 2, 128), (5, 3, 40), (1027, 8, 128)]
SMALL = SHAPES[1]


def strided(shape: tuple[int, int, int], dtype: torch.dtype, device: str) -> Tensor:
    """Rows `[tokens, heads, dim]` of several magnitudes in the middle of a poisoned buffer."""
    tokens, heads, dim = shape
    generator = torch.Generator().manual_seed(tokens)
    room = torch.full((tokens + 2, heads + 1, dim + 8), float("nan"), dtype=dtype, device=device)
    magnitude = 10.0 ** torch.randint(-3, 4, (tokens, heads, 1), generator=generator)
    room[1:-1, :heads, :dim] = (torch.randn(shape, generator=generator) * magnitude).to(device, dtype)
    return room[1:-1, :heads, :dim]


def fuse(rows: Tensor) -> Tensor:
    tokens, heads, dim = rows.shape
    room = torch.full((tokens + 2, heads, dim + 8), 0xA5, dtype=torch.uint8, device=rows.device)
    fuse_rows(rows, room[1:-1])
    assert (room[0] == 0xA5).all()
    assert (room[-1] == 0xA5).all()
    return room[1:-1]


def split(fused: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes `[tokens, heads, dim]`, and scale and bias `[tokens, heads, 1]`, as float64."""
    raw = np.ascontiguousarray(fused.cpu().numpy())
    tails = np.ascontiguousarray(raw[..., -8:]).view("<f4").astype(np.float64)
    return raw[..., :-8].astype(np.float64), tails[..., :1], tails[..., 1:]


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_are_written_as_the_bytes_of_fbgemm(shape, dtype, device):
    rows = strided(shape, dtype, device)
    fused = fuse(rows)
    assert torch.equal(fused.cpu(), fuse_rows_reference(rows.float().cpu().contiguous()))
    codes, scale, bias = split(fused)
    steps = (wide(rows) - bias) / scale
    assert np.abs(codes - steps).max() <= FUSED_HALF_STEP
    assert np.abs(codes - steps[..., ::-1]).max() > FUSED_HALF_STEP
    assert (codes.min(-1) == 0).all()
    assert (codes.max(-1) == 255).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_are_read_back_within_half_a_step(shape, dtype, device):
    rows = strided(shape, dtype, device)
    fused = fuse(rows)
    room = torch.full((shape[0], shape[1] + 3, shape[2]), float("nan"), dtype=dtype, device=device)
    got = room[:, 1:-2]
    widen_rows(fused, got)
    assert room[:, 0].isnan().all()
    assert room[:, -2:].isnan().all()
    codes, scale, bias = split(fused)
    largest = np.abs(wide(rows)).max(-1, keepdims=True)
    slack = largest * FUSED_READ[str(dtype).removeprefix("torch.")]
    assert (np.abs(wide(got) - (codes * scale + bias)) <= slack).all()
    assert (np.abs(wide(got) - ((codes + 1) * scale + bias)) > slack).any()
    assert (np.abs(wide(got) - wide(rows)) <= FUSED_HALF_STEP * scale + slack).all()
    if device == "cuda":
        assert torch.equal(got.cpu(), widen_rows_reference(fused.cpu()).to(dtype))


def test_codes_between_two_steps_are_even(dtype, device):
    rows = torch.zeros(1, 1, 64, dtype=dtype, device=device)
    rows[..., :5] = torch.tensor([255.0, 0.5, 1.5, 2.5, 100.5])
    codes, _, _ = split(fuse(rows))
    assert codes[0, 0, :5].tolist() == [255, 0, 2, 2, 100]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_is_never_a_plausible_number(value, dtype, device):
    rows = strided(SMALL, dtype, device)
    rows[20, 1, 77] = value
    if device == "cpu":
        with pytest.raises(
            ValueError, match="fuse_rows: the row of token 20, head 1 has an element that is not finite"
        ):
            fuse(rows)
        return
    fused = fuse(rows)
    assert find_unstorable(fused) == (20, 1)
    rows[20, 1, 77] = 0.0
    assert find_unstorable(fuse(rows)) is None


def test_a_row_that_spans_more_than_float32_is_told(dtype, device):
    rows = strided(SMALL, dtype, device)
    rows[3, 0, :2] = torch.tensor([3e38, -3e38])
    if device == "cpu":
        with pytest.raises(ValueError, match="token 3, head 0"):
            fuse(rows)
    else:
        assert find_unstorable(fuse(rows)) == (3, 0)


def test_wrong_arguments_are_named(dtype, device):
    rows = strided(SMALL, dtype, device)
    tokens, heads, dim = SMALL
    with pytest.raises(ValueError, match=r"fuse_rows: fused is \(33, 2, 128\).*wanted \(33, 2, 136\)"):
        fuse_rows(rows, torch.empty(SMALL, dtype=torch.uint8, device=device))
    with pytest.raises(ValueError, match="widen_rows: fused has strides"):
        widen_rows(torch.empty(tokens, heads + 1, dim + 8, dtype=torch.uint8, device=device)[:, 1:], rows)
    with pytest.raises(ValueError, match="fuse_rows: rows have 126 elements; wanted a multiple of 4"):
        fuse_rows(rows[..., :126], torch.empty(tokens, heads, 134, dtype=torch.uint8, device=device))
