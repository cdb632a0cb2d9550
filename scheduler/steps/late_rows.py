"""Leave rows out of a decode step while the host cannot answer for them yet.

Invariant: no row is left out of more than `MOST_STEPS` steps in a row. If a step has nothing else to do, it waits.
"""

from collections.abc import Callable

from gpu.step import HostRead
from scheduler.sequences.sequence import Sequence

MOST_STEPS = 2048  # of decode: tables of a 96K context take 7 s of one core beside streams, and who waits stalls all

IsReady = Callable[[HostRead], bool]
Row = tuple[Sequence, HostRead | None]


class LateRows:
    """`num_left_out`: rows of steps, since the start."""

    def __init__(self) -> None:
        self.num_left_out = 0

    def take_out(self, rows: list[Row], is_ready: IsReady, is_busy: bool) -> list[Row]:
        """The rows that are not late, in order. `is_busy`: there is something else to do meanwhile; if not, and all are
        late, the one stays that has waited longest.
        """
        late = [row for row in rows if _is_late(row, is_ready)]
        if late and not is_busy and len(late) == len(rows):
            late.remove(max(late, key=lambda row: row[0].num_left_out))
        return [row for row in rows if row not in late]

    def count(self, rows: list[Row], taken: list[Row]) -> None:
        """A step of the rows that were taken, of all of these, is launched."""
        taking = {sequence for sequence, _ in taken}
        for sequence, _ in rows:
            sequence.num_left_out = 0 if sequence in taking else sequence.num_left_out + 1
        self.num_left_out += len(rows) - len(taken)


def _is_late(row: Row, is_ready: IsReady) -> bool:
    sequence, ask = row
    return ask is not None and sequence.num_left_out < MOST_STEPS and not is_ready(ask)
