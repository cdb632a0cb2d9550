"""Which lane of the device a sequence steps in, and when a lane's step must wait for what the other one has in flight.

Rows that wait for the host step in a lane of their own, so that the device has something else to do meanwhile: rows
that ask nothing, which would wait with them, and units. It refuses to know plans: it is told what they take, give and
move.
Invariant: memory that steps in flight in one lane may use is taken by no step of the other that is not fenced.
"""

from collections.abc import Collection, Iterable, Mapping
from enum import Enum

from gpu.step import HostAsk, Lane

JOINT_SECONDS = 1.3  # of a step with rows that ask nothing: at most so many times theirs alone
JOIN_SECONDS = 1.2  # they join where it is expected to be no more, so that noise about the bound moves nobody
DWELL_STEPS = 16  # of those that ask, at the least, until they join or part again
LONGEST_STEPS = 512  # likewise, at the most, on what was learnt before: then it is learnt anew


class Rows(Enum):
    """Of a decode step, whose time is learnt: those of `Lane.DEVICE`, or that could step there; those that ask, alone
    or with others that ask nothing.
    """

    DEVICE = 0
    ASKING = 1
    JOINT = 2


def rows_of(lane: Lane, asks: Collection[HostAsk | None]) -> Rows:
    """asks: of a step's rows."""
    if lane is Lane.DEVICE or all(ask is None for ask in asks):
        return Rows.DEVICE
    return Rows.JOINT if None in asks else Rows.ASKING


class Lanes:
    """lanes: those that there are, `Lane.DEVICE` among them; with one alone nothing is ever fenced.

    `is_joint`: rows that ask nothing share the step of those that ask, which reads the weights once for all.
    """

    def __init__(self, lanes: Iterable[Lane]) -> None:
        self.all = tuple(lanes)
        assert Lane.DEVICE in self.all
        self.is_joint = False
        self._num_steps = 0  # of rows that ask, since they joined or parted
        self._added_seconds = 0.0  # by rows that joined, when they did last
        self._stale: set[Lane] = set()  # memory that the other lane's steps may use has been given back
        self._behind: set[Lane] = set()  # whose next step is fenced, whatever it takes

    def lane_of(self, asks: bool, joins: bool) -> Lane:
        """Of a sequence that asks the host, or one that asks nothing and joins those that do, or does not."""
        return Lane.HOST if len(self.all) > 1 and (asks or joins) else Lane.DEVICE

    def weigh(self, decode_seconds: Mapping[Rows, float]) -> None:
        """A step of rows that ask is over: whether others join them from now on, which they do only where that makes
        them wait little. decode_seconds: of a step, learnt; 0: nothing is known.

        What a joint step would take is what those that ask take now, and what the others added when they joined last.
        """
        self._num_steps += 1
        if self._num_steps < DWELL_STEPS:
            return
        alone, asking, joint = (decode_seconds[rows] for rows in Rows)
        is_old = self._num_steps >= LONGEST_STEPS
        if self.is_joint:
            changes = is_old or joint > JOINT_SECONDS * alone
        else:
            changes = 0 < asking + (0.0 if is_old else self._added_seconds) <= JOIN_SECONDS * alone
        if changes:
            self._added_seconds = max(joint - asking, 0.0) if self.is_joint else self._added_seconds
            self.is_joint, self._num_steps = not self.is_joint, 0

    def give_back(self, lane: Lane) -> None:
        """Slots, pages or contexts that steps in this lane use belong to nobody any more."""
        self._stale |= set(self.all) - {lane}

    def move(self) -> None:
        """A plan changes what steps of any lane read: it must be fenced, and so must the next one of the other lane."""
        self._behind |= set(self.all)

    def fence(self, lane: Lane, *, is_other_busy: bool, takes: bool, comes: bool) -> bool:
        """Whether a step of this lane, which is launched, is fenced. is_other_busy: steps of the other lane are in
        flight; takes: it takes slots or pages; comes: a row of it stepped in the other lane last.
        """
        is_fenced = is_other_busy and (comes or lane in self._behind or (takes and lane in self._stale))
        if is_fenced or not is_other_busy:
            self._stale.discard(lane)
            self._behind.discard(lane)
        return is_fenced
