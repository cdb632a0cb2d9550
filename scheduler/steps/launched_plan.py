"""Hold a launched plan, with what reading its result needs."""

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
    """The first blocks of a context that are in host memory once a plan is carried out."""

    sequence: Sequence
    context: HostContext
    num_blocks: int

    @classmethod
    def of(cls, sequence: Sequence) -> "OffloadedRun":
        """Return all blocks of the sequence's context that are planned to be in host memory."""
        assert sequence.context is not None
        return cls(sequence, sequence.context, sequence.context.num_blocks)


@dataclass(frozen=True, slots=True)
class LaunchedPlan:
    """A launched plan whose result has not arrived.

    slots: the sequence that held each slot. drawing: the sequences that draw. numbers: by slot, the number of the draw,
    if it is masked. rows, load: the kind of its rows, and what they read. num_rows: all of its rows. num_known: its
    rows of forced and drafted tokens. drafts: drafted tokens, by slot. unit_contexts: prompt tokens up to the end of
    each unit. offloaded: the contexts that it offloads. fetches: whether it reloads pages.
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
        """Return the masked rows by slot; None: a mask depends on a draw whose result has not arrived.

        drafted: returns, by slot, the tokens that the device drafted.
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
