"""A plan that is launched and whose result is not in: what of it the result is read by.

Plain data, made when a plan is, and let go with its result. Refuses to know devices and the plan itself. Invariant:
what a draw is held to depends on nothing that is planned behind it.
"""

from collections.abc import Sequence as Many
from dataclasses import dataclass

from gpu.step import Unit
from scheduler.constraints import Constraint
from scheduler.grouping import Load
from scheduler.host_context import HostContext
from scheduler.lanes import Rows
from scheduler.sequence import Sequence, State

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
