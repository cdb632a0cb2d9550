"""What the result of a launched plan is read by."""

from collections.abc import Sequence as Many
from dataclasses import dataclass

from gpu.step import Unit
from scheduler.constraints.constraints import Constraint
from scheduler.sequences.lane_fences import Rows
from scheduler.sequences.offloaded_context import HostContext
from scheduler.sequences.sequence import Sequence, State
from scheduler.steps.grouping import Load

MaskedRow = tuple[Constraint, int, Many[int]]  # what holds it, the number of its draw, and the output before that


@dataclass(frozen=True, slots=True)
class DepositedRun:
    """The first blocks of a context are down once the plan is carried out."""

    sequence: Sequence
    context: HostContext
    num_blocks: int


def deposited_run(sequence: Sequence) -> DepositedRun:
    """All that is planned to be down of its context."""
    assert sequence.context is not None
    return DepositedRun(sequence, sequence.context, sequence.context.num_blocks)


@dataclass(slots=True)
class LaunchedPlan:
    """Who was in which slot, who drew and as which number of theirs, what rows it had, what they read and how many were
    of known tokens, where its units ended, what went down, and whether rows came up.
    """

    slots: dict[int, Sequence]
    drawing: dict[int, Sequence]
    numbers: dict[int, int]
    rows: Rows
    load: Load
    num_known: int
    units: Many[Unit]
    unit_contexts: list[int]
    runs: list[DepositedRun]
    fetches: bool

    def masked_rows(self) -> dict[int, MaskedRow] | None:
        """By slot, of those that are held to something. None: one depends on a draw whose result is not in."""
        rows: dict[int, MaskedRow] = {}
        for slot, one in self.drawing.items():
            if one.constraint is None or one.state is State.FINISHED:
                continue
            number = self.numbers[slot]
            if one.constraint.needs_output and len(one.output) + one.constraint.num_taken < number:
                return None
            rows[slot] = one.constraint, number, one.output
        return rows
