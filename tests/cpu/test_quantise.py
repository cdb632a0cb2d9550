"""int8 rows lie within half a step of the bf16 rows, and a NaN is not lost."""

import numpy as np
import pytest

from cpu.quantise import quantise_keys, quantise_values
from tests.cpu.rows_model import from_bf16, to_bf16
from tests.tolerances import INT8_HALF_STEP


@pytest.fixture
def rows() -> np.ndarray:
    generator = np.random.default_rng(1)
    spread = generator.uniform(0.1, 3.0, (3, 1, 64))
    room = np.full((3, 210, 64), 0x7FC0, np.uint16)
    room[:, :200] = to_bf16((generator.standard_normal((3, 200, 64)) * spread).astype(np.float32))
    return room[:, :200]


def test_keys_have_one_scale_a_head(rows: np.ndarray) -> None:
    out, scale = np.full(rows.shape, -128, np.int8), np.full(3, np.nan, np.float32)
    quantise_keys(rows, out, scale)
    real = from_bf16(rows).astype(np.float64)
    np.testing.assert_allclose(scale, np.abs(real).max((1, 2)) / 127, rtol=1e-6)
    assert np.abs(out * scale[:, None, None].astype(np.float64) - real).max() <= INT8_HALF_STEP * scale.max()
    assert np.abs(out.astype(int)).max() == 127


def test_values_have_one_scale_a_channel(rows: np.ndarray) -> None:
    out, scale = np.full(rows.shape, -128, np.int8), np.full((3, 64), np.nan, np.float32)
    quantise_values(rows, out, scale)
    real = from_bf16(rows).astype(np.float64)
    np.testing.assert_allclose(scale, np.abs(real).max(1) / 127, rtol=1e-6)
    steps = np.abs(out * scale[:, None].astype(np.float64) - real) / scale[:, None]
    assert steps.max() <= INT8_HALF_STEP
    one_scale = np.abs(real).max((1, 2))[:, None] / 127
    assert (np.abs(out * one_scale[:, None] - real) / scale[:, None]).max() > INT8_HALF_STEP


def test_rows_of_zeros_stay_zero(rows: np.ndarray) -> None:
    rows[1] = 0
    rows[2, :, 5] = 0x8000  # minus zero
    out, scale = np.full(rows.shape, -128, np.int8), np.full(3, np.nan, np.float32)
    quantise_keys(rows, out, scale)
    assert scale[1] == 0
    assert (out[1] == 0).all()
    assert (out[2, :, 5] == 0).all()


def test_a_nan_makes_its_scale_nan(rows: np.ndarray) -> None:
    rows[1, 7, 3] = 0xFFC0
    out, key_scale, value_scale = np.empty(rows.shape, np.int8), np.empty(3, np.float32), np.empty((3, 64), np.float32)
    quantise_keys(rows, out, key_scale)
    quantise_values(rows, out, value_scale)
    assert np.isnan(key_scale).tolist() == [False, True, False]
    assert np.isnan(value_scale).sum() == 1
    assert np.isnan(value_scale[1, 3])
