"""Choose the lane in which a sequence steps, and fence steps that must wait for the other lane.

Rows that wait for the host step in a lane of their own, so that the device can run others meanwhile. Invariant: an
unfenced step takes no memory that steps in flight in the other lane may use.
"""

from collections.abc import Collection, Iterable
from enum import Enum

from gpu.step import HostRead, Lane


class Rows(Enum):
    """The kind of a decode step, whose time is learnt by kind: rows without host reads, with host reads, or both."""

    DEVICE = 0
    HOST = 1
    JOINT = 2


def rows_of(lane: Lane, host_reads: Collection[HostRead | None]) -> Rows:
    """Return the kind of a decode step, given what each row reads in host memory."""
    if lane is Lane.DEVICE or all(read is None for read in host_reads):
        return Rows.DEVICE
    return Rows.JOINT if None in host_reads else Rows.HOST


class Lanes:
    """The lanes of the device, and whether a step is fenced. lanes: those of the device, `Lane.DEVICE` among them; with
    only one, no step is ever fenced.
    """

    def __init__(self, lanes: Iterable[Lane]) -> None:
        self.all = tuple(lanes)
        assert Lane.DEVICE in self.all
        self._stale: set[Lane] = set()  # lanes that may be given memory which steps of the other lane still use
        self._behind: set[Lane] = set()  # lanes whose next step is fenced in any case

    def lane_of(self, reads_host: bool, joins: bool) -> Lane:
        """Return the lane of a sequence that reads host memory (`reads_host`) or joins rows that do (`joins`)."""
        return Lane.HOST if len(self.all) > 1 and (reads_host or joins) else Lane.DEVICE

    def give_back(self, lane: Lane) -> None:
        """Note that slots, pages or contexts were freed that steps in this lane may still use."""
        self._stale |= set(self.all) - {lane}

    def move(self) -> None:
        """Note that a plan changes what steps of any lane read, so that the next step of each lane is fenced."""
        self._behind |= set(self.all)

    def fence(self, lane: Lane, *, is_other_busy: bool, takes: bool, comes: bool) -> bool:
        """Return whether a step of this lane, which is about to be launched, is fenced.

        is_other_busy: steps of the other lane are in flight. takes: the step takes slots or pages. comes: one of its
        rows last stepped in the other lane.
        """
        is_fenced = is_other_busy and (comes or lane in self._behind or (takes and lane in self._stale))
        if is_fenced or not is_other_busy:
            self._stale.discard(lane)
            self._behind.discard(lane)
        return is_fenced
