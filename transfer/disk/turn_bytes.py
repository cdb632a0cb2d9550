"""Count conversation turns by the bytes that each wrote to the disk, for a histogram. No torch."""

from bisect import bisect_left

MIB = 2**20
BOUNDS = (0, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, 1024 * MIB, 4096 * MIB)
"""Upper bounds of a turn's bytes; one more count is of turns with more bytes."""


class TurnBytes:
    """Counts of turns; `counts[i]` wrote at most `BOUNDS[i]` and more than the bound before. total: bytes of all."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        self.total = 0

    def add(self, num_bytes: int) -> None:
        self.counts[bisect_left(BOUNDS, num_bytes)] += 1
        self.total += num_bytes
