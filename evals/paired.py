"""Compute differences over the same prompts, with their intervals.

Scores are per prompt in [0, 1]; differences are in points (per cent). Invariants: two lists are compared prompt by
prompt, never by their means alone, so that the prompts' own difficulty cancels. An interval of scores that are all 0 or
1 is exact: it covers the true value in at least 95 % of runs, whatever that is and however few prompts differ.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

LEVEL = 0.95
EACH_LEVEL = 1 - (1 - LEVEL) / 2
"""Level of the interval of losses and of that of gains, so that both hold together in 95 % of runs (Bonferroni)."""

NUM_RESAMPLES = 4000
SEED = 0
FEWEST_PROMPTS = 2
ADVISED_PROMPTS = 400
WHOLE = (-100.0, 0.0, 100.0)
"""Possible differences, in points, of scores that are 0 or 1."""

EXACT, BOOTSTRAP = "exact", "bootstrap"


@dataclass(frozen=True)
class Paired:
    """A mean in points and its 95 % interval [low, high], over num_prompts prompts.

    kind: EXACT or BOOTSTRAP. losses: prompts that the baseline has right and the method wrong; gains: the other way
    round. Both are None where scores are not all 0 or 1.
    """

    mean: float
    low: float
    high: float
    num_prompts: int
    kind: str
    losses: int | None
    gains: int | None

    def __str__(self) -> str:
        return f"{self.mean:+.1f} ({self.low:+.1f} … {self.high:+.1f})"


@lru_cache(maxsize=4096)
def clopper_pearson(num_hits: int, num: int, level: float) -> tuple[float, float]:
    """Return the exact interval of a share (Clopper and Pearson, 1934), in [0, 1].

    num_hits: successes seen in num trials.
    """
    from scipy.stats import beta  # half a second, which listing commands should not take

    tail = (1 - level) / 2
    low = beta.ppf(tail, num_hits, num - num_hits + 1) if num_hits else 0.0
    high = beta.ppf(1 - tail, num_hits + 1, num - num_hits) if num_hits < num else 1.0
    return float(low), float(high)


def interval_of_counts(losses: int, gains: int, num: int) -> Paired:
    """Return gains - losses of num prompts, in points. Each has a Clopper-Pearson interval of 97.5 %, so both hold
    together in 95 %.
    """
    (fewest_lost, most_lost), (fewest_gained, most_gained) = (
        clopper_pearson(count, num, EACH_LEVEL) for count in (losses, gains)
    )
    mean = 100.0 * (gains - losses) / num
    return Paired(
        mean, 100 * (fewest_gained - most_lost), 100 * (most_gained - fewest_lost), num, EXACT, losses, gains
    )  # fmt: skip


def paired_interval(method: Sequence[float], baseline: Sequence[float]) -> Paired:
    """Return method - baseline: exact if all scores are 0 or 1, else by bootstrap.

    Raises ValueError for lists of unequal length, or with too few scores.
    """
    scores, exact = as_scores(method), as_scores(baseline)
    if len(scores) != len(exact):
        raise ValueError(f"paired scores: {len(scores)} beside {len(exact)}; pair the same prompts")
    if is_binary(scores) and is_binary(exact):
        return interval_of_counts(int((scores < exact).sum()), int((scores > exact).sum()), len(scores))
    return bootstrap_interval(100 * (scores - exact), interval_of_counts(0, 0, len(scores)))


def mean_interval(scores: Sequence[float]) -> Paired:
    """Return the mean of one list of scores: Clopper-Pearson at 95 % if all are 0 or 1, else by bootstrap."""
    found = as_scores(scores)
    num, hits = len(found), int(found.sum())
    if not is_binary(found):
        return bootstrap_interval(100 * found, interval_of_counts(0, 0, num))
    low, high = clopper_pearson(hits, num, LEVEL)
    return Paired(100 * hits / num, 100 * low, 100 * high, num, EXACT, None, None)


def pooled_interval(differences: Mapping[float, int]) -> Paired:
    """Return the mean of paired differences, pooled over any tasks.

    differences: the number of prompts by their difference in points. The interval is exact if all are -100, 0 or 100,
    else by bootstrap. Raises ValueError for fewer than two prompts.
    """
    num = sum(differences.values())
    if num < FEWEST_PROMPTS:
        raise ValueError(f"paired differences: {num} prompts, wanted at least {FEWEST_PROMPTS}")
    if all(value in WHOLE for value in differences):
        return interval_of_counts(differences.get(-100.0, 0), differences.get(100.0, 0), num)
    return _bootstrap(*zip(*differences.items(), strict=True), interval_of_counts(0, 0, num))


def bootstrap_interval(points: np.ndarray, unseen: Paired) -> Paired:
    """Return the mean of float64 [prompts] in points and its percentile bootstrap interval, with a fixed seed.

    If all are equal, resampling gives no interval; it is then as wide as that of `unseen`, in which no prompt differs
    from the others. If few differ, the interval is narrower than it should be.
    """
    return _bootstrap(*np.unique(points, return_counts=True), unseen)


def _bootstrap(values: Sequence[float], counts: Sequence[int], unseen: Paired) -> Paired:
    found, times = np.asarray(values, np.float64), np.asarray(counts)
    num = int(times.sum())
    mean = float(found @ times / num)
    if np.ptp(found) == 0:
        return Paired(mean, mean + unseen.low, mean + unseen.high, num, BOOTSTRAP, None, None)
    means = np.random.default_rng(SEED).multinomial(num, times / num, size=NUM_RESAMPLES) @ found / num  # [resamples]
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Paired(mean, float(low), float(high), num, BOOTSTRAP, None, None)


def as_scores(scores: Sequence[float]) -> np.ndarray:
    """Return scores as float64 [prompts]. Raises ValueError for fewer than two."""
    if len(scores) < FEWEST_PROMPTS:
        raise ValueError(f"scores: {len(scores)} prompts, wanted at least {FEWEST_PROMPTS}")
    return np.asarray(scores, dtype=np.float64)


def is_binary(scores: np.ndarray) -> bool:
    """Return whether every score is 0 or 1."""
    return bool(np.isin(scores, (0.0, 1.0)).all())
