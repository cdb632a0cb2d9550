"""Plain matrices rounded to few bits: numbers are the nearest, scales the best of those tried, and names their own."""

import numpy as np
import pytest
import torch

from gpu.model.matrix_format import ROUNDED, MatrixFormat
from gpu.weights.rounding import SHRINKS, round_rows
from gpu.weights.weights_digest import digest_rounded
from tests.gpu.packed_oracle import e4m3


def widen(numbers: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, stored: MatrixFormat) -> np.ndarray:
    """float64, by definition."""
    codes, wide = numbers.numpy(), scales.double().numpy()
    signed = codes.astype(float)
    group = stored.group or codes.shape[1]
    spread = np.repeat(wide, group, 1)[:, : codes.shape[1]]
    if stored.kind == "fp8":
        return e4m3(codes) * spread
    middle = 8 if stored.kind == "int4" else 128
    less = middle if zeros is None else np.repeat(zeros.double().numpy(), group, 1)[:, : codes.shape[1]]
    return (signed - less) * spread


def draw(rows: int, inner: int) -> torch.Tensor:
    drawn = torch.randn(rows, inner, generator=torch.Generator().manual_seed(4))
    drawn[0] = 0.0  # a row that has no scale of its own
    drawn[1, ::7] *= 8.0
    return drawn.bfloat16()


@pytest.mark.parametrize("kind", ["int4", "int8", "fp8"])
@pytest.mark.parametrize("inner", [256, 200])
def test_numbers_are_the_nearest_to_what_was_with_the_scale_that_is_stored(kind: str, inner: int) -> None:
    stored, rows = ROUNDED[kind].layers, draw(5, inner)
    numbers, scales, zeros = round_rows(rows, stored)
    got, wanted = widen(numbers, scales, zeros, stored), rows.double().numpy()
    top = 2 if kind == "fp8" else 2 ** (4 if kind == "int4" else 8) - 1
    for step in (-1, 1):
        codes = numbers.numpy().astype(int) + step
        is_one = (codes >= 0) & (codes <= (255 if kind == "fp8" else top)) & ((codes & 0x7F) != 0x7F)
        other = widen(
            torch.from_numpy(np.where(is_one, codes, numbers.numpy()).astype(np.uint8)), scales, zeros, stored
        )
        slack = 1e-6 * np.abs(wanted).max()  # of quotients in float32, halfway between two
        assert (np.abs(got - wanted) <= np.abs(other - wanted) + slack).all()
    assert not got[0].any()


def test_of_several_scales_the_one_with_the_least_error_is_kept() -> None:
    stored, rows = ROUNDED["int4"].layers, draw(6, 256)
    numbers, scales, zeros = round_rows(rows, stored)
    best = np.full((6, 2), np.inf)
    wide = rows.double().numpy().reshape(6, 2, 128)
    for shrink in SHRINKS:
        low, high = np.minimum(wide.min(2), 0), np.maximum(wide.max(2), 0)
        scale = torch.from_numpy(np.maximum((high - low) * shrink / 15, 1e-8)).bfloat16().double().numpy()
        zero = np.clip(np.round(-low * shrink / scale), 0, 15)
        codes = np.clip(np.round(wide / scale[..., None] + zero[..., None]), 0, 15)
        best = np.minimum(best, (((codes - zero[..., None]) * scale[..., None] - wide) ** 2).sum(2))
    got = ((widen(numbers, scales, zeros, stored).reshape(6, 2, 128) - wide) ** 2).sum(2)
    assert got == pytest.approx(best, rel=1e-3)


def test_chunks_of_rounded_weights_have_names_of_their_own() -> None:
    names = [digest_rounded("a" * 32, asked) for asked in (None, "bfloat16", "fp8", "int8", "int4")]
    assert names[0] == names[1] == "a" * 32
    assert len(set(names)) == 4
    assert digest_rounded("b" * 32, "int4") != names[-1]
