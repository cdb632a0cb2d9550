"""A launched plan, with what is needed to read its result."""

from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass

from gpu.step import Unit
from scheduler.constraints.constraints import Constraint
from scheduler.sequences.lane_fences import Rows
from scheduler.sequences.offloaded_context import HostContext
from scheduler.sequences.sequence import Sequence, State
from scheduler.steps.grouping import Load

MaskedRow = tuple[Constraint, int, Many[int]]  # the constraint, the number of the draw, and the output before it


@dataclass(frozen=True, slots=True)
class OffloadedRun:
    """The first blocks of a context, which are in host memory once the plan is carried out."""

    sequence: Sequence
    context: HostContext
    num_blocks: int

    @classmethod
    def of(cls, sequence: Sequence) -> "OffloadedRun":
        """Return all that is planned to be in host memory of the sequence's context."""
        assert sequence.context is not None
        return cls(sequence, sequence.context, sequence.context.num_blocks)


@dataclass(frozen=True, slots=True)
class LaunchedPlan:
    """A plan whose result is not in.

    slots: who held each slot. drawing: who draws in it; numbers: as which of their draws, where masked. rows, load: the
    kind of its rows and what they read; num_rows: all of its rows; num_known: those of known and drafted tokens;
    drafted: tokens of drafts, by slot. unit_contexts: where each unit ended in its prompt. offloaded: what it offloads.
    fetches: whether it reloads pages.
    """

    slots: Mapping[int, Sequence]
    drawing: Mapping[int, Sequence]
    numbers: Mapping[int, int]
    rows: Rows
    load: Load
    num_known: int
    num_rows: int
    drafted: Mapping[int, int]
    units: tuple[Unit, ...]
    unit_contexts: tuple[int, ...]
    offloaded: tuple[OffloadedRun, ...]
    fetches: bool

    def masked_rows(self) -> dict[int, MaskedRow] | None:
        """Return the masked rows by slot. None: a mask depends on a draw whose result is not in."""
        rows: dict[int, MaskedRow] = {}
        for slot, one in self.drawing.items():
            if one.constraint is None or one.state is State.FINISHED:
                continue
            number = self.numbers[slot]
            if one.constraint.needs_output and len(one.output) + one.constraint.num_taken < number:
                return None
            rows[slot] = one.constraint, number, one.output
        return rows
