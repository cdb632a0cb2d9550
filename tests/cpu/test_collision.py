"""The sampling probability of eq. (10) to the last digits, its table, and the budget of eq. (21)."""

from decimal import Decimal, getcontext
from math import comb

import numpy as np
import pytest

from cpu.collision import INTERVALS, LARGEST, log_weights, sample_probability
from tests.tolerances import COLLISION_FLOAT64, COLLISION_TABLE_NATS

SETTINGS = [(10, 150), (8, 75), (9, 120), (11, 300), (7, 300), (4, 12), (16, 512), (1, 2)]


def exact_probability(p: float, bits: int, tables: int) -> float:
    """Two or more collisions, term by term with 250 digits."""
    getcontext().prec = 250
    x = Decimal(p) ** bits
    return float(1 - (1 - x) ** tables - tables * x * (1 - x) ** (tables - 1))


@pytest.mark.parametrize(("bits", "tables"), SETTINGS)
def test_the_probability_does_not_cancel(bits: int, tables: int) -> None:
    p = np.concatenate([np.linspace(0.02, 0.999, 60), 2.0 ** -np.arange(1, 12)])
    cosines = np.cos(np.pi * (1 - p))
    rounded = 1 - np.arccos(np.clip(cosines, -1, 1)) / np.pi  # what a cosine in float64 can say
    wanted = [exact_probability(float(one), bits, tables) for one in rounded]
    np.testing.assert_allclose(sample_probability(cosines, bits, tables), wanted, rtol=COLLISION_FLOAT64, atol=0)


def test_the_formula_as_written_would_fail_here() -> None:
    p = 0.05
    x = p**10
    plain = 1 - (1 - x) ** 150 - 150 * x * (1 - x) ** 149
    assert abs(plain / exact_probability(p, 10, 150) - 1) > COLLISION_FLOAT64


@pytest.mark.parametrize(("bits", "tables"), [(10, 150), (8, 75), (9, 120), (11, 300), (7, 300)])
def test_the_table_interpolates(bits: int, tables: int) -> None:
    table = log_weights(bits, tables).astype(np.float64)
    cosines = np.linspace(-0.5, 1.0, 100_001)
    place = (cosines + 1) * (INTERVALS / 2)
    first = place.astype(int)
    between = table[first] + (place - first) * (table[np.minimum(first + 1, INTERVALS)] - table[first])
    wanted = -np.log(sample_probability(cosines, bits, tables))
    assert np.abs(between - wanted).max() < COLLISION_TABLE_NATS
    shifted = -np.log(sample_probability(cosines + 2 / INTERVALS, bits, tables))
    assert np.abs(between - shifted).max() > COLLISION_TABLE_NATS


def test_the_table_is_finite_and_falls() -> None:
    table = log_weights(10, 150)
    assert table.shape == (INTERVALS + 2,)
    assert table[0] == np.float32(LARGEST)
    assert (np.diff(table) <= 0).all()
    assert 0 <= table[-1] == table[-2] < 1e-6


def test_cosines_beyond_one_are_one() -> None:
    assert sample_probability(np.array([1.0000001, -1.1]), 10, 150).tolist() == [1.0, 0.0]


def test_the_budget_is_that_of_the_paper() -> None:
    """Eq. (21), keys orthogonal to the query: the binomial probability of two or more with 0.5 ** K."""
    for bits, tables in SETTINGS:
        x = 0.5**bits
        wanted = sum(comb(tables, n) * x**n * (1 - x) ** (tables - n) for n in range(2, tables + 1))
        assert sample_probability(np.zeros(1), bits, tables) == pytest.approx(wanted, rel=1e-9)
    assert round(float(sample_probability(np.zeros(1), 10, 150)[0]), 3) == 0.01


def test_settings_without_tables_are_refused() -> None:
    for bits, tables in ((0, 150), (17, 150), (10, 1), (10, 513)):
        with pytest.raises(ValueError, match="wanted 1 to 16 bits and 2 to 512 tables"):
            log_weights(bits, tables)
