"""Measure the wall time of decode steps, with and without drafts, by their rows.

A step with drafts lasts until the next step can be launched, since that waits for its result. A step without drafts is
launched before the last one ends, and lasts from that step's end to its own. Steps with prefill units, or with other
sequences than the step before, are not counted. Old times are dropped, so that they are measured again.
"""

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from statistics import median

_KEPT = 5  # last times of which the median is used, so that one slow step does not matter
_MOST_AGE = 512  # steps
_FIRST_GUESS = 1.1  # assumed time of the smallest step with drafts before one has run, relative to a step without


@dataclass(slots=True)
class _Step:
    rows: Hashable  # its sequences; None: its time is not counted
    size: int
    has_drafts: bool
    launched_s: float
    before_s: float = 0.0  # time in which its drafts were made
    began_s: float = 0.0
    ended_s: float = 0.0  # 0: it still runs


class _Times:
    def __init__(self) -> None:
        self.age = 0
        self._last: deque[float] = deque(maxlen=_KEPT)

    def add(self, seconds: float) -> None:
        self._last.append(seconds)
        self.age = 0

    @property
    def seconds(self) -> float:
        return median(self._last)


def size_of(num_rows: int) -> int:
    """Return the size under which times of steps with `num_rows` rows are kept: the next power of two."""
    return 1 << (num_rows - 1).bit_length()


class StepTimes:
    """The times of one lane's steps. Its methods are called in the order of launches, and of results."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._times: dict[tuple[bool, int], _Times] = {}  # by whether there are drafts, and size
        self._launched: deque[_Step] = deque()
        self._newest: _Step | None = None
        self._ended: _Step | None = None

    def seconds(self, has_drafts: bool, num_rows: int) -> float | None:
        """Return the seconds of a step with so many rows; None: not measured."""
        times = self._times.get((has_drafts, size_of(num_rows)))
        return None if times is None else times.seconds

    def expect(self, num_rows: int, num_slots: int) -> float | None:
        """Return the seconds of a step with drafts, `num_rows` rows with them and `num_slots` without.

        They are measured, or extrapolated from the two next smaller sizes. None: unknown; try smaller sizes first.
        """
        seconds, plain, size = self.seconds(True, num_rows), self.seconds(False, num_slots), size_of(num_rows)
        if seconds is not None or plain is None:
            return seconds
        if size == size_of(num_slots + 1):
            return _FIRST_GUESS * plain
        half, quarter = self.seconds(True, size // 2), self.seconds(True, size // 4)
        if half is None:
            return None
        return half + (half - plain if quarter is None else 2 * (half - quarter))

    def launch(self, rows: Hashable, num_rows: int, has_drafts: bool, before_s: float = 0.0) -> None:
        """Note a launch. rows: the step's sequences; None: it has prefill units or no rows, and is not counted.

        before_s: the time in which its drafts were made, which counts for this step and not for the one before it.
        """
        now, last = self._clock(), self._newest
        if last is not None and last.has_drafts and last.ended_s and last.rows is not None and last.rows == rows:
            self._add(last, now - before_s - last.began_s + last.before_s)
        self._newest = _Step(rows, size_of(num_rows) if num_rows else 0, has_drafts, now, before_s)
        self._launched.append(self._newest)

    def end(self) -> None:
        """Note the result of the oldest step in flight."""
        now, step, last = self._clock(), self._launched.popleft(), self._ended
        step.began_s = step.launched_s if last is None else max(step.launched_s, last.ended_s)
        step.ended_s = now
        is_known = last is not None and step.rows is not None and last.rows == step.rows
        if last is not None and is_known and not (step.has_drafts or last.has_drafts):
            self._add(step, now - last.ended_s)
        self._ended = step

    def _add(self, step: _Step, seconds: float) -> None:
        for times in self._times.values():
            times.age += 1
        self._times.setdefault((step.has_drafts, step.size), _Times()).add(seconds)
        self._times = {key: times for key, times in self._times.items() if times.age < _MOST_AGE}
