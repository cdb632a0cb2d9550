"""A launched plan, with what is needed to read its result."""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass

from gpu.step import TO_DRAFT, Unit
from scheduler.constraints.constraints import MaskedRow
from scheduler.sequences.lane_fences import Rows
from scheduler.sequences.offloaded_context import HostContext
from scheduler.sequences.sequence import Sequence, State
from scheduler.steps.grouping import Load


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
    drafts: tokens of drafts, by slot. unit_contexts: where each unit ended in its prompt. offloaded: what it offloads.
    fetches: whether it reloads pages.
    """

    slots: Mapping[int, Sequence]
    drawing: Mapping[int, Sequence]
    numbers: Mapping[int, int]
    rows: Rows
    load: Load
    num_known: int
    num_rows: int
    drafts: Mapping[int, tuple[int, ...]]
    units: tuple[Unit, ...]
    unit_contexts: tuple[int, ...]
    offloaded: tuple[OffloadedRun, ...]
    fetches: bool

    @property
    def num_drafted(self) -> int:
        return sum(map(len, self.drafts.values()))

    def masked_rows(self, drafted: Callable[[], Mapping[int, Many[int]]]) -> dict[int, MaskedRow] | None:
        """Return the masked rows by slot. None: a mask depends on a draw whose result is not in. drafted: tells the
        tokens of drafts that the device made, by slot.
        """
        rows: dict[int, MaskedRow] = {}
        on_device: Mapping[int, Many[int]] | None = None  # asked for once: it waits for the device
        for slot, one in self.drawing.items():
            if one.constraint is None or one.state is State.FINISHED:
                continue
            number = self.numbers[slot]
            if one.constraint.needs_output and len(one.output) + one.constraint.num_taken < number:
                return None
            draft: Many[int] = self.drafts.get(slot, ())
            if TO_DRAFT in draft and one.constraint.needs_output:
                on_device = drafted() if on_device is None else on_device
                draft = on_device[slot]
            rows[slot] = one.constraint, number, one.output, draft
        return rows
