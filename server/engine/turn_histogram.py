"""Show in `/metrics` the bytes that turns wrote to disk, summed over the engine's processes."""

from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from transfer.disk.turn_bytes import BOUNDS


class TurnHistogram(Collector):
    """A histogram whose counts come by bucket, as `TurnBytes` has them."""

    def __init__(self, name: str, description: str) -> None:
        self._name, self._description = name, description
        self._counts = [0] * (len(BOUNDS) + 1)
        self._num_bytes = 0

    def add(self, counts: Sequence[int], num_bytes: int) -> None:
        """Add turns by bucket, and their bytes together."""
        self._counts = [before + more for before, more in zip(self._counts, counts, strict=True)]
        self._num_bytes += num_bytes

    def collect(self) -> Iterable[HistogramMetricFamily]:
        bounds = [*(f"{bound:.1f}" for bound in BOUNDS), "+Inf"]
        buckets = list(zip(bounds, map(float, accumulate(self._counts)), strict=True))
        yield HistogramMetricFamily(self._name, self._description, buckets, self._num_bytes)
