"""What steps under way read stays: a lease on segments, from when a step's asks are frozen to its last answer.

It refuses to know steps, contexts and threads. Invariant: a segment that is leased keeps its memory, which still counts
as used, whoever closes, merges or forks the contexts that it belongs to; then whoever ends the lease gives it back.
"""

from collections.abc import Sequence
from threading import Condition

from cpu.segment import Segment


class Lease:
    """On segments, for any number of steps at once. changed: the store's condition. Any thread may begin or end one."""

    def __init__(self, segments: Sequence[Segment], changed: Condition) -> None:
        self._segments, self._changed = segments, changed
        self._count = 0

    def begin(self) -> None:
        """For one step more. The first finds all segments alive."""
        with self._changed:
            if self._count == 0:
                for segment in self._segments:
                    segment.hold()
            self._count += 1

    def end(self) -> None:
        """Of one step."""
        with self._changed:
            self._count -= 1
            if self._count == 0:
                for segment in self._segments:
                    segment.let_go()
