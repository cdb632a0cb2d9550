"""Choose whether a decode step that reads host memory runs as one batch or as two half batches in turns.

    one batch: D + H, because host and device wait for each other
    two halves in turns: max(D + A, H), because the device reads the weights twice, and only the faster side waits

D and H are the seconds of the device and of the host in a step, and A is the part of D that reads weights. So two half
batches are faster if H is longer than A. Times of whole steps are not compared, because they vary more with contexts
than either way could gain. One thread chooses; another may report times, a step later, and only it writes them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from gpu.batching.step_reads import StepReads
from gpu.step import HostRead

FEWEST_ROWS = 2  # with a single row there is no second half to compute meanwhile
_SMOOTHING = 0.5
_RETRY_STEPS = 128  # of each so many steps of a size one runs whole, since only whole steps measure D


def step_seconds(parts: int, device_s: float, reread_s: float, host_s: float) -> float:
    """Return the seconds of a step in `parts` parts. reread_s: seconds of the device to read weights a second time."""
    return device_s + host_s if parts == 1 else max(device_s + reread_s, host_s)


@dataclass(slots=True)
class _Size:
    """Times of steps with one number of rows. device_s, host_s: smoothed seconds; None: not measured yet."""

    steps: int = 0
    device_s: float | None = None
    host_s: float | None = None


class Halving:
    """Learns for each batch size whether halves are faster. always: a fixed number of parts, 1 or 2; None: by times."""

    def __init__(self, reads: StepReads, always: int | None = None) -> None:
        self.always = always
        self._reads = reads
        self._sizes: dict[int, _Size] = {}

    def choose(self, cells: Sequence[int], host_reads: Sequence[HostRead | None]) -> int:
        """Return how many parts the next step has, 1 or 2. cells[i]: row i's last cell. host_reads[i]: its host read.
        A step with adjacent rows of the same host read is not cut: the host reads it once for all of them.
        """
        rows = len(cells)
        if rows < FEWEST_ROWS or any(one is not None and one == other for one, other in pairwise(host_reads)):
            return 1
        if self.always is not None:
            return self.always
        size = self._sizes.setdefault(rows, _Size())
        size.steps += 1
        if size.device_s is None or size.host_s is None or size.steps % _RETRY_STEPS == 0:
            return 1
        reread_s = size.device_s * self._reads.reread_share(cells, host_reads)
        one, two = (step_seconds(parts, size.device_s, reread_s, size.host_s) for parts in (1, 2))
        return 2 if two < one else 1

    def observe(self, rows: int, parts: int, waited_s: float, attended_s: float) -> None:
        """Note the seconds of a step on each side, as in `transfer.host_tier.Answered`. In a step of one part, the
        host's waiting time is all of the device's time.
        """
        size = self._sizes.get(rows)
        if size is None:
            return
        size.host_s = _smooth(size.host_s, attended_s)
        if parts == 1:
            size.device_s = _smooth(size.device_s, waited_s)


def cut(rows: int, parts: int) -> list[slice]:
    """Cut a batch's rows into one or two parts; the first has the odd row."""
    if parts == 1:
        return [slice(0, rows)]
    middle = -(-rows // 2)
    return [slice(0, middle), slice(middle, rows)]


def most_rows_of_parts(max_rows: int) -> list[int]:
    """Return the most rows that each part may have, in batches of up to `max_rows`, cut or not."""
    return [max_rows, max_rows // 2] if max_rows >= FEWEST_ROWS else [max_rows]


def _smooth(known: float | None, seen: float) -> float:
    return seen if known is None else known + _SMOOTHING * (seen - known)
