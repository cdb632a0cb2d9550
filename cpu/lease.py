"""Hold leases on the segments that steps read: from the start of a step to its last answer, or, where the device itself
reads them, until the device has passed the step.

A leased segment keeps its memory, which still counts as used, even if its contexts are closed, merged or forked. The
end of the last lease releases it.
"""

from collections.abc import Sequence
from queue import SimpleQueue
from threading import Thread

from cpu.segment import Segment
from cpu.segment_store import SegmentStore
from transfer.host_tier import Passed


class Lease:
    """A lease on segments of a store, for any number of steps at once. Any thread may begin or end one."""

    def __init__(self, segments: Sequence[Segment], store: SegmentStore) -> None:
        self._segments, self._store = segments, store
        self._count = 0

    def begin(self) -> None:
        """Begin the lease for one more step. At the first call, all segments must be alive."""
        with self._store.changed:
            if self._count == 0:
                for segment in self._segments:
                    segment.hold()
            self._count += 1
            self._store.num_leases += 1

    def end(self) -> None:
        """End the lease for one step."""
        with self._store.changed:
            self._count -= 1
            self._store.num_leases -= 1
            if self._count == 0:
                for segment in self._segments:
                    segment.let_go()


class Loans:
    """Ends leases once the device has passed a point in its work. One thread waits for these points, in order."""

    def __init__(self) -> None:
        self._ending: SimpleQueue[tuple[Lease, Passed] | None] = SimpleQueue()
        self._thread: Thread | None = None

    def begin(self, lease: Lease) -> "SegmentLoan":
        """Begin a loan of a lease's segments, which must be alive."""
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
        """Stop once the device has passed the end of every loan."""
        self._ending.put(None)
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while (ending := self._ending.get()) is not None:
            lease, done = ending
            done.synchronize()
            lease.end()


class SegmentLoan:
    """A loan of segments; see `transfer.host_tier.Loan`."""

    def __init__(self, lease: Lease, loans: Loans) -> None:
        self._lease, self._loans = lease, loans

    def end(self, done: Passed) -> None:
        self._loans.end(self._lease, done)
