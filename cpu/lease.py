"""What steps under way read stays: a lease on segments, from when a step's asks are frozen to its last answer, and for
a device that reads by itself until it has passed the step.

It refuses to know steps and contexts. Invariant: a segment that is leased keeps its memory, which still counts
as used, whoever closes, merges or forks the contexts that it belongs to; then whoever ends the lease gives it back.
"""

from collections.abc import Sequence
from queue import SimpleQueue
from threading import Condition, Thread

from cpu.segment import Segment
from transfer.tier import Passed


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


class Loans:
    """Leases that end behind the device. One thread waits for it, from the first that is not over at once; the device
    passes their ends in the order in which they were given.
    """

    def __init__(self) -> None:
        self._ending: SimpleQueue[tuple[Lease, Passed] | None] = SimpleQueue()
        self._thread: Thread | None = None

    def begin(self, lease: Lease) -> "SegmentLoan":
        """The first finds all segments alive."""
        lease.begin()
        return SegmentLoan(lease, self)

    def end(self, lease: Lease, done: Passed) -> None:
        if self._thread is None:
            if done.query():
                lease.end()
                return
            self._thread = Thread(target=self._run, name="loans", daemon=True)
            self._thread.start()
        self._ending.put((lease, done))

    def shutdown(self) -> None:
        """Once the device has passed what was ended."""
        self._ending.put(None)
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while (ending := self._ending.get()) is not None:
            lease, done = ending
            done.synchronize()
            lease.end()


class SegmentLoan:
    """See `transfer.tier.Loan`."""

    def __init__(self, lease: Lease, loans: Loans) -> None:
        self._lease, self._loans = lease, loans

    def end(self, done: Passed) -> None:
        self._loans.end(self._lease, done)
