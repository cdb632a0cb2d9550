"""Draw the times at which requests of an open loop are due. Same seed, same times.

A Poisson process has exponential gaps (the gamma distribution of shape 1). With a shape below 1 requests come in
bursts, above 1 more regularly. The mean rate is the same.
"""

import numpy as np
from numpy.typing import NDArray

_BATCH = 1024


def draw_arrivals(
    rate: float, burstiness: float, seed: int, requests: int | None, duration_s: float | None
) -> NDArray[np.float64]:
    """Draw arrival times in seconds after the start, ascending, `[requests]`, or all that are before `duration_s`.

    rate: mean requests per second. burstiness: the gamma shape of the gaps. Exactly one of requests and duration_s is
    given.
    """
    rng = np.random.default_rng([seed, 0xA221])
    if requests is not None:
        return np.cumsum(rng.gamma(burstiness, 1 / (rate * burstiness), requests))
    assert duration_s is not None
    times = np.zeros(0)
    while not times.size or times[-1] < duration_s:
        gaps = rng.gamma(burstiness, 1 / (rate * burstiness), _BATCH)
        times = np.concatenate([times, (times[-1] if times.size else 0.0) + np.cumsum(gaps)])
    return times[times < duration_s]
