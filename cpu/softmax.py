"""Compute an online softmax over blocks of scores, and prepare a query for rows of one type.

Functions for numba code on float32 vectors. paper (2410.16179) eq. (11). The cosine is clamped before it indexes the
table, so that no NaN reads out of bounds; a NaN score makes its own head's mass NaN and nothing else.
"""

import math

import numpy as np

from cpu.collision import INTERVALS
from cpu.row_products import BLOCK_ROWS, column_bytes, place_of
from transfer.simd.features import LANES
from transfer.simd.inner import inner
from transfer.simd.memory import load_float32, store_float32, store_int16
from transfer.simd.values import (
    as_floats,
    exp_lanes,
    first_lanes,
    gather,
    greater,
    lane_max,
    lane_sum,
    lesser,
    load_lanes,
    multiply_add,
    spread,
    square_root,
    store_lanes,
    truncated,
)
from transfer.simd.vectors import load

_EMPTY = np.float32(-np.inf)
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_TINY = np.float32(1e-30)
_HALF_INTERVALS = np.float32(INTERVALS / 2)
_INT16 = np.float32(32767.0)


@inner
def prepare_query(kind, query_kind, query, dim, to):
    """Write a query in the form that rows of `kind` need. Return (factor of its products, inverse norm of the query).

    query: address of `[dim]` of query_kind; to: address of float32 `[dim]`, or int16 for rows of int8.
    """
    squares, biggest = _ZERO, _ZERO
    for column in range(dim):
        x = load(query_kind, query, column)
        squares += x * x
        biggest = abs(x) if abs(x) > biggest else biggest
    inverse_norm = _ONE / max(np.float32(math.sqrt(squares)), _TINY)
    if column_bytes(kind) == 1:
        step = biggest / _INT16 + (squares - squares)  # NaN in the query, or infinity, makes every product NaN
        inverse = _ONE / step if step > _ZERO else _ZERO
        for column in range(dim):
            scaled = load(query_kind, query, column) * inverse
            whole = np.int64(math.floor(scaled + np.float32(0.5))) if abs(scaled) <= _INT16 + _ONE else np.int64(0)
            store_int16(to + 2 * column, min(whole, np.int64(32767)))
        return step, inverse_norm
    for column in range(dim):
        store_float32(to + 4 * place_of(kind, column), load(query_kind, query, column))
    return _ONE, inverse_norm


@inner
def weigh_samples(scores, count, logs, to_logit, to_cosine):
    """Turn products and squared norms (two blocks of float32 `[BLOCK_ROWS]`) into logits less log u, in place; -inf
    after `count`. Return the greatest. logs: address of `collision.log_weights`.
    """
    top = spread(_EMPTY)
    for at in range(0, count, LANES):
        product, square = load_lanes(scores + 4 * at), load_lanes(scores + 4 * (BLOCK_ROWS + at))
        cosine = product * spread(to_cosine) / square_root(greater(square, spread(_TINY)))
        cosine = lesser(greater(cosine, spread(-_ONE)), spread(_ONE))
        place = (cosine + spread(_ONE)) * spread(_HALF_INTERVALS)
        interval = truncated(place)
        first, second = gather(logs, interval), gather(logs + 4, interval)
        weight = multiply_add(place - as_floats(interval), second - first, first)
        logit = first_lanes(count - at, multiply_add(product, spread(to_logit), weight), spread(_EMPTY))
        store_lanes(scores + 4 * at, logit)
        top = greater(logit, top)
    return lane_max(top)


@inner
def scale_scores(scores, count, to_logit):
    """Turn products into logits, in place; -inf after `count`. Return the greatest."""
    top = spread(_EMPTY)
    for at in range(0, count, LANES):
        logit = first_lanes(count - at, load_lanes(scores + 4 * at) * spread(to_logit), spread(_EMPTY))
        store_lanes(scores + 4 * at, logit)
        top = greater(logit, top)
    return lane_max(top)


@inner
def exponentiate(scores, count, top):
    """Turn logits into weights, in place, 0 after `count`; return their sum."""
    mass = spread(_ZERO)
    for at in range(0, count, LANES):
        weight = exp_lanes(load_lanes(scores + 4 * at) - spread(top))
        store_lanes(scores + 4 * at, weight)
        mass = mass + weight
    return lane_sum(mass)


@inner
def shrink(before, after):
    """Return the factor that rescales masses from the maximum `before` to the maximum `after`."""
    return np.float32(math.exp(before - after)) if before > _EMPTY else _ZERO


@inner
def write_partial(kind, sums, mass, top, value_scale, dim, out, lse):
    """Write a softmax's result as a partial: float32 `[dim]` and one lse. value_scale: address, or 0."""
    inverse = _ONE / mass
    for column in range(dim):
        value = load_float32(sums + 4 * place_of(kind, column)) * inverse
        if column_bytes(kind) == 1:
            value *= load_float32(value_scale + 4 * column)
        store_float32(out + 4 * column, value)
    store_float32(lse, np.float32(top + math.log(mass)))
