"""Exact intervals cover the truth as often as they say, and 'within x points' is said wrongly no more often.

Losses and gains of n prompts are multinomial, so what a rule does under a given truth is a sum over counts: only the
bootstrap is simulated.
"""

from functools import cache
from math import sqrt

import numpy as np
import pytest
from scipy.stats import binom, binomtest

from evals.paired import (
    BOOTSTRAP,
    EACH_LEVEL,
    EXACT,
    Paired,
    clopper_pearson,
    interval_of_counts,
    mean_interval,
    paired_interval,
    pooled_interval,
)
from tests.tolerances import COVERAGE_95, COVERAGE_EXACT, FALSE_VERDICTS, MASS_LEFT_OUT, VERDICT_POWER

NUM_RUNS = 600
NUM_PROMPTS = 400
TRUTHS = [(400, 0.02, 0.0), (400, 0.0, 0.0), (400, 0.005, 0.005), (400, 0.03, 0.01), (40, 0.05, 0.03), (40, 0.3, 0.2),
          (40, 0.9, 0.05)]  # fmt: skip
"""Prompts, and the true shares of losses and of gains."""


def chances(losing: float, gaining: float, num: int) -> list[tuple[int, int, float]]:
    """(losses, gains, probability) of num prompts, all but MASS_LEFT_OUT of it."""
    found = []
    for losses in range(num + 1):
        chance = binom.pmf(losses, num, losing)
        if chance < MASS_LEFT_OUT / num:
            continue
        rest = num - losses
        gains = np.arange(rest + 1)
        both = chance * binom.pmf(gains, rest, gaining / (1 - losing) if losing < 1 else 0.0)
        found += [(losses, int(count), float(one)) for count, one in zip(gains, both, strict=True) if one > 1e-12]
    return found


@cache
def interval(losses: int, gains: int, num: int) -> Paired:
    return interval_of_counts(losses, gains, num)


def within(found: Paired, points: float) -> bool:
    """Whether a loss of points + 1 is ruled out, as the tables of before pooling said it."""
    return found.low > -(points + 1)


def normal_low(losses: int, gains: int, num: int) -> float:
    """The lower end of the normal interval, which was used before: the sample variance, or the rule of three."""
    mean = (gains - losses) / num
    variance = ((losses + gains) / num - mean**2) * num / (num - 1)
    return 100 * (mean - (1.96 * sqrt(variance / num) if variance > 0 else 3 / num))


def test_the_ends_are_those_of_another_exact_test() -> None:
    for num_hits, num in [(0, 400), (3, 400), (8, 20), (400, 400), (1, 2)]:
        wanted = binomtest(num_hits, num).proportion_ci(EACH_LEVEL, "exact")
        assert clopper_pearson(num_hits, num, EACH_LEVEL) == pytest.approx((wanted.low, wanted.high), abs=1e-9)


@pytest.mark.parametrize(("num", "losing", "gaining"), TRUTHS)
def test_the_interval_covers_the_truth_in_95_of_100_runs(num: int, losing: float, gaining: float) -> None:
    truth = 100 * (gaining - losing)
    covered = sum(
        chance
        for losses, gains, chance in chances(losing, gaining, num)
        if interval(losses, gains, num).low <= truth <= interval(losses, gains, num).high
    )
    assert covered > COVERAGE_EXACT - MASS_LEFT_OUT


@pytest.mark.parametrize("gaining", [0.0, 0.001, 0.005, 0.02])
@pytest.mark.parametrize("points", [1.0, 2.0])
def test_a_loss_at_the_bound_passes_in_no_more_runs_than_is_said(points: float, gaining: float) -> None:
    """A true loss of 2 points passes as "within 1", and one of 3 as "within 2", in 2.5 % of runs at most."""
    losing = (points + 1) / 100 + gaining
    passed = sum(
        chance
        for losses, gains, chance in chances(losing, gaining, NUM_PROMPTS)
        if within(interval(losses, gains, NUM_PROMPTS), points)
    )
    assert passed < FALSE_VERDICTS


def test_the_normal_interval_would_pass_it_too_often() -> None:
    """The power of the test above: the rule of before is seen to pass a true loss of 2 points in 10 % of runs."""
    passed = sum(
        chance
        for losses, gains, chance in chances(0.02, 0.0, NUM_PROMPTS)
        if normal_low(losses, gains, NUM_PROMPTS) > -2.0
    )
    assert passed > 3 * FALSE_VERDICTS


def test_no_loss_passes_as_within_one() -> None:
    passed = sum(
        chance
        for losses, gains, chance in chances(0.001, 0.0, NUM_PROMPTS)
        if within(interval(losses, gains, NUM_PROMPTS), 1.0)
    )
    assert passed > VERDICT_POWER


def test_losses_are_the_prompts_that_the_method_alone_has_wrong() -> None:
    method, baseline = [1.0, 0.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 0.0, 0.0]
    found = paired_interval(method, baseline)
    assert (found.losses, found.gains, found.mean, found.kind) == (2, 1, -20.0, EXACT)
    assert found == interval_of_counts(2, 1, 5)
    other = paired_interval(baseline, method)
    assert (other.low, other.high) == (-found.high, -found.low)


def test_three_losses_of_400_are_two_and_a_half_points_at_most() -> None:
    """By hand: 0.0125 = P(3 or fewer of 400 lost) at 2.45 %."""
    found = interval_of_counts(3, 0, NUM_PROMPTS)
    assert binom.cdf(3, NUM_PROMPTS, -found.low / 100) == pytest.approx(0.0125, rel=1e-6)
    assert not within(found, 1.0)
    assert within(found, 2.0)


def test_a_score_by_itself_has_the_exact_interval_of_its_share() -> None:
    found = mean_interval([1.0] * 390 + [0.0] * 10)
    assert found.mean == 97.5
    assert binom.cdf(390, NUM_PROMPTS, found.high / 100) == pytest.approx(0.025, rel=1e-6)
    assert binom.sf(389, NUM_PROMPTS, found.low / 100) == pytest.approx(0.025, rel=1e-6)
    assert mean_interval([1.0] * 20).high == 100.0


def test_pairing_cancels_what_prompts_have_in_common() -> None:
    baseline = [1.0, 0.0] * 200
    method = [0.0, *baseline[1:]]
    paired, alone = paired_interval(method, baseline), mean_interval(method)
    assert paired.high - paired.low < 0.5 * (alone.high - alone.low)


def test_equal_scores_are_no_proof_of_equality() -> None:
    few, many = paired_interval([1.0] * 20, [1.0] * 20), paired_interval([0.5] * 400, [0.5] * 400)
    assert few.mean == many.mean == 0
    assert not within(few, 1.0)
    assert within(many, 1.0)
    assert (few.kind, many.kind) == (EXACT, BOOTSTRAP)
    assert many.low == interval_of_counts(0, 0, 400).low


@pytest.mark.parametrize(("shift", "covers"), [(0.0, True), (1.0, False)])
def test_the_bootstrap_covers_the_true_difference_of_fractional_scores_and_no_other(shift: float, covers: bool) -> None:
    random = np.random.default_rng(1)
    baseline = random.integers(8, 17, (NUM_RUNS, NUM_PROMPTS)) / 16
    method = baseline - (random.random((NUM_RUNS, NUM_PROMPTS)) < 0.4) / 16  # 2.5 points lost
    found = [paired_interval(one, other) for one, other in zip(method, baseline, strict=True)]
    assert {one.kind for one in found} == {BOOTSTRAP}
    covered = sum(one.low <= -2.5 - shift <= one.high for one in found) / NUM_RUNS
    assert (COVERAGE_95[0] < covered < COVERAGE_95[1]) == covers


@pytest.mark.parametrize("values", [(0.0, 1.0), (0.0, 0.25, 0.5, 1.0)])
def test_counted_differences_have_the_interval_of_the_scores_that_they_were_counted_of(
    values: tuple[float, ...],
) -> None:
    draw = np.random.default_rng(5)
    method, exact = draw.choice(values, 500), draw.choice(values, 500)
    points, counts = np.unique(100 * (method - exact), return_counts=True)
    wanted = paired_interval(method.tolist(), exact.tolist())
    assert pooled_interval(dict(zip(points.tolist(), counts.tolist(), strict=True))) == wanted
    with pytest.raises(ValueError, match="1 prompts"):
        pooled_interval({0.0: 1})


def test_lists_that_do_not_pair_are_refused() -> None:
    with pytest.raises(ValueError, match="pair the same prompts"):
        paired_interval([1.0, 0.0, 1.0], [1.0, 1.0])
    with pytest.raises(ValueError, match="at least 2"):
        paired_interval([1.0], [1.0])
