"""Draw the times at which requests of an open loop are due. Same seed, same times.

A Poisson process has exponential gaps (the gamma distribution of shape 1). A shape below 1 comes in bursts, one above 1
is more regular; the mean rate is the same.
"""

import numpy as np
from numpy.typing import NDArray

_BATCH = 1024


def draw_arrivals(
    rate: float, burstiness: float, seed: int, requests: int | None, duration_s: float | None
) -> NDArray[np.float64]:
    """Draw arrival times in seconds after the start, ascending, `[requests]` or all those before `duration_s`.

    rate: mean requests per second; burstiness: the gamma shape of the gaps. One of requests and duration_s is given.
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
