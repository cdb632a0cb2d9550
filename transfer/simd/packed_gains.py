"""Widen the scales of packed rows, as files have them, to the float32 gains and offsets that products take.

This is done for a few rows at a time, into a thread's own memory. An integer `q` of the words means `q * gain +
offset`; FP8 and FP4 mean their number times the gain. A matrix is MATRIX_COLUMNS int64 of a context. All loops are over
neighbours, so that they become vector code; values of a run or of a group are repeated afterwards. Gains and offsets
are exact, as products of a scale of 11 bits and a byte, except where scales are float32.
"""

import numba
import numpy as np

from transfer.simd.inner import inner
from transfer.simd.memory import prefetch_near
from transfer.simd.packed_rows import (
    FLOAT_GAIN,
    float_of_bfloat16,
    float_of_half,
    scale_sixteen,
    scaled_pairs,
    scaled_runs,
)
from transfer.simd.region import pointer_to
from transfer.simd.vectors import LINE_BYTES

# Columns of a matrix: the address of its rows and the bytes of one; for packed rows the addresses of scales, zero
# points and runs (0: none), the scales' type, the zero point where none is stored (MIDDLE), the numbers of groups, runs
# and gains of a row (gains with room for whole groups), and how many rows share scales.
ROWS, ROW_BYTES, SCALES, ZEROS, RUNS, SCALE_TYPE, MIDDLE, GROUPS, NUM_RUNS, GAINS, ROW_BLOCK = range(11)
MATRIX_COLUMNS = 11
NO_OFFSET = -1  # MIDDLE of FP4, whose numbers are looked up; FP8 has 0
BFLOAT16, FLOAT16, FLOAT32, EXPONENT = range(4)  # EXPONENT: a byte e means 2**(e - 127), and 0 means 0
EQUAL_PAIRS = 4  # SCALE_TYPE of runs in tiles whose pairs all equal the first one


_scale_eight, _scale_one = scaled_pairs(8), scaled_pairs(1)
_scale_eight_runs, _scale_run = scaled_runs(8), scaled_runs(1)


@inner
def _array(address, count, kind):
    return numba.carray(pointer_to(address), (count,), kind)


@numba.njit(nogil=True)
def fill_gains(m, row, rows, gains_at, offsets_at):
    """Write gains and offsets of `rows` rows from `row` on, GAINS for each row. m: the matrix's columns."""
    if m[ROW_BLOCK] == 1:
        _fill(m, row, rows, gains_at, offsets_at)
    else:
        for r in range(rows):
            behind = 4 * m[GAINS] * r
            _fill(m, (row + r) // m[ROW_BLOCK], 1, gains_at + behind, offsets_at + behind)


@inner
def _fill(m, line, lines, gains_at, offsets_at):
    """Write gains and offsets of `lines` adjacent lines of scales, repeated for whole groups."""
    count = lines * m[GROUPS]
    gains, offsets = _array(gains_at, lines * m[GAINS], np.float32), _array(offsets_at, lines * m[GAINS], np.float32)
    if m[RUNS] != 0:
        _of_runs(m, line, lines, gains_at, offsets_at)
    else:
        fill_scales(m, line, lines, gains_at, offsets_at)
    times = m[GAINS] // m[GROUPS]
    _spread(gains, count, times)
    if m[RUNS] != 0 or m[ZEROS] != 0 or m[MIDDLE] > 0:
        _spread(offsets, count, times)


@inner
def fill_scales(m, line, lines, gains_at, offsets_at):
    """Write one gain and one offset for each scale of `lines` adjacent lines. For scales without runs."""
    count = lines * m[GROUPS]
    gains, offsets = _array(gains_at, count, np.float32), _array(offsets_at, count, np.float32)
    item = 4 if m[SCALE_TYPE] == FLOAT32 else 1 if m[SCALE_TYPE] == EXPONENT else 2
    at = m[SCALES] + line * m[GROUPS] * item
    fetch_behind(at, count * item)
    if m[SCALE_TYPE] == EXPONENT:
        exponents = _array(at, count, np.uint8)
        for group in range(count):
            gains[group] = float_of_bfloat16(np.uint16(exponents[group]) << np.uint16(7))
        return
    if m[SCALE_TYPE] == FLOAT32:
        floats = _array(at, count, np.float32)
        for group in range(count):
            gains[group] = floats[group]
    elif m[SCALE_TYPE] == BFLOAT16:
        halves = _array(at, count, np.uint16)
        for group in range(count):
            gains[group] = float_of_bfloat16(halves[group])
    else:
        halves = _array(at, count, np.uint16)
        for group in range(count):
            gains[group] = float_of_half(halves[group])
    if m[ZEROS] != 0:
        zeros = _array(m[ZEROS] + line * m[GROUPS], count, np.uint8)
        fetch_behind(m[ZEROS] + line * m[GROUPS], count)
        for group in range(count):
            offsets[group] = -gains[group] * np.float32(zeros[group])
    elif m[MIDDLE] > 0:
        middle = np.float32(m[MIDDLE])
        for group in range(count):
            offsets[group] = -gains[group] * middle
    elif m[MIDDLE] != NO_OFFSET:
        for group in range(count):
            gains[group] *= np.float32(FLOAT_GAIN)


@inner
def _of_runs(m, line, lines, gains_at, offsets_at):
    runs, count, each = lines * m[NUM_RUNS], lines * m[GROUPS], m[GROUPS] // m[NUM_RUNS]
    runs_at, pairs_at = m[RUNS] + 4 * line * m[NUM_RUNS], m[SCALES] + 2 * line * m[GROUPS]
    fetch_behind(runs_at, 4 * runs)
    fetch_behind(pairs_at, 2 * count)
    if each == 1:
        run = 0
        while run + 8 <= runs:
            _scale_eight_runs(runs_at + 4 * run, pairs_at + 2 * run, gains_at + 4 * run, offsets_at + 4 * run)
            run += 8
        while run < runs:
            _scale_run(runs_at + 4 * run, pairs_at + 2 * run, gains_at + 4 * run, offsets_at + 4 * run)
            run += 1
        return
    if (each == 8 and runs % 2 == 0) or each == 16:
        behind = 4 if each == 8 else 0
        for group in range(0, count, 16):
            scale_sixteen(runs_at, runs_at + behind, pairs_at + 2 * group, gains_at + 4 * group, offsets_at + 4 * group)
            runs_at += 4 + behind
        return
    both = _array(runs_at, 2 * runs, np.uint16)
    for run in range(runs):
        gain, offset = float_of_half(both[2 * run]), -float_of_half(both[2 * run + 1])
        group, end = each * run, each * (run + 1)
        while group + 8 <= end:
            _scale_eight(pairs_at + 2 * group, gain, offset, gains_at + 4 * group, offsets_at + 4 * group)
            group += 8
        while group < end:
            _scale_one(pairs_at + 2 * group, gain, offset, gains_at + 4 * group, offsets_at + 4 * group)
            group += 1


@inner
def fetch_behind(address, num_bytes):
    """Prefetch the `num_bytes` bytes behind these, which the next call reads."""
    for byte in range(num_bytes, 2 * num_bytes, LINE_BYTES):
        prefetch_near(address + byte)


@inner
def _spread(values, count, times):
    """Repeat each of the first `count` numbers `times` times, in place, beginning with the last one."""
    if times == 2:  # constant counts become vector code
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
