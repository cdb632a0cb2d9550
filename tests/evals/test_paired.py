"""Paired intervals cover the truth as often as they say, and the verdict of 'within x points' can fail."""

import numpy as np
import pytest

from evals.paired import Paired, bootstrap_interval, mean_interval, normal_interval
from tests.tolerances import COVERAGE_95, VERDICT_POWER

NUM_RUNS = 2_000
NUM_PROMPTS = 400


def draw_pair(random: np.random.Generator, exact: float, lost: float, num: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores of full attention, and of a method that loses each right answer with probability `lost`."""
    baseline = (random.random(num) < exact).astype(float)
    return baseline * (random.random(num) >= lost), baseline


def test_normal_interval_covers_the_true_difference_95_times_in_100() -> None:
    random = np.random.default_rng(0)
    covered = 0
    for _ in range(NUM_RUNS):
        paired = normal_interval(*draw_pair(random, 0.9, 0.1, NUM_PROMPTS))
        covered += paired.low <= -9.0 <= paired.high
    assert COVERAGE_95[0] < covered / NUM_RUNS < COVERAGE_95[1]


def test_bootstrap_interval_covers_the_true_difference_95_times_in_100() -> None:
    random = np.random.default_rng(1)
    covered = 0
    for seed in range(NUM_RUNS):
        paired = bootstrap_interval(*draw_pair(random, 0.9, 0.1, NUM_PROMPTS), seed=seed)
        covered += paired.low <= -9.0 <= paired.high
    assert COVERAGE_95[0] < covered / NUM_RUNS < COVERAGE_95[1]


def test_a_shifted_truth_is_not_covered() -> None:
    random = np.random.default_rng(2)
    covered = 0
    for _ in range(NUM_RUNS):
        paired = normal_interval(*draw_pair(random, 0.9, 0.1, NUM_PROMPTS))
        covered += paired.low <= -13.0 <= paired.high
    assert covered / NUM_RUNS < COVERAGE_95[0]


def test_a_loss_of_four_points_does_not_pass_as_within_one() -> None:
    random = np.random.default_rng(3)
    refused = sum(not normal_interval(*draw_pair(random, 1.0, 0.04, NUM_PROMPTS)).within(1.0) for _ in range(NUM_RUNS))
    assert refused / NUM_RUNS > VERDICT_POWER


def test_no_loss_passes_as_within_one() -> None:
    random = np.random.default_rng(4)
    passed = sum(normal_interval(*draw_pair(random, 0.9, 0.002, NUM_PROMPTS)).within(1.0) for _ in range(NUM_RUNS))
    assert passed / NUM_RUNS > VERDICT_POWER


def test_pairing_cancels_what_prompts_have_in_common() -> None:
    random = np.random.default_rng(5)
    method, baseline = draw_pair(random, 0.5, 0.02, NUM_PROMPTS)
    paired, alone = normal_interval(method, baseline), mean_interval(method)
    assert paired.high - paired.low < 0.5 * (alone.high - alone.low)


def test_equal_scores_are_no_proof_of_equality() -> None:
    few, many = normal_interval([1.0] * 20, [1.0] * 20), bootstrap_interval([1.0] * 400, [1.0] * 400, seed=0)
    assert few.mean == many.mean == 0
    assert not few.within(1.0)
    assert many.within(1.0)


def test_the_verdict_is_the_lower_end_alone() -> None:
    assert Paired(-1.0, -1.9, -0.1, 400).within(1.0)
    assert not Paired(1.0, -2.1, 4.1, 400).within(1.0)


def test_lists_that_do_not_pair_are_refused() -> None:
    with pytest.raises(ValueError, match="pair the same prompts"):
        normal_interval([1.0, 0.0], [1.0])
    with pytest.raises(ValueError, match="at least 2"):
        normal_interval([1.0], [1.0])
