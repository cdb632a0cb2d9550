"""A `PageRunner` whose lanes run side by side, as a device's do: what is launched runs some time later.

Each lane's plans run in order, and a fenced one behind all that were launched before it; else the order is drawn anew
in each run. So a page, slot or row that one lane takes from the other too early changes a text, or fails an assertion.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import numpy as np

from gpu.lanes import StepBuffers
from gpu.page_layout import PageLayout
from gpu.step import Lane, RingWrite, StepPlan, StepResult
from tests.scheduler.page_runner import PageRunner


@dataclass(eq=False)
class Launched:
    runner: "LaneRunner"
    plan: StepPlan
    number: int
    masks: dict[int, np.ndarray] | None
    result: StepResult | None = field(default=None)

    @property
    def is_over(self) -> bool:
        self.runner.run_some()
        return self.result is not None

    def collect(self) -> StepResult:
        while self.result is None:
            self.runner.run_some()
        return self.result


class LaneRunner(PageRunner):
    def __init__(self, num_layers: int, page_tokens: int, layout: PageLayout, random: Random) -> None:
        super().__init__(num_layers, page_tokens, layout=layout)
        self.random = random
        self.waiting: dict[Lane, deque[Launched]] = {lane: deque() for lane in Lane}
        self.num_launched = 0
        self.decode_times = [0.0, 1e-3, 1e-2]  # of a decode step: one of these
        self.time_of: Callable[[StepPlan], float] = lambda plan: self.random.choice(self.decode_times)
        self.num_ahead = 0  # plans that ran before one of the other lane that was launched before them
        self.vacated: set[int] = set()
        self.closing: list[tuple[int, int]] = []  # contexts, and how many plans were launched before
        self.held_by: dict[tuple[str, int], int] = {}  # rings, and the slots that held them last
        self.buffers = StepBuffers()
        self.running = 0  # the number of the plan that runs

    def launch(self, plan: StepPlan) -> Launched:
        undrawn = [one.plan for one in self._all_waiting() if one.masks is None]
        assert not any(other.lane is plan.lane for other in undrawn)
        assert not undrawn or not (plan.is_fenced or plan.released_slots)
        self._note(plan)
        launched = Launched(self, plan, self.num_launched, None if plan.masked_slots else {})
        self.buffers.check(plan)
        self.buffers.note(plan, lambda: launched.result is not None)
        self.num_launched += 1
        self.waiting[plan.lane].append(launched)
        return launched

    def draw(self, step: Launched, masks: dict[int, np.ndarray]) -> None:
        assert step.masks is None
        step.masks = {slot: words.copy() for slot, words in masks.items()}  # as an upload has them

    def _all_waiting(self) -> list[Launched]:
        return [one for waiting in self.waiting.values() for one in waiting]

    def run_some(self) -> None:
        """The next plan of a lane that may run, perhaps."""
        firsts = [waiting[0] for waiting in self.waiting.values() if waiting]
        oldest = min((first.number for first in firsts), default=0)
        able = [first for first in firsts if first.number == oldest or not first.plan.is_fenced]
        able = [first for first in able if first.masks is not None]
        if not able or self.random.random() < 0.2:
            return
        chosen = self.random.choice(able)
        self.num_ahead += chosen.number != oldest
        self.waiting[chosen.plan.lane].popleft()
        self.decode_seconds = self.time_of(chosen.plan)
        self.running = chosen.number
        assert chosen.masks is not None
        chosen.result = self._carry_out(chosen.plan, chosen.masks)
        oldest = min((one.number for one in self._all_waiting()), default=self.num_launched)
        for context_id, _ in [one for one in self.closing if one[1] < oldest]:
            super()._close(context_id)
        self.closing = [one for one in self.closing if one[1] >= oldest]

    def _vacate(self, slot: int) -> None:
        """A step in flight of the other lane may still draw for whom it was, and nobody listens."""
        self.vacated.add(slot)

    def _enter(self, slot: int) -> None:
        if slot in self.vacated:
            self.vacated.remove(slot)
            super()._vacate(slot)
        self.held_by = {ring: holder for ring, holder in self.held_by.items() if holder != slot}  # they are over

    def _assign(self, write: RingWrite, plan: StepPlan) -> None:
        """Who held the ring has stepped for the last time."""
        before = self.held_by.get((write.part, write.ring))
        for one in (one for waiting in self.waiting.values() for one in waiting if one.number < self.running):
            assert before not in {slot for group in one.plan.decode for slot in group.slots}
        super()._assign(write, plan)
        self.held_by[write.part, write.ring] = write.slot

    def _held_pages(self) -> set[int]:
        """Not known: that a sequence has left may not have come to the lane that its slot is in."""
        return set()

    def _close(self, context_id: int) -> None:
        """What a step in flight reads is leased."""
        self.closing.append((context_id, self.num_launched - 1))
