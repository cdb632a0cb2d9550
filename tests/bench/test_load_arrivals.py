"""Arrivals of the open loop: their rate, their spread, their seed."""

import numpy as np
import pytest
from scipy import stats

from bench.load.arrivals import draw_arrivals
from tests.tolerances import LOAD_ARRIVAL_P, LOAD_RATE_SIGMAS

COUNT = 20_000
RATE = 40.0


def rate_sigmas(times: np.ndarray, rate: float) -> float:
    """How far the mean gap is from 1/rate, in standard errors of an exponential's mean."""
    gaps = np.diff(times, prepend=0.0)
    return abs(gaps.mean() * rate - 1) * np.sqrt(len(gaps))


def test_poisson_arrivals_have_the_asked_rate() -> None:
    assert rate_sigmas(draw_arrivals(RATE, 1.0, 5, COUNT, None), RATE) < LOAD_RATE_SIGMAS


def test_a_rate_wrong_by_a_twentieth_would_be_seen() -> None:
    assert rate_sigmas(draw_arrivals(RATE * 1.05, 1.0, 5, COUNT, None), RATE) > LOAD_RATE_SIGMAS


def test_poisson_gaps_are_exponential() -> None:
    gaps = np.diff(draw_arrivals(RATE, 1.0, 6, COUNT, None))
    assert stats.kstest(gaps, "expon", args=(0, 1 / RATE)).pvalue > LOAD_ARRIVAL_P


def test_gaps_of_another_shape_are_told_from_exponential_ones() -> None:
    gaps = np.diff(draw_arrivals(RATE, 1.2, 6, COUNT, None))
    assert stats.kstest(gaps, "expon", args=(0, 1 / RATE)).pvalue < LOAD_ARRIVAL_P


@pytest.mark.parametrize("burstiness", [0.25, 4.0])
def test_bursts_keep_the_mean_rate_and_have_the_gammas_variance(burstiness: float) -> None:
    gaps = np.diff(draw_arrivals(RATE, burstiness, 7, COUNT, None))
    assert abs(gaps.mean() * RATE - 1) * np.sqrt(len(gaps) * burstiness) < LOAD_RATE_SIGMAS
    assert stats.kstest(gaps, "gamma", args=(burstiness, 0, 1 / (RATE * burstiness))).pvalue > LOAD_ARRIVAL_P


def test_the_same_seed_draws_the_same_times_and_another_does_not() -> None:
    first = draw_arrivals(RATE, 1.0, 1, 100, None)
    np.testing.assert_array_equal(first, draw_arrivals(RATE, 1.0, 1, 100, None))
    assert not np.array_equal(first, draw_arrivals(RATE, 1.0, 2, 100, None))


def test_a_duration_holds_every_arrival_before_its_end() -> None:
    times = draw_arrivals(500.0, 1.0, 1, None, 10.0)
    assert times[-1] < 10.0
    assert abs(len(times) - 5000) < LOAD_RATE_SIGMAS * np.sqrt(5000)
    assert np.all(np.diff(times) >= 0)
