"""Quantise bf16 rows on the host to int8: one scale for the keys of a KV head, one for each channel of its values.

fbgemm's row-wise quantisers put a scale in each row, for which this layout has no room. |stored - true| is at most half
a scale. A NaN makes the scale NaN, so that its head's attention is NaN as with bf16 rows. Bytes moved: the rows twice,
for the maximum and for the rounding, and the int8 rows once.
"""

import numba
import numpy as np

import transfer.simd  # noqa: F401, what numba cannot cache it then keeps in memory

_LARGEST = np.float32(127.0)


def quantise_keys(rows: np.ndarray, out: np.ndarray, scale: np.ndarray) -> None:
    """Quantise keys. rows: uint16 `[kv_heads, tokens, dim]`, bf16 bits; out: int8 of that shape; scale: float32
    `[kv_heads]`, written.

    Rows and out may have strides, but a row's columns are contiguous. One thread, without the GIL.
    """
    _check(rows, out, scale, rows.shape[:1])
    _quantise_keys(rows, out, scale)


def quantise_values(rows: np.ndarray, out: np.ndarray, scale: np.ndarray) -> None:
    """Quantise values as `quantise_keys` does; scale: float32 `[kv_heads, dim]`."""
    _check(rows, out, scale, (rows.shape[0], rows.shape[2]))
    _quantise_values(rows, out, scale)


def _check(rows: np.ndarray, out: np.ndarray, scale: np.ndarray, scales: tuple[int, ...]) -> None:
    assert rows.dtype == np.uint16, "rows: bf16 as uint16"
    assert out.dtype == np.int8, "out: int8"
    assert scale.dtype == np.float32, "scale: float32"
    assert rows.shape == out.shape, "rows and out: one shape"
    assert scale.shape == scales, "scale: one for each KV head, or for each channel of it"


@numba.njit(nogil=True, cache=True)
def _quantise_keys(rows, out, scale):
    kv_heads, _, dim = rows.shape
    top, inverse = np.empty(dim, np.float32), np.empty(dim, np.float32)
    for head in range(kv_heads):
        _find_maxima(rows[head], top)
        highest = np.float32(0.0)
        for column in range(dim):
            if top[column] > highest or top[column] != top[column]:
                highest = top[column]
                if highest != highest:
                    break
        scale[head] = highest / _LARGEST
        inverse[:] = _LARGEST / highest if highest > 0 else np.float32(0.0)
        _round_rows(rows[head], inverse, out[head])


@numba.njit(nogil=True, cache=True)
def _quantise_values(rows, out, scale):
    kv_heads, _, dim = rows.shape
    top, inverse = np.empty(dim, np.float32), np.empty(dim, np.float32)
    for head in range(kv_heads):
        _find_maxima(rows[head], top)
        for column in range(dim):
            scale[head, column] = top[column] / _LARGEST
            inverse[column] = _LARGEST / top[column] if top[column] > 0 else np.float32(0.0)
        _round_rows(rows[head], inverse, out[head])


@numba.njit(nogil=True, cache=True)
def _find_maxima(rows, top):
    """Find the largest magnitude of each column. As bits, magnitudes order like integers, and NaN above all."""
    bits = np.zeros(rows.shape[1], np.uint16)
    for token in range(rows.shape[0]):
        row = rows[token]
        for column in range(len(bits)):
            magnitude = row[column] & np.uint16(0x7FFF)
            bits[column] = magnitude if magnitude > bits[column] else bits[column]
    for column in range(len(bits)):
        top[column] = _widen(bits[column])


@numba.njit(nogil=True, cache=True)
def _round_rows(rows, inverse, out):
    """Round to the nearest, ties to even; an inverse of 0 gives 0."""
    for token in range(rows.shape[0]):
        row, to = rows[token], out[token]
        for column in range(len(inverse)):
            scaled = _widen(row[column]) * inverse[column]
            scaled = scaled if scaled == scaled else np.float32(0.0)
            scaled = scaled if scaled < _LARGEST else _LARGEST
            scaled = scaled if scaled > -_LARGEST else -_LARGEST
            to[column] = np.int8(np.rint(scaled))


@numba.njit(nogil=True)
def _widen(bits):
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)
