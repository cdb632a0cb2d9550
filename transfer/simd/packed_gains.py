"""Scales of packed rows, as files have them, made into the gains and offsets that products take, in float32.

Of a few rows at a time, into a thread's own memory: a number `q` of the words is `q * gain + offset`, of FP8 the number
of its byte times the gain. It refuses to know words and products. A matrix is MATRIX_COLUMNS int64 of a context. All
loops are over neighbours, so that they become vector code: what is of a run or of a group is spread out afterwards.
Invariant: gains and offsets are exact, as products of a scale of 11 bits and a byte, but where scales are float32.
"""

import numba
import numpy as np

from transfer.simd.memory import prefetch_near
from transfer.simd.packed_rows import FLOAT_GAIN, float_of_bfloat16, float_of_half
from transfer.simd.region import pointer_to
from transfer.simd.vectors import LINE_BYTES

# Of a matrix: where rows lie and how many bytes each has; of packed ones where their scales, zero points and runs lie,
# 0: there are none; the scales' type, MIDDLE, the zero point where none is stored; of a row how many groups, runs and
# gains there are, the last with room for whole groups; rows that share scales.
ROWS, ROW_BYTES, SCALES, ZEROS, RUNS, SCALE_TYPE, MIDDLE, GROUPS, NUM_RUNS, GAINS, ROW_BLOCK = range(11)
MATRIX_COLUMNS = 11
BFLOAT16, FLOAT16, FLOAT32 = range(3)
AHEAD_BYTES = 2048  # how far before its use a scale is fetched


@numba.njit(nogil=True)
def _array(address, count, kind):
    return numba.carray(pointer_to(address), (count,), kind)


@numba.njit(nogil=True)
def fill_gains(m, row, rows, out):
    """Of so many rows from one on, each its gains and then its offsets, GAINS of both. m: the matrix's columns."""
    room = m[GAINS]
    for r in range(rows):
        gains_at = out + 4 * 2 * room * r
        line = (row + r) // m[ROW_BLOCK]
        gains, offsets = _array(gains_at, room, np.float32), _array(gains_at + 4 * room, room, np.float32)
        if m[RUNS] != 0:
            _of_runs(m, line, gains, offsets)
        else:
            _of_scales(m, line, gains, offsets)
        times = room // m[GROUPS]
        _spread(gains, m[GROUPS], times)
        _spread(offsets, m[GROUPS], times)


@numba.njit(nogil=True)
def _of_scales(m, line, gains, offsets):
    groups = m[GROUPS]
    item = 4 if m[SCALE_TYPE] == FLOAT32 else 2
    at = m[SCALES] + line * groups * item
    _fetch(at, groups * item)
    if m[SCALE_TYPE] == FLOAT32:
        floats = _array(at, groups, np.float32)
        for group in range(groups):
            gains[group] = floats[group]
    elif m[SCALE_TYPE] == BFLOAT16:
        halves = _array(at, groups, np.uint16)
        for group in range(groups):
            gains[group] = float_of_bfloat16(halves[group])
    else:
        halves = _array(at, groups, np.uint16)
        for group in range(groups):
            gains[group] = float_of_half(halves[group])
    if m[ZEROS] != 0:
        zeros = _array(m[ZEROS] + line * groups, groups, np.uint8)
        for group in range(groups):
            offsets[group] = -gains[group] * np.float32(zeros[group])
    elif m[MIDDLE] != 0:
        middle = np.float32(m[MIDDLE])
        for group in range(groups):
            offsets[group] = -gains[group] * middle
    else:
        for group in range(groups):
            gains[group] *= np.float32(FLOAT_GAIN)


@numba.njit(nogil=True)
def _of_runs(m, line, gains, offsets):
    groups, runs = m[GROUPS], m[NUM_RUNS]
    both = _array(m[RUNS] + 4 * line * runs, 2 * runs, np.uint16)
    pairs_at = m[SCALES] + 2 * line * groups
    _fetch(pairs_at, 2 * groups)
    for run in range(runs):
        gains[run] = float_of_half(both[2 * run])
        offsets[run] = -float_of_half(both[2 * run + 1])
    _spread(gains, runs, groups // runs)
    _spread(offsets, runs, groups // runs)
    pairs = _array(pairs_at, 2 * groups, np.int8)
    for group in range(groups):
        gains[group] *= np.float32(pairs[2 * group])
        offsets[group] *= np.float32(pairs[2 * group + 1])


@numba.njit(nogil=True)
def _fetch(address, num_bytes):
    for byte in range(0, num_bytes, LINE_BYTES):
        prefetch_near(address + AHEAD_BYTES + byte)


@numba.njit(nogil=True)
def _spread(values, count, times):
    """Each of the first so many numbers, so many times behind itself; from the last one on, in place."""
    if times == 2:  # counts that are known become vector code
        _spread_by(values, count, 2)
    elif times == 8:
        _spread_by(values, count, 8)
    elif times == 16:
        _spread_by(values, count, 16)
    elif times > 1:
        _spread_by(values, count, times)


@numba.njit(nogil=True, inline="always")
def _spread_by(values, count, times):
    for index in range(count - 1, -1, -1):
        value = values[index]
        for place in range(times):
            values[times * index + place] = value
