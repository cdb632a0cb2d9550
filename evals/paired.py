"""Differences over the same prompts, with their intervals: what 'within x points' means wherever it is said.

It knows numbers only. Scores are per prompt in [0, 1]; differences are in points (per cent). The invariant: two lists
are compared prompt by prompt, never by their means alone, so the spread between prompts cancels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np

LEVEL = 0.95
NORMAL_QUANTILE = 1.959963984540054
SLACK_POINTS = 1.0
NUM_RESAMPLES = 4000
FEWEST_PROMPTS = 2
ADVISED_PROMPTS = 400


@dataclass(frozen=True)
class Paired:
    """method minus baseline, in points: mean, and the 95 % interval [low, high], over num_prompts prompts."""

    mean: float
    low: float
    high: float
    num_prompts: int

    def within(self, points: float) -> bool:
        """Whether the method loses at most `points`: the interval's lower end is above -(points + 1)."""
        return self.low > -(points + SLACK_POINTS)

    def __str__(self) -> str:
        return f"{self.mean:+.1f} [{self.low:+.1f}, {self.high:+.1f}]"


def differences(method: Sequence[float], baseline: Sequence[float]) -> np.ndarray:
    """method - baseline in points, float64 [prompts]; raises ValueError for unequal or too short lists."""
    if len(method) != len(baseline):
        raise ValueError(f"paired scores: {len(method)} beside {len(baseline)}; pair the same prompts")
    if len(method) < FEWEST_PROMPTS:
        raise ValueError(f"paired scores: {len(method)} prompts, wanted at least {FEWEST_PROMPTS}")
    return 100.0 * (np.asarray(method, dtype=np.float64) - np.asarray(baseline, dtype=np.float64))


def normal_interval(method: Sequence[float], baseline: Sequence[float]) -> Paired:
    """The mean difference and its normal interval, of the differences' sample variance.

    Where all differences are equal the variance says nothing; by the rule of three, up to 3 of n prompts could still
    differ by 100 points, and the interval is that wide.
    """
    gaps = differences(method, baseline)
    num = len(gaps)
    mean, deviation = float(gaps.mean()), float(gaps.std(ddof=1))
    half = NORMAL_QUANTILE * deviation / sqrt(num) if deviation > 0 else 100.0 * 3.0 / num
    return Paired(mean, mean - half, mean + half, num)


def bootstrap_interval(method: Sequence[float], baseline: Sequence[float], seed: int) -> Paired:
    """The mean difference and its percentile bootstrap interval; prompts are resampled as pairs."""
    gaps = differences(method, baseline)
    if np.ptp(gaps) == 0:
        return normal_interval(method, baseline)
    values, counts = np.unique(gaps, return_counts=True)
    drawn = np.random.default_rng(seed).multinomial(len(gaps), counts / len(gaps), size=NUM_RESAMPLES)
    means = drawn @ values / len(gaps)  # [resamples]
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Paired(float(gaps.mean()), float(low), float(high), len(gaps))


def mean_interval(scores: Sequence[float]) -> Paired:
    """The mean of unpaired scores, in points, and its normal interval: what a table's noise is."""
    return normal_interval(scores, [0.0] * len(scores))
