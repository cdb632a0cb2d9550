"""Estimate standard errors of a sampled answer's log mass and output, from the weights of the sample itself.

Functions for numba code; they never change an answer. Keys are not drawn independently: a table's bucket takes all keys
in it. So the variance is taken over groups of tables. The weight of a key that shares exactly two tables with the query
is what the answer would lose without either table. With D_g the sum of these weights in a group, V = G / (G - 1) *
sum (D_g - mean)^2 (a jackknife over tables; its expectation is at least the variance, and up to twice it if most keys
are rare).

Numerators are treated in the same way, along one fixed direction of +-1: the expected square of an error along it is
that of the error's length. A head that reads all keys has no error. For such a head the error is noted that sampling
would have had with keys drawn one by one, sum e^2 (1 - u) / u, which does not depend on the tables drawn.
"""

import math

import numpy as np

from cpu.lookup import SPANS, stripes_of
from cpu.pieces import TOKENS
from cpu.row_products import BLOCK_ROWS
from transfer.host_memory import STRIPE_TOKENS
from transfer.simd.inner import inner
from transfer.simd.memory import clear_bytes, load_float32, load_uint16, store_float32, store_int16

GROUPS = 15  # groups of tables; a group is a digit 1 to 15 of a mark
COLUMNS = GROUPS + 1  # of a slot's sums; column 0 of the first row is the greatest logit
MASSES, NUMERATORS = 0, 1  # rows of a slot's sums
LOG_MASS, OUTPUT, LARGEST, ERRORS = range(4)  # columns of an answer's errors, and how many
DIRECTION_SEED = 251_005_688
_TWO = 0x100  # marks of two digits are below this


def draw_direction(dim: int) -> np.ndarray:
    """Return a float32 `[dim]` of +-1, the same for all heads and runs."""
    return np.random.default_rng(DIRECTION_SEED).choice(np.array([-1, 1], np.float32), dim)


@inner
def mark_groups(piece, tables, spans, digits, ids, found, marks, first_mark):
    """Mark each sampled id with the groups of the two tables that it shares with the query, as a byte of two digits; 0
    for ids that share more than two tables.

    spans: as `lookup.find_samples` left them. digits: address of uint16 `[STRIPE_TOKENS]`, zero before and after. ids:
    address of uint16. marks: uint8 array, with the first id's mark at `first_mark`. Reads the buckets again.
    """
    _, first, last = stripes_of(piece)
    index = 0
    for stripe in range(first, last):
        for table in range(tables):
            digit, span = table % GROUPS + 1, table * SPANS + stripe - first
            for entry in range(spans[span], spans[span + 1], 2):
                at = digits + 2 * load_uint16(entry)
                store_int16(at, load_uint16(at) << 4 | digit)
        base = stripe * STRIPE_TOKENS
        while index < found and load_uint16(ids + 2 * index) < base + STRIPE_TOKENS:
            pair = load_uint16(digits + 2 * (load_uint16(ids + 2 * index) - base))
            marks[first_mark + index] = pair if pair < _TWO else 0
            index += 1
        clear_bytes(digits, 2 * min(STRIPE_TOKENS, piece[TOKENS] - base))


@inner
def note_top(sums, before, top):
    """Rescale a part's sums `[2, COLUMNS]` to a new greatest logit."""
    factor = np.float32(math.exp(before - top)) if before > -np.inf else np.float32(0.0)
    for column in range(1, COLUMNS):  # a slice of both rows would take numba three seconds to compile
        sums[MASSES, column] *= factor
        sums[NUMERATORS, column] *= factor
    sums[MASSES, 0] = top


@inner
def add_deviations(sums, marks, first_mark, weights, products, count, to_product):
    """Add a block of samples. weights, products: addresses of float32 `[count]`. products are of values with the
    direction, and still to be multiplied by to_product.
    """
    for index in range(count):
        mark = marks[first_mark + index]
        if mark != 0:
            weight = load_float32(weights + 4 * index)
            along = weight * load_float32(products + 4 * index) * to_product
            first, second = mark >> 4, mark & 15
            sums[MASSES, first] += weight
            sums[MASSES, second] += weight
            sums[NUMERATORS, first] += along
            sums[NUMERATORS, second] += along


@inner
def add_variances(sums, weights, inverse, products, count, to_product):
    """Add a block of keys of a head that reads all keys.

    weights, inverse: addresses of float32 `[count]`, e and e / u under the greatest logit. Columns 1 to 3 of the first
    row become sums of e^2 (1 - u) / u, of that times the product, and of that times the product's square.
    """
    for index in range(count):
        weight = load_float32(weights + 4 * index)
        variance = weight * max(load_float32(inverse + 4 * index) - weight, np.float32(0.0))
        product = load_float32(products + 4 * index) * to_product
        sums[MASSES, 1] += variance
        sums[MASSES, 2] += variance * product
        sums[MASSES, 3] += variance * product * product


@inner
def add_part(totals, sums, scale, is_full):
    """Add a part's sums `[2, COLUMNS]` to an answer's. scale: factor of its weights; column 0 has the largest."""
    if scale > totals[MASSES, 0]:
        totals[MASSES, 0] = scale
    factor = scale * scale if is_full else scale
    for column in range(1, COLUMNS):
        totals[MASSES, column] += sums[MASSES, column] * factor
        totals[NUMERATORS, column] += sums[NUMERATORS, column] * factor


@inner
def write_errors(totals, mass, out, direction, dim, is_full, tables, errors):
    """Write standard errors of log mass, and of the output as a share of its length, and the largest weight's share.

    totals: of all parts, under the same greatest logit as `mass`; out: address of the answer, float32 `[dim]`;
    direction: float32 array; errors: address of float32 `[ERRORS]`.
    """
    along, square = 0.0, 0.0
    for column in range(dim):
        value = np.float64(load_float32(out + 4 * column))
        along += value * direction[column]
        square += value * value
    of_mass, of_output = 0.0, 0.0
    if is_full:
        own, first, second = totals[MASSES, 1], totals[MASSES, 2], totals[MASSES, 3]
        of_mass = np.float64(own)
        of_output = max(second - 2 * along * first + along * along * own, 0.0)
    else:
        groups = min(GROUPS, tables)
        mean, mean_along = 0.0, 0.0
        for group in range(1, groups + 1):
            mean += totals[MASSES, group] / groups
            mean_along += (totals[NUMERATORS, group] - along * totals[MASSES, group]) / groups
        for group in range(1, groups + 1):
            of_mass += (totals[MASSES, group] - mean) ** 2
            of_output += (totals[NUMERATORS, group] - along * totals[MASSES, group] - mean_along) ** 2
        of_mass, of_output = of_mass * groups / (groups - 1), of_output * groups / (groups - 1)
    store_float32(errors + 4 * LOG_MASS, np.float32(math.sqrt(of_mass) / mass))
    length = mass * math.sqrt(square)
    store_float32(errors + 4 * OUTPUT, np.float32(math.sqrt(of_output) / length if length > 0.0 else 0.0))
    store_float32(errors + 4 * LARGEST, np.float32(totals[MASSES, 0] / mass))


@inner
def keep_products(scores):
    """Copy a block's products and squares to the third and fourth block of `scores`."""
    for row in range(2 * BLOCK_ROWS):
        store_float32(scores + 4 * (2 * BLOCK_ROWS + row), load_float32(scores + 4 * row))
