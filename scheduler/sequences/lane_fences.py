"""Choose the lane in which a sequence steps, and fence steps that must wait for the other lane.

Rows that wait for the host step in a lane of their own, so that the device can run others meanwhile. Invariant: memory
that steps in flight in one lane may use is taken by no unfenced step of the other.
"""

from collections.abc import Collection, Iterable
from enum import Enum

from gpu.step import HostRead, Lane


class Rows(Enum):
    """The kind of rows of a decode step, whose time is learnt by kind: without host reads, with host reads, or both."""

    DEVICE = 0
    HOST = 1
    JOINT = 2


def rows_of(lane: Lane, host_reads: Collection[HostRead | None]) -> Rows:
    """Return the kind of a step's rows by what each reads in host memory."""
    if lane is Lane.DEVICE or all(read is None for read in host_reads):
        return Rows.DEVICE
    return Rows.JOINT if None in host_reads else Rows.HOST


class Lanes:
    """The lanes of the device, and when a step is fenced. lanes: those that there are, `Lane.DEVICE` among them; with
    one alone nothing is ever fenced.
    """

    def __init__(self, lanes: Iterable[Lane]) -> None:
        self.all = tuple(lanes)
        assert Lane.DEVICE in self.all
        self._stale: set[Lane] = set()  # memory that the other lane's steps may use has been given back
        self._behind: set[Lane] = set()  # whose next step is fenced, whatever it takes

    def lane_of(self, reads_host: bool, joins: bool) -> Lane:
        """Return the lane of a sequence that reads host memory (`reads_host`) or joins rows that do (`joins`)."""
        return Lane.HOST if len(self.all) > 1 and (reads_host or joins) else Lane.DEVICE

    def give_back(self, lane: Lane) -> None:
        """Note that slots, pages or contexts that steps in this lane use belong to nobody any more."""
        self._stale |= set(self.all) - {lane}

    def move(self) -> None:
        """Note that a plan changes what steps of any lane read: the next step of each lane is fenced."""
        self._behind |= set(self.all)

    def fence(self, lane: Lane, *, is_other_busy: bool, takes: bool, comes: bool) -> bool:
        """Return whether a launched step of this lane is fenced. is_other_busy: steps of the other lane are in flight;
        takes: it takes slots or pages; comes: a row of it stepped in the other lane last.
        """
        is_fenced = is_other_busy and (comes or lane in self._behind or (takes and lane in self._stale))
        if is_fenced or not is_other_busy:
            self._stale.discard(lane)
            self._behind.discard(lane)
        return is_fenced
